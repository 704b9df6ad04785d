"""Copies what followed the longest suffix of the text that occurred before, found by a suffix automaton."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.errors import OptionError
from specdec.proposers.copying import SEPARATOR, TextDrafter, until_separator

_ROOT = 0
_REACH = 64


class SuffixAutomaton:
    """All substrings of a growing text, in amortised constant time per token (SAM-Decoding, arXiv 2411.10666).

    A state stands for the substrings that end at the same positions. Per state: `length` of its longest substring,
    `link` to the state of its longest suffix with more ends, the `first` and `latest` end, the `count` of ends.
    `latest` and `count` leave out the end of the whole text, which nothing follows yet. Each token updates them along
    at most 64 links: exact but for short substrings of text that repeats one token at length.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self.next: list[dict[int, int]] = [{}]
        self.length, self.link = [0], [-1]
        self.first, self.latest, self.count = [-1], [-1], [0]
        self.whole = _ROOT

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends `tokens`."""
        for token in tokens:
            self._settle()
            self._append(token)
            self.text.append(token)

    def after(self, tail: Sequence[int]) -> tuple[int, int]:
        """The state of the longest suffix of the text and `tail` that occurs in the text, and that suffix's length."""
        state, length = self.whole, self.length[self.whole]
        for token in tail:
            while state > _ROOT and token not in self.next[state]:
                state = self.link[state]
                length = self.length[state]
            if token in self.next[state]:
                state, length = self.next[state][token], length + 1
        return state, length

    def _settle(self) -> None:
        """Counts the end of the text so far, now that something follows it."""
        end, state = len(self.text) - 1, self.whole
        link, latest, count = self.link, self.latest, self.count
        for _ in range(_REACH):
            if state <= _ROOT:
                return
            latest[state] = end
            count[state] += 1
            state = link[state]

    def _append(self, token: int) -> None:
        following, link = self.next, self.link
        end, before = len(self.text), self.whole
        state = self.whole = self._state(self.length[before] + 1, _ROOT, {}, end, end, 0)
        while before >= 0 and token not in following[before]:
            following[before][token] = state
            before = link[before]
        if before >= 0:
            link[state] = self._longest_with(before, token)

    def _longest_with(self, before: int, token: int) -> int:
        """The state whose longest substring is that of `before` followed by `token`, split off if need be."""
        following, link = self.next, self.link
        found = following[before][token]
        if self.length[found] == self.length[before] + 1:
            return found
        split = self._state(
            self.length[before] + 1,
            link[found],
            following[found].copy(),
            self.first[found],
            self.latest[found],
            self.count[found],
        )
        while before >= 0 and following[before].get(token) == found:
            following[before][token] = split
            before = link[before]
        link[found] = split
        return split

    def _state(self, length: int, link: int, following: dict[int, int], first: int, latest: int, count: int) -> int:
        self.next.append(following)
        self.length.append(length)
        self.link.append(link)
        self.first.append(first)
        self.latest.append(latest)
        self.count.append(count)
        return len(self.length) - 1


class SuffixIndex:
    """Looks up continuations in a suffix automaton: the most recent ones, or the most frequent."""

    def __init__(self, growth: float, min_match: int, frequent: bool) -> None:
        self._growth, self._min_match, self._frequent = growth, min_match, frequent
        self._automaton = SuffixAutomaton()
        self.extend = self._automaton.extend

    def lookup(self, limit: int, tail: Sequence[int] = ()) -> tuple[list[int], int]:
        """At most `limit` tokens after an earlier occurrence of the longest suffix, and that suffix's length."""
        follow = self._most_frequent if self._frequent else self._most_recent
        automaton = self._automaton
        state, match = automaton.after(tail)
        if state == automaton.whole:  # nothing follows it
            state = automaton.link[state]
            match = automaton.length[state]
        while state > _ROOT and match >= self._min_match:
            if tokens := follow(state, min(limit, 1 + int(self._growth * match))):
                return tokens, match
            state = automaton.link[state]
            match = automaton.length[state]
        return [], 0

    def _most_recent(self, state: int, limit: int) -> list[int]:
        text, start = self._automaton.text, self._automaton.latest[state] + 1
        tokens = until_separator(text[start : start + limit])
        if start + len(tokens) == len(text):
            # The copy has run into the text's end: what repeats so far may go on repeating.
            tokens = (tokens * (limit // len(tokens) + 1))[:limit]
        return tokens

    def _most_frequent(self, state: int, limit: int) -> list[int]:
        following, count, latest = self._automaton.next, self._automaton.count, self._automaton.latest
        tokens: list[int] = []
        while len(tokens) < limit and following[state]:
            token, state = max(following[state].items(), key=lambda item: (count[item[1]], latest[item[1]]))
            if token == SEPARATOR:
                break
            tokens.append(token)
        return tokens


class SuffixDrafter(TextDrafter):
    """Copies what followed the longest repeated suffix (SAM-Decoding, arXiv 2411.10666).

    A match of m tokens allows 1 + `growth`·m guesses; shorter matches than `min_match` allow none. `frequent` follows
    the most frequent continuation (SuffixDecoding, arXiv 2411.04975) in place of the most recent. With `encoder` (the
    default) an encoder-decoder target's input is searched too.
    """

    source = "suffix"

    def __init__(
        self, *, growth: float = 2.0, min_match: int = 1, frequent: bool = False, encoder: bool = True
    ) -> None:
        if growth < 0:
            raise OptionError.of("growth", "at least 0", growth)
        if min_match < 1:
            raise OptionError.of("min_match", "at least 1", min_match)
        super().__init__(encoder=encoder)
        self.growth, self.min_match, self.frequent = growth, min_match, frequent

    def __repr__(self) -> str:
        return f"SuffixDrafter(growth={self.growth}, min_match={self.min_match}, frequent={self.frequent})"

    def index(self) -> SuffixIndex:
        return SuffixIndex(self.growth, self.min_match, self.frequent)
