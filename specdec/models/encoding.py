"""What an encoder read: computed once, then shared by every row, and by a draft that has the same encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from specdec.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Encoding:
    """Encoder output `hidden` `[rows, frames, width]` and which count, `mask` `[rows, frames]` (None: all).

    `hidden_states` and `attentions`, per layer, are there if they were asked for, until rows are selected or joined.
    """

    hidden: Tensor
    mask: Tensor | None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    def __len__(self) -> int:
        return self.hidden.shape[0]

    def select(self, rows: Sequence[int]) -> Encoding:
        """These rows in this order; a row may be repeated."""
        index = torch.tensor(list(rows), dtype=torch.long, device=self.hidden.device)
        mask = None if self.mask is None else self.mask.index_select(0, index.to(self.mask.device))
        return Encoding(self.hidden.index_select(0, index), mask)

    def join(self, other: Encoding) -> Encoding:
        """Both encodings' rows, the shorter ones padded with frames that do not count."""
        frames = max(self.hidden.shape[1], other.hidden.shape[1])
        if self.mask is None and other.mask is None and self.hidden.shape[1] == other.hidden.shape[1]:
            return Encoding(torch.cat([self.hidden, other.hidden]), None)
        if self.mask is None or other.mask is None:
            raise UnsupportedError(
                "rows with and without an encoder mask cannot run together: pass `attention_mask` for all"
            )
        parts = [e._padded(frames) for e in (self, other)]
        return Encoding(torch.cat([p.hidden for p in parts]), torch.cat([p.mask for p in parts if p.mask is not None]))

    def _padded(self, frames: int) -> Encoding:
        more = frames - self.hidden.shape[1]
        mask = None if self.mask is None else functional.pad(self.mask, (0, more))
        return Encoding(functional.pad(self.hidden, (0, 0, 0, more)), mask)
