"""Suppressed tokens: everywhere, at the beginning, or before a minimal length.

transformers' processors search the whole vocabulary for their tokens in every step; these index them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor
from transformers.generation import logits_process as stock


class Suppress:
    """Suppresses `tokens` everywhere; ids beyond the vocabulary are ignored."""

    stands_for: ClassVar[type] = stock.SuppressTokensLogitsProcessor

    def __init__(self, tokens: Iterable[int] | Tensor, device: torch.device | str = "cpu") -> None:
        self.tokens = sorted({int(token) for token in tokens})
        self._device = device
        self._known: dict[int, Tensor] = {}  # by the size of the vocabulary

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tokens})"

    def acts(self, ids: Tensor | None) -> bool:
        """Whether it suppresses after texts `ids` `[n, length]`."""
        return True

    def acts_on(self, length: int) -> tuple[float, float]:
        """The range of tokens after a text of `length` where it suppresses: first, and one past the last, from 0."""
        return 0, math.inf

    def __call__(self, ids: Tensor | None, logits: Tensor) -> Tensor:
        """`logits` `[n, vocab]` with the tokens at -inf; the same tensor where it does not suppress."""
        if not self.acts(ids):
            return logits
        vocab = logits.shape[-1]
        if vocab not in self._known:
            self._known[vocab] = torch.tensor([t for t in self.tokens if 0 <= t < vocab], device=self._device).long()
        return logits.index_fill(-1, self._known[vocab].to(logits.device), -torch.inf)


class SuppressAtBegin(Suppress):
    """The same for the first token after `begin` of them."""

    stands_for = stock.SuppressTokensAtBeginLogitsProcessor

    def __init__(self, tokens: Iterable[int] | Tensor, begin: int, device: torch.device | str = "cpu") -> None:
        super().__init__(tokens, device)
        self.begin = begin

    def acts(self, ids: Tensor | None) -> bool:
        return ids is not None and ids.shape[-1] == self.begin

    def acts_on(self, length: int) -> tuple[float, float]:
        return self.begin - length, self.begin - length + 1


class MinLength(Suppress):
    """The same while texts are shorter than `least` tokens."""

    stands_for = stock.MinLengthLogitsProcessor

    def __init__(self, least: int, tokens: Iterable[int] | Tensor, device: torch.device | str = "cpu") -> None:
        super().__init__(tokens, device)
        self.least = least

    def acts(self, ids: Tensor | None) -> bool:
        return ids is not None and ids.shape[-1] < self.least

    def acts_on(self, length: int) -> tuple[float, float]:
        return 0, self.least - length


class MinNewTokens(MinLength):
    """The same while fewer than `least` tokens follow a prompt of `prompt` tokens."""

    stands_for = stock.MinNewTokensLengthLogitsProcessor

    def __init__(
        self, prompt: int, least: int, tokens: Iterable[int] | Tensor, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(prompt + least, tokens, device)
