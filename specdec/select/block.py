"""Block verification: decides about all tokens of a chain together, and accepts never fewer than the token rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.errors import OptionError
from specdec.select import noise
from specdec.select.rejection import Rejection, draft_distribution, residual
from specdec.select.rules import generated
from specdec.types import Row, Scores, Step, Tree


@dataclass(frozen=True)
class _Verdict:
    """What a round will emit, decided at its first step: `tokens[i]` from `processed[i]`, after `base` others."""

    scores: Scores
    base: int
    tokens: list[int]
    processed: list[Tensor]


def accept_chances(p: list[Tensor], q: list[Tensor], tokens: list[int]) -> tuple[list[float], list[float]]:
    """The chance that token i ends the accepted block, unless a later one does, and the weights `[k + 1]` of the path.

    `p` has k + 1 distributions `[vocab]`, `q` and `tokens` k; `weights[i]` belongs to i accepted tokens.
    """
    weights, chances = [1.0], []
    for i, token in enumerate(tokens):
        ours, theirs = float(p[i][token]), float(q[i][token])
        weight = min(weights[-1] * ours / theirs, 1.0) if theirs > 0 else float(ours > 0)
        weights.append(weight)
        if i + 1 == len(tokens):
            chances.append(weight)
            break
        excess = float((weight * p[i + 1] - q[i + 1]).clamp_(min=0.0).sum())
        rest = excess + 1.0 - weight
        chances.append(excess / rest if rest > 0 else 1.0)
    return chances, weights


@dataclass(eq=False, repr=False)
class Block(Rejection):
    """Block verification (arXiv 2403.10444, Algorithm 2) on drawn chains; the token rule on trees and guesses.

    The first step of a round looks ahead along the chain, so the processors must be pure, or OptionError is raised.
    """

    def __post_init__(self) -> None:
        if not self.processors.pure:
            raise OptionError(
                f'`sampling="block"` asks processors about text that may not come true, which {self.processors!r} may '
                'not allow: use `sampling="rejection"`'
            )
        self._verdict: _Verdict | None = None

    def advance(self, row: Row, new: list[int], scores: Scores, node: int) -> Step:
        """The next token after `node`, where `new` are the tokens already emitted in this round."""
        verdict = self._verdict
        if verdict is None or verdict.scores is not scores:
            q = _drawn_chain(scores.tree, node)
            if not q:
                return super().advance(row, new, scores, node)
            verdict = self._verdict = self._judge(row, new, scores, node, q)
        at = len(new) - verdict.base
        if at < len(verdict.tokens):
            return self.step(verdict.tokens[at], scores, node, verdict.processed[at])
        # The last token came from the residual and happened to be the draft's: its target scores are there, but
        # the rest of the chain has been judged already and may not be looked at again.
        processed = self.processed(row, new, scores, node)
        token = noise.draw(processed, noise.key(self.seed, noise.DRAW, generated(row), len(new)))
        return self.step(token, scores, node, processed)

    def _judge(self, row: Row, new: list[int], scores: Scores, node: int, q: list[Tensor]) -> _Verdict:
        """How many of the nodes after `node` are accepted, and the token that follows them."""
        tokens = scores.tree.tokens[node + 1 :]
        processed = [self.processed(row, new + tokens[:i], scores, node + i) for i in range(len(tokens) + 1)]
        p = [torch.softmax(one, dim=-1) for one in processed]
        q = [one.to(p[0].device) for one in q]
        chances, weights = accept_chances(p, q, tokens)
        start = generated(row)
        accepted = 0
        for i, chance in enumerate(chances):  # a failure does not end the block: a later success overrides it
            if noise.uniform(noise.key(self.seed, noise.ACCEPT, start, len(new) + i, 0)) < chance:
                accepted = i + 1
        left = processed[accepted]
        if accepted < len(tokens):
            left = residual(weights[accepted] * p[accepted], q[accepted]).log()
        final = noise.draw(left, noise.key(self.seed, noise.DRAW, start, len(new) + accepted))
        return _Verdict(scores, len(new), [*tokens[:accepted], final], processed)


def _drawn_chain(tree: Tree, node: int) -> list[Tensor]:
    """The distributions of the nodes after `node`, empty unless they are a chain drawn from the draft."""
    if not tree.is_chain:
        return []
    found = [draft_distribution(tree, after) for after in range(node + 1, len(tree))]
    return [q for q in found if q is not None] if all(q is not None for q in found) else []
