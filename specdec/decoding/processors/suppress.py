"""Tokens that may not come: never, at the begin, or before a text has its least length.

transformers' processors look for their tokens in the whole vocabulary in every step; here their ids are known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor
from transformers.generation import logits_process as stock


class Suppress:
    """These `tokens` never come; ids beyond the vocabulary are none."""

    stands_for: ClassVar[type] = stock.SuppressTokensLogitsProcessor

    def __init__(self, tokens: Iterable[int] | Tensor, device: torch.device | str = "cpu") -> None:
        self.tokens = sorted({int(token) for token in tokens})
        self._device = device
        self._known: dict[int, Tensor] = {}  # by the size of the vocabulary

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tokens})"

    def acts(self, ids: Tensor | None) -> bool:
        """Whether they are suppressed after texts `ids` `[n, length]`."""
        return True

    def acts_on(self, length: int) -> tuple[float, float]:
        """Which tokens after a text of so many they cannot be, counted from 0: a first one, and one past the last."""
        return 0, math.inf

    def __call__(self, ids: Tensor | None, logits: Tensor) -> Tensor:
        """`logits` `[n, vocab]`, the tokens at -inf; the very tensor where all of them may come."""
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
