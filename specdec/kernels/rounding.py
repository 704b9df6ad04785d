"""Weights rounded to fewer bits, as packed layers."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from specdec.kernels import ops, pages
from specdec.kernels.packed_layout import BLOCK, packed
from specdec.kernels.packed_linear import FLOATS, PackedLinear, measure_ways
from specdec.kernels.quantized import GROUP

_OUTPUTS = 64 * BLOCK  # so many are unpacked at a time, into memory that the C library uses again


@torch.no_grad()
def round_weight(
    weight: Tensor | PackedLinear, bits: int, bias: Tensor | None = None, *, rounds: bool = True
) -> PackedLinear:
    """A layer over a weight `[outputs, inputs]`, or over a packed layer's, in 8 or 4 bits.

    In 8 bits the largest weight of each output becomes ±127; in 4 bits each group of 32 inputs has the scale and the
    min of least squared error. Needs `specdec.kernels.available`.
    """
    outputs, inputs = (weight.outputs, weight.inputs) if isinstance(weight, PackedLinear) else weight.shape
    groups, wide, empty = -(-inputs // GROUP), bits == 8, partial(pages.blocks, outputs)
    tensors: dict[str, Tensor | None] = {
        "packed": empty((groups * GROUP // (4 if wide else 8), BLOCK, 4), torch.int8 if wide else torch.uint8),
        "factors": torch.empty(outputs, dtype=torch.float32, device="cpu"),
        "scales": None if wide else empty((groups, BLOCK), torch.float16),
        "mins": None if wide else empty((groups, BLOCK), torch.float16),
    }
    for first in range(0, outputs, _OUTPUTS):
        last = min(first + _OUTPUTS, outputs)
        blocks, factors = slice(first // BLOCK, -(-last // BLOCK)), slice(first, last)
        parts = (t if t is None else t[factors if name == "factors" else blocks] for name, t in tensors.items())
        if isinstance(weight, PackedLinear) and weight.kind in FLOATS:
            floats = weight.packed[blocks]
        else:
            ids = torch.arange(first, last, device="cpu")
            rows = weight.rows(ids) if isinstance(weight, PackedLinear) else weight[first:last]
            rows = rows if rows.dtype == torch.bfloat16 else rows.float()
            floats = packed(rows, rows.dtype).contiguous().view(rows.dtype)
        ops.round_weight(floats, inputs, *parts)
    tensors["bias"] = None if bias is None else bias.detach().float().contiguous()
    layer = PackedLinear(tensors, outputs, inputs, f"int{bits}", rounds=rounds)
    measure_ways(layer.kind, layer.scales is not None, rounds)
    return layer
