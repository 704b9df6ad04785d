"""Rounding in torch's operators, with which the kernels' is compared."""

import torch
from torch import Tensor

from specdec.kernels.quantized import GROUP, Quantized

_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)  # shares of a group's range that are tried


def to_int8(weight: Tensor) -> Quantized:
    """Rounds to 8 bits: the largest weight of each output becomes ±127."""
    factors = weight.abs().amax(1) / 127
    return Quantized(_levels(weight, factors[:, None], -127, 127), factors=factors)


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
