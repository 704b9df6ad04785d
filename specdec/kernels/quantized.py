"""Weights as small integers with scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Inputs that share a scale, as in GGUF's Q8_0, Q4_0 and Q4_1."""


@dataclass(frozen=True)
class Quantized:
    """A weight `[outputs, inputs]` as integers: `((value - zero) * scale + min) * factor`.

    `values` int8 `[outputs, inputs]`: with 8 `bits` signed, with 4, 5 or 6 from 0 on, where `zero` is half of the range
    without `mins`. `scales` and `mins` `[outputs, groups]`: one for `GROUP` inputs or half as many (the last group may
    be shorter), float16 or bfloat16; or int8, to be multiplied by their `steps` float16 `[outputs, supers, 2]`, one of
    scales and one of mins for 256 inputs; or `mins` int8 alone, to be multiplied by `scales`. `levels` int8 `[16]`: the
    integers that 4 bits stand for. `factors` float32 `[outputs]`. None stands for ones, for `mins` zeros.
    """

    values: Tensor
    bits: int = 8
    scales: Tensor | None = None
    mins: Tensor | None = None
    steps: Tensor | None = None
    levels: Tensor | None = None
    factors: Tensor | None = None

    def weight(self) -> Tensor:
        """The weight as float32 `[outputs, inputs]`."""
        weight = self.values.float() if self.levels is None else self.levels[self.values.long()].float()
        if self.bits < 8 and self.mins is None and self.levels is None:
            weight -= 1 << (self.bits - 1)
        if self.scales is not None:
            weight *= self._wide(self.scales, 0)
        if self.mins is not None:
            multiples = self.scales if self.steps is None and self.mins.dtype == torch.int8 else None
            weight += self._wide(self.mins if multiples is None else self.mins * multiples.float(), 1)
        return weight if self.factors is None else weight.mul_(self.factors[:, None])

    def _wide(self, groups: Tensor, step: int) -> Tensor:
        """Scales (step 0) or mins (step 1) `[outputs, groups]`, times their steps, for each input."""
        inputs, floats = self.values.shape[1], groups.float()
        if self.steps is not None:
            floats *= self.steps[:, :, step].float().repeat_interleave(floats.shape[1] // self.steps.shape[1], 1)
        size = GROUP if groups.shape[1] == -(-inputs // GROUP) else GROUP // 2
        return floats.repeat_interleave(size, 1)[:, :inputs]
