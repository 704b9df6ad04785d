"""Weights as small integers with scales: rounded here, or read from a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

GROUP = 32
"""Inputs that share a scale, as in GGUF's Q8_0, Q4_0 and Q4_1."""

_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)  # shares of a group's range that are tried
_AT_ONCE = 1 << 24  # weights rounded at a time, which bounds memory


@dataclass(frozen=True)
class Quantized:
    """A weight `[outputs, inputs]` as integers: `((value - zero) * scale + min) * factor`.

    `values` int8 `[outputs, inputs]`: with 8 `bits` signed, with 4, 5 or 6 from 0 on, where `zero` is half of the range
    without `mins`. `scales` and `mins` `[outputs, groups]`: one for `GROUP` inputs or half as many (the last group may
    be shorter), float16 or bfloat16; or int8, to be multiplied by their `steps` float16 `[outputs, supers, 2]`, one of
    scales and one of mins for 256 inputs. `levels` int8 `[16]`: the integers that 4 bits stand for. `factors` float32
    `[outputs]`. None stands for ones, for `mins` zeros.
    """

    values: Tensor
    bits: int = 8
    scales: Tensor | None = None
    mins: Tensor | None = None
    steps: Tensor | None = None
    levels: Tensor | None = None
    factors: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Any]:
        """Its tensors by name that have outputs as their first dimension."""
        return {name: getattr(self, name) for name in ("values", "scales", "mins", "steps", "factors")}

    def rows(self, ids: Tensor) -> Quantized:
        """The outputs `ids` `[n]` alone."""
        picked: dict[str, Any] = {name: None if one is None else one[ids] for name, one in self.tensors.items()}
        return replace(self, **picked)

    def weight(self) -> Tensor:
        """The weight as float32 `[outputs, inputs]`."""
        weight = self.values.float() if self.levels is None else self.levels[self.values.long()].float()
        if self.bits < 8 and self.mins is None and self.levels is None:
            weight -= 1 << (self.bits - 1)
        if self.scales is not None:
            weight *= self._wide(self.scales, 0)
        if self.mins is not None:
            weight += self._wide(self.mins, 1)
        return weight if self.factors is None else weight.mul_(self.factors[:, None])

    def _wide(self, of_groups: Tensor, which: int) -> Tensor:
        """Scales or mins, times their steps, for each input."""
        inputs, floats = self.values.shape[1], of_groups.float()
        if self.steps is not None:
            floats *= self.steps[:, :, which].float().repeat_interleave(floats.shape[1] // self.steps.shape[1], 1)
        size = GROUP if of_groups.shape[1] == -(-inputs // GROUP) else GROUP // 2
        return floats.repeat_interleave(size, 1)[:, :inputs]


def _in_parts(rounded: Callable[[Tensor], Quantized]) -> Callable[[Tensor], Quantized]:
    """Lets a rounding take a weight part by part, which bounds memory."""

    @wraps(rounded)
    def in_parts(weight: Tensor) -> Quantized:
        rows = max(1, _AT_ONCE // max(1, weight.shape[1]))
        parts = [rounded(part.detach().float()) for part in torch.split(weight, rows)]
        held = [name for name, one in parts[0].tensors.items() if one is not None]
        joined: dict[str, Any] = {name: torch.cat([part.tensors[name] for part in parts]) for name in held}
        return replace(parts[0], **joined)

    return in_parts


@_in_parts
def to_int8(weight: Tensor) -> Quantized:
    """Rounds to 8 bits: the largest weight of each output becomes ±127."""
    factors = weight.abs().amax(1) / 127
    return Quantized(_levels(weight, factors[:, None], -127, 127), factors=factors)


@_in_parts
def to_int4(weight: Tensor) -> Quantized:
    """Rounds to 4 bits in groups, with the scales and mins of least squared error."""
    grouped = _grouped(weight)
    scales, mins = _best_range(grouped)
    factors = _powers(torch.maximum(scales.abs(), mins.abs()))
    scales, mins = (scales / factors[:, None]).half(), (mins / factors[:, None]).half()
    scaled = grouped / factors[:, None, None] - mins.float()[:, :, None]
    values = _levels(scaled, scales.float()[:, :, None], 0, 15).flatten(1)[:, : weight.shape[1]]
    return Quantized(values.contiguous(), 4, scales, mins, factors=factors)


def _best_range(grouped: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and mins `[outputs, groups]`: of each group's range and smaller ones, those of least squared error."""
    middle, reach = (grouped.amax(2) + grouped.amin(2)) / 2, (grouped.amax(2) - grouped.amin(2)) / 2
    least = torch.full_like(middle, torch.inf)
    scales, mins = torch.zeros_like(middle), torch.zeros_like(middle)
    for shrink in _SHRINKS:
        scale = reach * shrink / 7.5
        begin = middle - reach * shrink
        values = _levels(grouped - begin[:, :, None], scale[:, :, None], 0, 15)
        error = (values * scale[:, :, None] + begin[:, :, None] - grouped).square().sum(2)
        better = error < least
        least = torch.where(better, error, least)
        scales, mins = torch.where(better, scale, scales), torch.where(better, begin, mins)
    return scales, mins


def _grouped(weight: Tensor) -> Tensor:
    """`[outputs, groups, GROUP]`; the last input fills up the last group, which changes no range."""
    outputs, inputs = weight.shape
    missing = -inputs % GROUP
    return torch.cat([weight, weight[:, -1:].expand(-1, missing)], 1).view(outputs, -1, GROUP)


def _levels(weight: Tensor, scales: Tensor, least: int, most: int) -> Tensor:
    """The nearest integers; 0 where the scale is 0."""
    levels = torch.where(scales == 0, 0, weight / scales).round_()
    return levels.clamp_(least, most).to(torch.int8)


def _powers(scales: Tensor) -> Tensor:
    """The power of two per row that brings its largest entry near 1, where float16 is precise."""
    largest = scales.abs().amax(1)
    return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)
