"""Texts of earlier requests and of files, in which drafts look up what followed the same tokens before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import compress, count, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

DEPTH = 64
"""The most tokens of a match."""

_GAP, _NONE = -1, -2  # what stands between texts, and before the first token of the text that is continued
_KEY = 8  # tokens of a key
_LEAST = 2  # the shortest match
_MOST_PLACES = 128  # places that are compared, spread over all that match
_GUESSES_PER_MATCH = 2
_BYTES = 4 + 4 * _KEY + 4  # a token, its key and its place

Numbers = NDArray[np.int32]


class Remembered(NamedTuple):
    """Tokens that followed `match` equal tokens; with each, how many of how many texts went on with it there."""

    tokens: list[int]
    match: int
    counts: list[tuple[int, int]]


class Memory:
    """Texts by salt, and those of files, which all salts see, in at most `most_bytes` bytes; the least used go first.

    A text whose beginning another text of its salt has adds the rest to the index alone.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self._clock = most_bytes, count()
        self._shelves: dict[str | None, _Shelf] = {}  # None: the files

    @property
    def nbytes(self) -> int:
        """The bytes of its texts and of their index."""
        return sum(shelf.nbytes for shelf in self._shelves.values())

    @property
    def has_files(self) -> bool:
        """Whether it holds texts of files."""
        return None in self._shelves

    def read(self, files: Sequence[Sequence[int]]) -> bool:
        """Adds the tokens of files; returns whether all fit."""
        texts = [self._cut(tokens) for tokens in files]
        self._add(None, texts)
        whole = sum(map(len, texts)) == sum(map(len, files))
        return whole and self.has_files and len(self._shelves[None].used) == len(files)

    def remember(self, tokens: Sequence[int], salt: str) -> None:
        """Adds the text of a request."""
        text, shelf = self._cut(tokens), self._shelves.get(salt)
        shared = 0 if shelf is None else shelf.common(text, next(self._clock))
        if shared < len(text):
            self._add(salt, [text], shared)

    def forget(self) -> None:
        """Drops the texts of requests, not those of files."""
        self._shelves = {salt: shelf for salt, shelf in self._shelves.items() if salt is None}

    def lookup(self, tokens: Sequence[int], salt: str, limit: int, above: int = 0) -> Remembered | None:
        """At most `limit` tokens that followed the longest suffix of `tokens`, if it has more than `above` tokens."""
        best, end = None, tokens[: -DEPTH - 1 : -1]
        tail = np.array([*end, *[_NONE] * (DEPTH - len(end))], np.int32)
        for shelf in filter(None, (self._shelves.get(salt), self._shelves.get(None))):
            if (longer := shelf.lookup(tail, limit, above, next(self._clock))) is not None:
                best, above = longer, longer.match
        return best

    def _cut(self, tokens: Sequence[int]) -> Numbers:
        """The end of a text that alone would be too large."""
        return np.array(tokens[-max(self.most_bytes // (2 * _BYTES), 1) :], np.int32)

    def _add(self, salt: str | None, texts: Sequence[Numbers], shared: int = 0) -> None:
        self._shelves.setdefault(salt, _Shelf()).add(texts, shared, self._clock)
        while self.nbytes > self.most_bytes:  # an eighth goes at once, so that not every text moves all others
            times = sorted(used for shelf in self._shelves.values() for used in shelf.used)
            for shelf in self._shelves.values():
                shelf.drop(times[len(times) // 8])
            self._shelves = {salt: shelf for salt, shelf in self._shelves.items() if shelf.used}


class _Shelf:
    """Texts one behind the other, and places in them in the order of the tokens before each place, the last one first.

    So the places that match the end of a text best lie together, where a binary search over keys of 8 tokens ends.
    `used`: when a draft last copied from each text.
    """

    def __init__(self) -> None:
        self._tokens: Numbers = np.full(DEPTH, _GAP, np.int32)
        self._starts: list[int] = []
        self.used: list[int] = []
        self._keys, self._places = np.empty(0, f"S{4 * _KEY}"), np.empty(0, np.int32)

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes + self._keys.nbytes + self._places.nbytes

    def common(self, text: Numbers, when: int) -> int:
        """How many of its first tokens a text here has, the longest such one, which counts as used."""
        best, longest = 0, 0
        for number, start in enumerate(self._starts):
            ours = self._tokens[start : start + len(text)]
            same = np.append(ours == text[: len(ours)], False)
            if (length := int(same.argmin())) > longest:
                best, longest = number, length
        if longest:
            self.used[best] = when
        return longest

    def add(self, texts: Sequence[Numbers], shared: int, clock: Iterator[int]) -> None:
        """Adds texts, without the index of their first `shared` tokens."""
        starts = len(self._tokens) + np.cumsum([0, *(len(text) + 1 for text in texts)])
        self._tokens = np.concatenate([self._tokens, *(np.append(text, np.int32(_GAP)) for text in texts)])
        self._starts += starts[:-1].tolist()
        self.used += islice(clock, len(texts))
        ends = zip(starts, starts[1:] - 1, strict=False)
        places = np.concatenate([np.arange(start + max(shared, 1), end, dtype=np.int32) for start, end in ends])
        keys = _keys(self._before(places, _KEY))
        order = np.argsort(keys, kind="stable")
        where = np.searchsorted(self._keys, keys[order], "right")
        self._keys = np.insert(self._keys, where, keys[order])
        self._places = np.insert(self._places, where, places[order])

    def lookup(self, tail: Numbers, limit: int, above: int, when: int) -> Remembered | None:
        """What followed the longest match with `tail` `[DEPTH]`, the last token first, if it is longer than `above`."""
        key = _keys(tail[None, :_KEY])
        beside = int(np.searchsorted(self._keys, key)[0])
        nearest = self._matches(self._places[max(beside - 1, 0) : beside + 1], tail).max(initial=0)
        if nearest < _LEAST or nearest <= min(above, _KEY - 1):
            return None
        common = key.tobytes()[: 4 * min(int(nearest), _KEY)]
        first = np.searchsorted(self._keys, np.array([common], self._keys.dtype))[0]
        last = np.searchsorted(self._keys, np.array([common.ljust(4 * _KEY, b"\xff")]), "right")[0]
        places = self._places[first : last : 1 + (last - first - 1) // _MOST_PLACES]
        matches = self._matches(places, tail)
        if (match := int(matches.max())) <= above:
            return None
        places = np.sort(places[matches == match])[::-1]
        self.used[int(np.searchsorted(self._starts, places[0], "right")) - 1] = when
        return self._following(places, match, min(limit, 1 + _GUESSES_PER_MATCH * match))

    def drop(self, time: int) -> None:
        """Forgets the texts that were last used until then."""
        stay = [used > time for used in self.used]
        tokens = np.repeat([True, *stay], np.diff([0, *self._starts, len(self._tokens)]))
        places, moved = tokens[self._places], tokens.cumsum(dtype=np.int32) - 1
        self._keys, self._places = self._keys[places], moved[self._places[places]]
        self._starts = [int(moved[start]) for start in compress(self._starts, stay)]
        self.used = [*compress(self.used, stay)]
        self._tokens = self._tokens[tokens]

    def _before(self, places: Numbers, most: int) -> Numbers:
        """The tokens `[places, most]` before each place, the last one first."""
        return self._tokens[places[:, None] - np.arange(1, most + 1)]

    def _matches(self, places: Numbers, tail: Numbers) -> Numbers:
        """How many tokens before each place are those of `tail`."""
        same = self._before(places, DEPTH) == tail
        return np.logical_and.accumulate(same, axis=1).sum(axis=1, dtype=np.int32)

    def _following(self, places: Numbers, match: int, most: int) -> Remembered:
        """In each step the token that most of the `places` have, the first of equals; the others are left behind."""
        tokens, counts = list[int](), list[tuple[int, int]]()
        while len(tokens) < most:
            column = self._tokens[places + len(tokens)]
            [(token, times)] = Counter(column.tolist()).most_common(1)
            if token == _GAP:
                break
            tokens.append(token)
            counts.append((times, len(places)))
            places = places[column == token]
        return Remembered(tokens, match, counts)


def _keys(tokens: Numbers) -> NDArray[np.bytes_]:
    """One text of bytes for each row of `tokens` `[n, 8]`; such texts have the order of the tokens."""
    return np.ascontiguousarray((tokens + 1).astype(">u4")).view(f"S{4 * _KEY}")[:, 0]
