"""Packing of weights that the package finds in GGUF files alone: of 5 and 6 bits, and with steps."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.kernels import PackedLinear, pack, restored_layer
from specdec.kernels.packed_layout import BLOCK
from specdec.kernels.quantized import Quantized


def pack_any(weight: Quantized, bias: Tensor | None = None) -> PackedLinear:
    """A layer over a weight of any form."""
    if weight.bits == 8:
        return pack(weight, bias)
    held = {**pack(replace(weight, bits=4, steps=None), bias)._buffers}
    if weight.bits > 4:
        held["high"] = packed_high(weight.values, weight.bits)
    if weight.steps is not None:
        whole = F.pad(weight.steps, (0, 0, 0, 0, 0, -len(weight.steps) % BLOCK))
        held["steps"] = whole.view(-1, BLOCK, *whole.shape[1:]).permute(0, 2, 3, 1).contiguous()
    return restored_layer(held, *weight.values.shape)


def packed_high(values: Tensor, bits: int) -> Tensor:
    """The bits of `values` above the fourth, as `high_rows` reads them."""
    extra = bits - 4
    part = 32 // extra
    upper = F.pad(values, (0, -values.shape[1] % 32, 0, -values.shape[0] % BLOCK)).to(torch.int32) >> 4
    eights = upper.view(-1, BLOCK, upper.shape[1] // part, part // 8, 8)[..., [0, 4, 1, 5, 2, 6, 3, 7]]
    fours = eights.view(*eights.shape[:3], part // 4, 4)
    places = torch.arange(part // 4)[:, None] * extra + torch.arange(4) * 8
    return (fours << places).sum((3, 4)).to(torch.int32).transpose(1, 2).contiguous()  # bit 31 is the sign
