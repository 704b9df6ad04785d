"""The layout of packed weights: blocks of 32 outputs, in them chunks of 128 bytes (see linear.cpp).

A packed tensor is `[blocks, chunks, 32, columns of a chunk]`; 4 bits have two columns in a byte, so that the last
dimension is 4. The upper bits of integers with 5 and 6 bits lie in another tensor (`high_rows`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 32
COLUMNS = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4, torch.uint8: 8}
"""Columns of a chunk, by the dtype of the packed tensor; uint8 are pairs of 4 bits."""

_LOW, _HIGH = [0, 4, 1, 5], [2, 6, 3, 7]  # the columns in the halves of a chunk's four bytes: even ones first
_BACK = [0, 2, 4, 6, 1, 3, 5, 7]


def packed(values: Tensor, dtype: torch.dtype, multiple: int = 1) -> Tensor:
    """A view of `values` `[outputs, inputs]` in packed order, as int32 `[blocks, chunks, 32, 1]`, to be copied.

    `dtype` is the dtype of `values`, or uint8 for the lower 4 bits of int8. Pads inputs with zeros to whole chunks, and
    to a multiple of `multiple`.
    """
    columns = COLUMNS[dtype]
    whole = _padded(values, max(columns, multiple), columns)
    chunks = whole.view(-1, BLOCK, whole.shape[1] // columns, columns)
    if dtype == torch.uint8:
        halves = chunks.to(torch.uint8)
        chunks = halves[..., _LOW] & 15 | halves[..., _HIGH] << 4
    # The four bytes of a row in a chunk move as one number, three times as fast as column by column.
    return chunks.view(torch.int32).transpose(1, 2)


def _padded(values: Tensor, multiple: int, aligned: int) -> Tensor:
    """The values with zeros up to whole blocks and a `multiple` of columns; in memory they begin `aligned`."""
    padding = 0, -values.shape[1] % multiple, 0, -values.shape[0] % BLOCK
    copies = any(padding) or values.storage_offset() % aligned
    return (F.pad(values, padding) if copies else values).contiguous()


def high_rows(high: Tensor, ids: Tensor, columns: int, inputs: int) -> Tensor:
    """The bits above the fourth, int8 `[n, inputs]`, of the outputs `ids` `[n]`.

    `high` is int32 `[blocks, parts, 32]`; a number has the bits of 32 columns (5 bits) or 16 (6 bits). In its byte b,
    the `extra` bits from bit `extra * i` on belong to column b of four columns i, in the order of columns in a chunk.
    """
    extra = 32 * high.shape[1] // columns
    part = 32 // extra
    numbers = high.transpose(1, 2)[ids // BLOCK, ids % BLOCK]  # [n, parts]
    places = torch.arange(part // 4, device=high.device)[:, None] * extra + torch.arange(4, device=high.device) * 8
    fours = numbers[:, :, None, None] >> places & (1 << extra) - 1
    eights = fours.reshape(*fours.shape[:2], part // 8, 8)[..., _BACK]
    return eights.flatten(1)[:, :inputs].to(torch.int8)


def rows(packed: Tensor, ids: Tensor, inputs: int) -> Tensor:
    """The values `[n, inputs]` of the outputs `ids` `[n]`; 4 bits as int8 from 0 to 15."""
    lanes = packed.view(torch.int32).permute(0, 2, 1, 3)[ids // BLOCK, ids % BLOCK]
    values = lanes.view(packed.dtype)
    if packed.dtype == torch.uint8:
        values = torch.cat([values & 15, values >> 4], -1)[..., _BACK].to(torch.int8)
    return values.flatten(1)[:, :inputs]


def packed_groups(values: Tensor | None) -> Tensor | None:
    """A view of scales or mins `[outputs, groups]` as `[blocks, groups, 32]`, to be copied; None stays None."""
    if values is None:
        return None
    whole = F.pad(values, (0, 0, 0, -len(values) % BLOCK))
    return whole.view(-1, BLOCK, values.shape[1]).transpose(1, 2)


def groups_of(packed: Tensor | None, ids: Tensor) -> Tensor | None:
    """Scales or mins `[n, groups]` of the outputs `ids` `[n]`; None stays None."""
    return None if packed is None else packed.transpose(1, 2)[ids // BLOCK, ids % BLOCK]


def steps_of(packed: Tensor | None, ids: Tensor) -> Tensor | None:
    """Steps `[n, supers, 2]` of the outputs `ids` `[n]`; None stays None."""
    return None if packed is None else packed.permute(0, 3, 1, 2)[ids // BLOCK, ids % BLOCK]
