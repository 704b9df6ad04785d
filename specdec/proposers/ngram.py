"""Prompt lookup: copies the tokens that followed the first occurrence of the last n tokens."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.options.fields import check_whole
from specdec.proposers.copying import SEPARATOR, TextDraft


class NgramIndex:
    """Finds the first occurrence of the text's last n tokens, n from `max_ngram` down to 1; O(max_ngram) per token."""

    def __init__(self, num_tokens: int, max_ngram: int) -> None:
        self._num_tokens, self._max_ngram = num_tokens, max_ngram
        self._text: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends `tokens`; an n-gram is indexed once a token follows it."""
        text, after, longest = self._text, self._after, self._max_ngram
        for token in tokens:
            end = len(text)
            if token != SEPARATOR:
                for n in range(1, min(longest, end) + 1):
                    after.setdefault(tuple(text[end - n :]), end)
            text.append(token)

    def lookup(self, limit: int, tail: Sequence[int] = ()) -> tuple[list[int], int]:
        """At most `limit` tokens after the first occurrence, and the length of the n-gram that matched."""
        text = self._text
        end = [*text[-self._max_ngram :], *tail] if tail else text
        for n in range(min(self._max_ngram, len(end) - 1), 0, -1):
            start = self._after.get(tuple(end[-n:]))
            if start is not None:
                return text[start : start + min(limit, self._num_tokens)], n
        return [], 0


class NgramDraft(TextDraft):
    """Copies what followed the first occurrence of the last n tokens (prompt lookup, as in transformers).

    A proposal has at most `num_tokens`; n runs from `max_ngram` down to 1, and the first match counts.
    """

    source = "ngram"

    def __init__(self, num_tokens: int = 10, max_ngram: int = 2) -> None:
        check_whole("num_tokens", num_tokens)
        check_whole("max_ngram", max_ngram)
        self.num_tokens, self.max_ngram = num_tokens, max_ngram
        self.longest = max_ngram

    def __repr__(self) -> str:
        return f"NgramDraft({self.num_tokens}, {self.max_ngram})"

    def index(self) -> NgramIndex:
        return NgramIndex(self.num_tokens, self.max_ngram)
