"""Greedy decoding: the likeliest token after processors."""

from __future__ import annotations

from torch import Tensor

from specdec.core.drafts import SequenceView
from specdec.core.tree import Scores, Step
from specdec.decoding import device_reads
from specdec.decoding.strategies.base import SMALL, TextStrategy
from specdec.options.generate import Options


class Greedy(TextStrategy):
    """Takes the argmax of the processed target logits, the first of equals."""

    name = "greedy"

    @classmethod
    def serves(cls, options: Options) -> bool:
        return not options.samples

    def advance(self, seq: SequenceView, new: list[int], scores: Scores, node: int) -> Step:
        plain = not (self.keeps or len(self.processors) or scores.unconditional is not None)
        if plain and device_reads.is_local(scores.logits):
            return Step(self._best(scores, node - scores.first), node)
        return super().advance(seq, new, scores, node)

    def _best(self, scores: Scores, at: int) -> int:
        """The likeliest token of logits number `at` (of equals the first); in small passes computed for all at once."""
        if scores.logits.numel() > SMALL:
            return device_reads.first_best(scores.logits[at])
        if "best" not in scores.cache:
            scores.cache["best"] = device_reads.first_bests(scores.logits)
        best: list[int] = scores.cache["best"]
        return best[at]

    def choose(self, seq: SequenceView, new: list[int], scores: Scores, node: int, processed: Tensor) -> int:
        return device_reads.first_best(processed)

    def choose_all(self, seq: SequenceView, scores: Scores, processed: Tensor) -> Tensor:
        return processed.argmax(dim=-1)
