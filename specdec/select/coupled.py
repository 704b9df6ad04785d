"""Sampling whose output is a function of the seed alone: the same text with any draft, or none."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.select import noise
from specdec.select.base import Strategy
from specdec.select.rules import CoupledRule, GreedyRule, generated
from specdec.types import DraftRule, Row, Scores, Step


@dataclass(eq=False, repr=False)
class Coupled(Strategy):
    """Samples `argmax(log p + G)` with Gumbel noise G addressed by (seed, position, token id) (arXiv 2408.07978).

    p is the processed target distribution, the position counts generated tokens, and the draft guesses with the same
    G, so that it tends to agree: P(match) >= (1 - TV(p, q)) / (1 + TV(p, q)). `seed` belongs to the row.
    """

    seed: int

    @property
    def rule(self) -> DraftRule:
        """The draft guesses with the target's noise."""
        return CoupledRule(self.processors.drafting, self.seed, self.width)

    def advance(self, row: Row, new: list[int], scores: Scores, node: int) -> Step:
        """The next token after `node`, where `new` are the tokens already emitted in this round."""
        processed = self.processed(row, new, scores, node)
        token = noise.draw(processed, noise.key(self.seed, noise.COUPLED, generated(row) + len(new)))
        return self.step(token, scores, node, processed)


class Match(Coupled):
    """Samples as `Coupled` does, the same text for the same seed, while the draft guesses its likeliest token."""

    @property
    def rule(self) -> DraftRule:
        """The draft guesses its likeliest token."""
        return GreedyRule(self.processors.drafting, self.width)
