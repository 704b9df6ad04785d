"""Block verification: decides about all tokens of a round together, and accepts never fewer than the token rule.

On a chain this is the rule of arXiv 2403.10444 (Algorithm 2), on a tree traversal verification (arXiv 2505.12398): from
the deepest first child upwards, every node is either the end of the accepted path or is taken out of the tree, and what
the target has beyond its distribution goes to its younger siblings and to its parent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.errors import OptionError
from specdec.select import noise
from specdec.select.rejection import Rejection, draft_distribution, siblings
from specdec.select.rules import generated
from specdec.types import Row, Scores, Step, Tree


@dataclass(frozen=True)
class _Verdict:
    """What a round will emit, decided at its first step: `tokens[i]` from `processed[i]`, after `base` others."""

    scores: Scores
    base: int
    tokens: list[int]
    processed: list[Tensor]


def child_weight(weight: float, p: Tensor, q: Tensor, token: int) -> float:
    """The chance that the path goes on through `token`, which was drawn from `q`, given its parent's weight and p."""
    ours, theirs = weight * float(p[token]), float(q[token])
    return min(ours / theirs, 1.0) if theirs > 0 else float(ours > 0)


def without_child(weight: float, p: Tensor, q: Tensor) -> tuple[float, Tensor]:
    """A node's weight and p once a child that was drawn from `q` is out."""
    excess = (weight * p - q).clamp_(min=0.0)
    mass = float(excess.sum())
    rest = mass + 1.0 - weight
    return mass / rest if rest > 0 else 1.0, excess / mass if mass > 0 else p


@dataclass(eq=False, repr=False)
class Block(Rejection):
    """Block verification of drawn chains, traversal verification of drawn trees; the token rule on guesses.

    The first step of a round looks ahead along the tree, so the processors must be pure, or OptionError is raised.
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
            if not _is_drawn(scores.tree, node):
                return super().advance(row, new, scores, node)
            self._verdict = verdict = self._judge(row, new, scores, node, 1.0, [], [])
            assert verdict is not None  # the end of the text is always accepted
        at = len(new) - verdict.base
        if at < len(verdict.tokens):
            return self.step(verdict.tokens[at], scores, node, verdict.processed[at])
        # The last token came from the residual and happened to be the draft's: its target scores are there, but
        # the rest of the tree has been judged already and may not be looked at again.
        processed = self.processed(row, new, scores, node)
        token = noise.draw(processed, noise.key(self.seed, noise.DRAW, generated(row), len(new)))
        return self.step(token, scores, node, processed)

    def _judge(
        self, row: Row, new: list[int], scores: Scores, node: int, weight: float, path: list[int], above: list[Tensor]
    ) -> _Verdict | None:
        """What is emitted if the path ends at `node` or below it; None if it does not.

        `path` are the tokens that lead to the node, `above` the processed logits before each of them.
        """
        tree, start = scores.tree, generated(row)
        processed = [*above, self.processed(row, new + path, scores, node)]
        left = processed[-1]
        p = torch.softmax(left, dim=-1)
        for child in siblings(tree, node):
            token, drawn = tree.tokens[child], draft_distribution(tree, child)
            assert drawn is not None
            q = drawn.to(p.device)
            below = child_weight(weight, p, q, token)
            verdict = self._judge(row, new, scores, child, below, [*path, token], processed)
            if verdict is not None:
                return verdict
            weight, p = without_child(weight, p, q)
            left = p.log()
        address = noise.key(self.seed, noise.ACCEPT, start, len(new) + len(path), node)
        if path and not noise.uniform(address) < weight:
            return None
        final = noise.draw(left, noise.key(self.seed, noise.DRAW, start, len(new) + len(path)))
        return _Verdict(scores, len(new), [*path, final], processed)


def _is_drawn(tree: Tree, node: int) -> bool:
    """Whether there are nodes after `node`, and all were drawn from the draft."""
    after = range(node + 1, len(tree))
    return bool(after) and all(draft_distribution(tree, one) is not None for one in after)
