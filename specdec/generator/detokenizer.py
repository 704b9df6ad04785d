"""New ids to text, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any


def decode(tokenizer: Any, ids: Sequence[int], stops: Sequence[str] = ()) -> str:
    """The text of `ids` without special tokens, cut before the first of `stops`."""
    return before_stop(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False), stops)


def before_stop(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first stop string in it."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


class Detokenizer:
    """Decodes ids piece by piece, and holds back text that a later token may change.

    Held back are incomplete UTF-8 and whatever may be the beginning of one of `stops`; the text ends before the first.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._ids: list[int] = []
        self._start = 0  # decoding begins here, a few ids before those whose text is not yet decoded
        self._decoded = 0
        self._pending = ""  # decoded and held back
        self._ended = False

    def push(self, ids: Sequence[int], *, last: bool = False) -> str:
        """The text that is final after `ids`; with `last` all that is left."""
        self._pending += self._text(ids, last)
        text = before_stop(self._pending, self._stops)
        ended, self._ended = self._ended, self._ended or len(text) < len(self._pending)
        unsure = 0 if last or self._ended else max(map(len, self._stops), default=1) - 1
        text = text[: max(len(text) - unsure, 0)]
        self._pending = self._pending[len(text) :]
        return "" if ended else text

    def _text(self, ids: Sequence[int], last: bool) -> str:
        """What `ids` add to the text; empty while its last character is incomplete."""
        self._ids += ids
        before = decode(self._tokenizer, self._ids[self._start : self._decoded])
        after = decode(self._tokenizer, self._ids[self._start :])
        if not last and (after.endswith("\ufffd") or len(after) <= len(before)):
            return ""
        self._start, self._decoded = self._decoded, len(self._ids)
        return after[len(before) :]


def pieces(
    tokenizer: Any, ids: Sequence[int], drafted: Sequence[bool], stops: Sequence[str] = ()
) -> list[tuple[str, bool]]:
    """The text of `ids` in pieces, each with whether the draft guessed its tokens."""
    text, found = Detokenizer(tokenizer, stops), []
    for number, (token, origin) in enumerate(zip(ids, drafted, strict=True), 1):
        if piece := text.push([token], last=number == len(ids)):
            found.append((piece, origin))
    return [("".join(text for text, _ in run), origin) for origin, run in groupby(found, key=lambda piece: piece[1])]
