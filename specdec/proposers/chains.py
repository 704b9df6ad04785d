"""Chains of tokens as proposals: cut to a budget and to the target's vocabulary, and one for each leaf."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from specdec.core.budget import Budget
from specdec.core.drafts import SequenceView, path_limit
from specdec.core.tree import Tree
from specdec.proposers.views import branch_tokens


def cut(tokens: list[int], confidence: list[float], seq: SequenceView, budget: Budget, source: str) -> Tree:
    """The longest chain of `tokens` that the budget keeps; the sequence's last token is left to the target."""
    sure = worthwhile(confidence[: path_limit(seq, budget)], budget)
    return Tree.chain(tokens[: len(sure)], sure, source=source)


def worthwhile(confidence: Sequence[float], budget: Budget, before: Sequence[float] = ()) -> list[float]:
    """The part of `confidence` up to the first token that does not pay, behind a path with the confidence `before`."""
    path = [*before]
    for chance in confidence:
        path.append(chance)
        if not budget.keep(path):
            path.pop()
            break
    return path[len(before) :]


def chain_per_leaf(
    seq: SequenceView, budget: Budget, source: str, guess: Callable[[list[int]], tuple[list[int], list[float]]]
) -> Tree:
    """A proposal with a chain from each leaf: what `guess` returns for the tokens from the text to the leaf, cut."""
    tokens: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    for number, leaf in enumerate(seq.leaves):
        chain = cut(*guess(branch_tokens(seq, leaf)), seq, budget, source)
        parents += [-1 - number if parent < 0 else parent + len(tokens) for parent in chain.parents]
        tokens += chain.tokens
        confidence += chain.confidence or ()
    return Tree(tokens, parents, confidence, source=source)


def valid_tokens(tokens: list[int], vocab_size: int, ends: Collection[int]) -> list[int]:
    """`tokens` before the first outside the target's vocabulary, and no further than the first of `ends`."""
    for i, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            return tokens[:i]
        if token in ends:
            return tokens[: i + 1]
    return tokens
