"""Texts that end an answer, as a stopping criterion: only the end of the text is read, whatever the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.generator.detokenizer import decode

_MOST_BYTES = 4  # of a character, each of which may be a token
_SILENT = 8  # tokens without text that may stand between


class StopTexts:
    """Ends a row whose text after the prompt's `begin` tokens holds one of `stops`.

    transformers' own criterion reads the whole vocabulary for every call, which takes a second or more.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], begin: int) -> None:
        self._tokenizer, self._stops, self._begin = tokenizer, stops, begin
        self._tail = _MOST_BYTES * max(map(len, stops)) + _SILENT

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Whether each of the texts `ids` `[n, length]` ends here."""
        return torch.tensor([self._ends(text) for text in ids])

    def _ends(self, text: Tensor) -> bool:
        tail = decode(self._tokenizer, text[max(len(text) - self._tail, self._begin) :].tolist())
        return any(stop in tail for stop in self._stops)
