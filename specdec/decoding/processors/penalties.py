"""Penalties for tokens that were generated before."""

from __future__ import annotations

import torch
from torch import Tensor


class OutputPenalty:
    """Lowers the logit of every generated token by `presence`, and by `frequency` for each of its occurrences.

    The prompt's `length` tokens do not count. These are the penalties of OpenAI's interface.
    """

    def __init__(self, length: int, presence: float, frequency: float) -> None:
        self.length, self.presence, self.frequency = length, presence, frequency

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """`logits` `[n, vocab]` after `ids` `[n, length]`."""
        written = ids[:, self.length :].to(logits.device)
        if not written.shape[1]:
            return logits
        counts = torch.zeros_like(logits).scatter_add_(1, written, logits.new_ones(written.shape))
        return logits - self.frequency * counts - self.presence * (counts > 0)
