"""Greedy decoding: the likeliest token after processors."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.core.drafts import SequenceView
from specdec.core.tree import Step
from specdec.core.work import Logits
from specdec.decoding import device_reads, noise
from specdec.decoding.strategies.base import SMALL, TextStrategy
from specdec.options.generate import Options


class Greedy(TextStrategy):
    """Takes the argmax of the processed target logits, the first of equals."""

    name = "greedy"

    @classmethod
    def serves(cls, options: Options) -> bool:
        return not (options.samples or options.beams > 1 or options.contrastive or options.constrained)

    def emit(self, seq: SequenceView, new: list[int], out: Logits, node: int) -> Step:
        at, best = node - out.first, out.cache.get("best")
        if best is None:
            plain = not (self.keeps or len(self.processors) or out.unconditional is not None)
            if not (plain and device_reads.is_local(out.logits)):
                return super().emit(seq, new, out, node)
            if out.logits.numel() > SMALL:
                return Step(device_reads.first_best(out.logits[at]))
            best = out.cache["best"] = device_reads.first_bests(out.logits)
        return Step(best[at])

    def choose(self, seq: SequenceView, new: list[int], out: Logits, node: int, processed: Tensor) -> int:
        token = device_reads.first_best(processed)
        return noise.checked(noise.EMPTY if processed[token] == -torch.inf else token)

    def choose_all(self, seq: SequenceView, out: Logits, processed: Tensor) -> Tensor:
        best, tokens = processed.max(dim=-1)
        return tokens.masked_fill(best == -torch.inf, noise.EMPTY)
