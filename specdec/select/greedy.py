"""Greedy decoding: the likeliest token after processors."""

from __future__ import annotations

from specdec.select.base import Strategy
from specdec.select.rules import GreedyRule
from specdec.types import Row, Scores, Step


class Greedy(Strategy):
    """Takes the argmax of the processed target logits, the first of equals."""

    @property
    def rule(self) -> GreedyRule:
        """The draft guesses its likeliest token."""
        return GreedyRule(self.processors.drafting, self.width)

    def advance(self, row: Row, new: list[int], scores: Scores, node: int) -> Step:
        """The next token after `node`, where `new` are the tokens already emitted in this round."""
        if not (self.keep_scores or self.keep_logits or len(self.processors) or scores.unconditional is not None):
            return Step(int(scores.logits[node - scores.first].argmax()), node)
        processed = self.processed(row, new, scores, node)
        return self.step(int(processed.argmax()), scores, node, processed)
