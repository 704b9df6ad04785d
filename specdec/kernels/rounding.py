"""Weights rounded to fewer bits, as packed layers."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from specdec.kernels import ops, pages
from specdec.kernels.packed_layout import BLOCK
from specdec.kernels.packed_linear import PackedLinear, measure_ways
from specdec.kernels.quantized import GROUP


@torch.no_grad()
def round_weight(weight: Tensor, bits: int, bias: Tensor | None = None, *, rounds: bool = True) -> PackedLinear:
    """A layer over a weight `[outputs, inputs]` in 8 or 4 bits; needs `specdec.kernels.available`.

    In 8 bits the largest weight of each output becomes ±127; in 4 bits each group of 32 inputs has the scale and the
    min of least squared error.
    """
    weight = weight.detach().contiguous()
    outputs, inputs = weight.shape
    groups, wide, empty = -(-inputs // GROUP), bits == 8, partial(pages.blocks, outputs)
    tensors: dict[str, Tensor | None] = {
        "packed": empty((groups * GROUP // (4 if wide else 8), BLOCK, 4), torch.int8 if wide else torch.uint8),
        "factors": torch.empty(outputs, dtype=torch.float32, device="cpu"),
        "scales": None if wide else empty((groups, BLOCK), torch.float16),
        "mins": None if wide else empty((groups, BLOCK), torch.float16),
    }
    ops.round_weight(weight if weight.dtype == torch.bfloat16 else weight.float(), *tensors.values())
    tensors["bias"] = None if bias is None else bias.detach().float().contiguous()
    layer = PackedLinear.of(tensors, outputs, inputs, f"int{bits}", rounds=rounds)
    measure_ways(layer.kind, layer.scales is not None, rounds)
    return layer
