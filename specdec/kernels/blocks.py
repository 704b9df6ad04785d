"""Blocks of GGUF files as packed layers: every number stays as it is in the file."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels import ops, pages
from specdec.kernels.packed_layout import BLOCK
from specdec.kernels.packed_linear import PackedLinear


class _Kind(NamedTuple):
    """How a kind of blocks is packed: values for the fields of `Quantized`."""

    bits: int = 4
    part: int = 32
    has_mins: bool = False
    has_steps: bool = False
    levels: tuple[int, ...] = ()
    scales: torch.dtype = torch.float16


_IQ4 = -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
_FP4 = 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12
BLOCKS = {
    "Q4_0": _Kind(),
    "Q4_1": _Kind(has_mins=True),
    "Q5_0": _Kind(5),
    "Q5_1": _Kind(5, has_mins=True),
    "Q8_0": _Kind(8),
    "IQ4_NL": _Kind(levels=_IQ4),
    "MXFP4": _Kind(levels=_FP4, scales=torch.bfloat16),
    "Q2_K": _Kind(4, 16, has_mins=True, has_steps=True),
    "Q3_K": _Kind(4, 16, has_steps=True),
    "Q4_K": _Kind(has_mins=True, has_steps=True),
    "Q5_K": _Kind(5, has_mins=True, has_steps=True),
    "Q6_K": _Kind(6, 16, has_steps=True),
    "IQ4_XS": _Kind(has_steps=True, levels=_IQ4),
}
"""The kinds of blocks that are packed, by their names in GGUF."""
IN_FLOATS = {"Q4_0", "Q4_1", "Q8_0"}
"""The kinds that can also be multiplied by rows that are not rounded."""


def block_kind(layer: PackedLinear) -> str | None:
    """The kind of a layer's blocks, where they have steps or 5 bits, as no other integers have; None for all others."""
    if layer.scales is None or (layer.steps is None and layer.high is None):
        return None
    levels = () if layer.levels is None else tuple(layer.levels.tolist())
    bits, part = int(layer.kind.removeprefix("int")), layer.inputs // layer.scales.shape[1]
    kind = _Kind(bits, part, has_mins=layer.mins is not None, has_steps=layer.steps is not None, levels=levels)
    return next((name for name in BLOCKS if BLOCKS[name] == kind), None)


def pack_blocks(
    raw: Tensor, name: str, inputs: int, *, order: Tensor | None = None, rounds: bool = True
) -> PackedLinear:
    """A layer over the blocks `raw`, uint8 `[outputs, bytes of a row]`, of a kind in `BLOCKS`.

    `order`: the rows of `raw` in the order of the outputs; by default all rows. Needs `specdec.kernels.available`.
    """
    kind, outputs = BLOCKS[name], len(raw if order is None else order)
    parts, empty = inputs // kind.part, partial(pages.blocks, outputs)
    wide = kind.bits == 8
    scale_dtype = torch.int8 if kind.has_steps else kind.scales
    tensors: dict[str, Tensor | None] = {
        "packed": empty((inputs // (4 if wide else 8), BLOCK, 4), torch.int8 if wide else torch.uint8),
        "high": empty((parts, BLOCK), torch.int32) if kind.bits in (5, 6) else None,
        "scales": empty((parts, BLOCK), scale_dtype),
        "mins": empty((parts, BLOCK), scale_dtype) if kind.has_mins else None,
        "steps": empty((inputs // 256, 2, BLOCK), torch.float16) if kind.has_steps else None,
    }
    ops.pack_blocks(raw, order, name, *tensors.values())
    tensors["levels"] = torch.tensor(kind.levels, dtype=torch.int8, device="cpu") if kind.levels else None
    return PackedLinear(tensors, outputs, inputs, f"int{kind.bits}", rounds=rounds)
