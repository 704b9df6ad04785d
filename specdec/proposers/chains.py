"""Chains of tokens as proposals: cut to a plan and to the target's vocabulary, and one for each leaf."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specdec.core.drafts import Plan, SequenceView, path_limit
from specdec.core.tree import Tree


def cut(tokens: list[int], confidence: list[float], seq: SequenceView, plan: Plan, source: str) -> Tree:
    """The longest chain of `tokens` that the plan keeps; the sequence's last token is left to the target."""
    kept: list[float] = []
    for chance in confidence[: path_limit(seq, plan)]:
        kept.append(chance)
        if not plan.keep(kept):
            kept.pop()
            break
    return Tree.chain(tokens[: len(kept)], kept, source=source)


def merge_chains(chains: Sequence[Tree]) -> Tree:
    """One proposal of a chain per leaf."""
    tokens: list[int] = []
    parents: list[int] = []
    for leaf, chain in enumerate(chains):
        parents += [-1 - leaf if parent < 0 else parent + len(tokens) for parent in chain.parents]
        tokens += chain.tokens
    confidence = [c for chain in chains for c in chain.confidence or ()]
    return Tree(tokens, parents, confidence, None, chains[0].source)


def known_tokens(tokens: list[int], vocab_size: int, ends: Collection[int]) -> list[int]:
    """`tokens` before the first outside the target's vocabulary, and no further than the first of `ends`."""
    for i, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            return tokens[:i]
        if token in ends:
            return tokens[: i + 1]
    return tokens
