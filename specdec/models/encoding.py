"""Encoder output: computed once, shared by rows and by a draft with the same encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True, slots=True)
class Encoding:
    """Encoder output `hidden` `[rows, frames, width]`; `mask` `[rows, frames]` of valid frames (None: all).

    `hidden_states` and `attentions` of each layer are kept until rows are selected or joined.
    """

    hidden: Tensor
    mask: Tensor | None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    @classmethod
    def of(cls, hidden: Tensor, mask: Any, layers: Mapping[str, Any]) -> Encoding:
        """An encoding with the `mask` of its inputs, unless the encoder shortens its input, as those of audio do.

        `layers`: `hidden_states` and `attentions` of all layers, if kept.
        """
        kept = mask.to(hidden.device) if isinstance(mask, Tensor) and mask.shape == hidden.shape[:2] else None
        return cls(hidden, kept, layers.get("hidden_states"), layers.get("attentions"))

    def __len__(self) -> int:
        return self.hidden.shape[0]

    def select(self, rows: Sequence[int]) -> Encoding:
        """These rows in this order; a row may be repeated."""
        index = torch.tensor(list(rows), dtype=torch.long, device=self.hidden.device)
        mask = None if self.mask is None else self.mask.index_select(0, index.to(self.mask.device))
        return Encoding(self.hidden.index_select(0, index), mask)

    @classmethod
    def joined(cls, parts: Sequence[Encoding]) -> Encoding:
        """The rows of all `parts`, padded with masked frames."""
        frames = max(part.hidden.shape[1] for part in parts)
        if all(part.mask is None and part.hidden.shape[1] == frames for part in parts):
            return cls(torch.cat([part.hidden for part in parts]), None)
        masks = [
            torch.ones_like(one.hidden[..., 0], dtype=torch.long) if one.mask is None else one.mask for one in parts
        ]
        hidden = pad_sequence([row for part in parts for row in part.hidden], batch_first=True)
        return cls(hidden, pad_sequence([row for mask in masks for row in mask], batch_first=True))
