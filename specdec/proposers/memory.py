"""Texts of earlier requests and of files, in which drafts look up what followed the same tokens before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, count, islice
from threading import Lock
from typing import Any, NamedTuple

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
_TEXT, _SHELF = 100, 1280  # bytes besides: of each text, and of each shelf
_PARTS = 8  # a shelf takes in another that has at least this part of its size,
_SMALL = 2**22  # or any while it is small (bytes)

Numbers = NDArray[np.int32]


class Remembered(NamedTuple):
    """Tokens that followed `match` equal tokens; with each, how many of how many texts went on with it there."""

    tokens: list[int]
    match: int
    counts: list[tuple[int, int]]


class Memory:
    """Texts by salt, and texts of files, which all salts see, in at most `most_bytes` bytes; the least used go first.

    A text whose beginning another text of its salt has adds the rest to the index alone. Several threads may use it.
    `nbytes`: the bytes of its texts and of their index.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.nbytes = most_bytes, 0
        self._clock, self._lock = count(), Lock()
        self._shelves: dict[str | None, list[_Shelf]] = {}  # None: the files; of each salt the largest first

    @property
    def has_files(self) -> bool:
        """Whether it holds texts of files."""
        return None in self._shelves

    def read(self, files: Iterable[Sequence[int]]) -> bool:
        """Adds the tokens of the first files that fit, and takes no others; returns whether all fit."""
        texts, room, whole = list[Numbers](), self.most_bytes - _SHELF, True
        for tokens in files:
            text = self._cut(tokens)
            room -= _TEXT + _BYTES * len(text)
            whole = whole and room >= 0 and len(text) == len(tokens)
            if room < 0:
                break
            texts.append(text)
        with self._lock:
            if texts:
                self._add(None, texts)
        return whole

    def remember(self, tokens: Sequence[int], salt: str) -> None:
        """Adds the text of a request."""
        text = self._cut(tokens)
        with self._lock:
            when = next(self._clock)
            shared = max((shelf.common(text, when) for shelf in self._shelves.get(salt, ())), default=0)
            if shared < len(text):
                self._add(salt, [text], shared)

    def forget(self) -> None:
        """Drops all texts."""
        with self._lock:
            self._shelves, self.nbytes = {}, 0

    def lookup(self, tokens: Sequence[int], salt: str, limit: int, above: int = 0) -> Remembered | None:
        """At most `limit` tokens that followed the longest suffix of `tokens`, if it has more than `above` tokens."""
        best, end = None, tokens[: -DEPTH - 1 : -1]
        tail = np.array([*end, *[_NONE] * (DEPTH - len(end))], np.int32)
        with self._lock:
            for shelf in (*self._shelves.get(salt, ()), *self._shelves.get(None, ())):
                if (longer := shelf.lookup(tail, limit, above, next(self._clock))) is not None:
                    best, above = longer, longer.match
        return best

    def _cut(self, tokens: Sequence[int]) -> Numbers:
        """The end of a text that alone would be too large."""
        return np.array(tokens[-max(self.most_bytes // (2 * _BYTES), 1) :], np.int32)

    def _add(self, salt: str | None, texts: Sequence[Numbers], shared: int = 0) -> None:
        shelves = self._shelves.setdefault(salt, [])
        shelves.append(_Shelf(texts, shared, self._clock))
        self.nbytes += shelves[-1].nbytes
        while len(shelves) > 1 and shelves[-2].nbytes <= max(_PARTS * shelves[-1].nbytes, _SMALL):
            last = shelves.pop()
            shelves[-1].absorb(last)
            self.nbytes -= _SHELF
        while self.nbytes > self.most_bytes:  # an eighth goes at once, so that not every text moves all others
            every = [shelf for shelves in self._shelves.values() for shelf in shelves]
            times = sorted(used for shelf in every for used in shelf.used)
            for shelf in every:
                shelf.drop(times[len(times) // _PARTS])
            stay = {salt: [shelf for shelf in shelves if shelf.used] for salt, shelves in self._shelves.items()}
            self._shelves = {salt: shelves for salt, shelves in stay.items() if shelves}
            self.nbytes = sum(shelf.nbytes for shelf in every if shelf.used)


class _Shelf:
    """Texts one behind the other, and places in them in the order of the tokens before each place, the last one first.

    So the places that match the end of a text best lie together, where a binary search over keys of 8 tokens ends.
    The first `shared` tokens of the texts are left out of the index. `used`: when a draft last copied from each text.
    """

    def __init__(self, texts: Sequence[Numbers], shared: int, clock: Iterator[int]) -> None:
        gap, starts = np.int32(_GAP), DEPTH + np.cumsum([0, *(len(text) + 1 for text in texts)])
        self._tokens: Numbers = np.concatenate([np.full(DEPTH, gap), *(np.append(text, gap) for text in texts)])
        self._starts: NDArray[np.integer[Any]] = starts[:-1]
        self.used = [*islice(clock, len(texts))]
        ends = zip(starts, starts[1:] - 1, strict=False)
        places = np.concatenate([np.arange(start + max(shared, 1), end, dtype=np.int32) for start, end in ends])
        keys = _keys(self._before(places, _KEY))
        order = np.argsort(keys, kind="stable")
        self._keys, self._places = keys[order], places[order]

    @property
    def nbytes(self) -> int:
        arrays = self._tokens[DEPTH:].nbytes + self._keys.nbytes + self._places.nbytes
        return _SHELF + _TEXT * len(self.used) + arrays

    def common(self, text: Numbers, when: int) -> int:
        """How many of its first tokens a text here has, the longest such one, which counts as used.

        Only the latest of the texts that begin with its first 8 tokens are compared.
        """
        first = text[:_KEY]
        begins = self._tokens.take(self._starts[:, None] + np.arange(len(first)), mode="clip")
        best, longest = 0, 0
        for number in np.flatnonzero((begins == first).all(axis=1))[-_MOST_PLACES:].tolist():
            start = self._starts[number]
            ours = self._tokens[start : start + len(text)]
            same = np.append(ours == text[: len(ours)], False)
            if (length := int(same.argmin())) > longest:
                best, longest = number, length
        if longest:
            self.used[best] = when
        return longest

    def absorb(self, other: _Shelf) -> None:
        """Adds the texts of another shelf, and its index."""
        further = len(self._tokens) - DEPTH
        self._tokens = np.concatenate([self._tokens, other._tokens[DEPTH:]])
        self._starts = np.concatenate([self._starts, other._starts + further])
        self.used += other.used
        where = np.searchsorted(self._keys, other._keys, "right")
        self._keys = np.insert(self._keys, where, other._keys)
        self._places = np.insert(self._places, where, other._places + further)

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
        stay = np.array(self.used) > time
        tokens = np.repeat([True, *stay], np.diff(self._starts, prepend=0, append=len(self._tokens)))
        places, moved = tokens[self._places], tokens.cumsum(dtype=np.int32) - 1
        self._keys, self._places = self._keys[places], moved[self._places[places]]
        self._starts = moved[self._starts[stay]]
        self.used = [*compress(self.used, stay)]
        self._tokens = self._tokens[tokens]

    def _before(self, places: Numbers, most: int) -> Numbers:
        """The tokens `[places, most]` before each place, the last one first."""
        return self._tokens[places[:, None] - np.arange(1, most + 1)]

    def _matches(self, places: Numbers, tail: Numbers) -> Numbers:
        """How many tokens before each of `places` `[places]` equal `tail` `[DEPTH]`, from the last one on."""
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
