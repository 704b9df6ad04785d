"""Rejection sampling: accepts draws from the draft so that what comes out is distributed as the target."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.select import noise
from specdec.select.coupled import Coupled
from specdec.select.rules import SampledRule, generated
from specdec.types import DraftRule, Row, Scores, Step, Tree


def draft_distribution(tree: Tree, node: int) -> Tensor | None:
    """q `[vocab]` that `node` was drawn from, None for a guess."""
    if tree.q is None or not tree.q[node].numel():
        return None
    return tree.q[node]


def siblings(tree: Tree, node: int) -> list[int]:
    """The nodes that continue `node`, in the order in which they were drawn."""
    return [child for child in range(node + 1, len(tree)) if tree.parents[child] == node]


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What p has beyond q, normalised, `[vocab]`; p itself where rounding leaves nothing."""
    rest = (p - q).clamp_(min=0.0)
    mass = rest.sum()
    return rest / mass if mass > 0 else p


class Rejection(Coupled):
    """The token rule (arXiv 2211.17192, 2302.01318), with several children per node (arXiv 2305.09781, 2402.12374).

    `tree.q[c]` must be the distribution child c was drawn from given its elder siblings, and every drawn child must be
    in the tree. Guesses (`q=None`) are one-hot: then a draw from p that equals the guess accepts it, which is the same
    law as accepting with probability p[x] and falling back to p without x. Random numbers are functions of the seed,
    the tokens generated before the round and the place in it.
    """

    @property
    def rule(self) -> DraftRule:
        """The draft draws from q and tells it."""
        return SampledRule(self.processors.drafting, self.seed, self.width)

    def advance(self, row: Row, new: list[int], scores: Scores, node: int) -> Step:
        """The next token after `node`, where `new` are the tokens already emitted in this round."""
        processed = self.processed(row, new, scores, node)
        token = self._accepted(processed, scores.tree, node, (generated(row), len(new)))
        return self.step(token, scores, node, processed)

    def _accepted(self, processed: Tensor, tree: Tree, node: int, place: tuple[int, int]) -> int:
        """The first accepted child's token, or a draw from what p has beyond the children's distributions."""
        left = processed  # log-probabilities, up to a constant, of what may still come
        for order, child in enumerate(siblings(tree, node)):
            q, token = draft_distribution(tree, child), tree.tokens[child]
            if q is None:
                break
            p, q = torch.softmax(left, dim=-1), q.to(left.device)
            r = noise.uniform(noise.key(self.seed, noise.ACCEPT, *place, order))
            if r * float(q[token]) < float(p[token]):  # strict: p = 0 never passes; multiplied: q = 0 divides nothing
                return token
            left = residual(p, q).log()
        return noise.draw(left, noise.key(self.seed, noise.DRAW, *place))
