"""Copies what followed an earlier occurrence of the text's longest repeated suffix."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.proposers.copying import SEPARATOR, TextDraft

_ROOT = 0
_MAX_LINKS = 64  # states whose latest end a token updates
_GUESSES_PER_MATCH = 2  # guesses for each matched token


class SuffixAutomaton:
    """All substrings of a growing text, in amortised constant time per token (SAM-Decoding, arXiv 2411.10666).

    A state stands for the substrings that end at the same positions. Per state: the `length` of its longest substring,
    the `link` to the state of its longest suffix with more ends, and the `latest` end that a token follows. Each token
    updates `latest` along at most 64 links, which is exact except for short substrings of long runs of one token.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self.next: list[dict[int, int]] = [{}]
        self.length, self.link, self.latest = [0], [-1], [-1]
        self.whole = _ROOT

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends `tokens`; before each, records the end of the text as `latest`."""
        link, latest = self.link, self.latest
        for token in tokens:
            end, state = len(self.text) - 1, self.whole
            for _ in range(_MAX_LINKS):
                if state <= _ROOT:
                    break
                latest[state] = end
                state = link[state]
            self._append(token)
            self.text.append(token)

    def after(self, tail: Sequence[int]) -> tuple[int, int]:
        """The state and the length of the longest suffix of text + `tail` that occurs in the text."""
        state, length = self.whole, self.length[self.whole]
        for token in tail:
            while state > _ROOT and token not in self.next[state]:
                state = self.link[state]
                length = self.length[state]
            if token in self.next[state]:
                state, length = self.next[state][token], length + 1
        return state, length

    def _append(self, token: int) -> None:
        following, link = self.next, self.link
        end, before = len(self.text), self.whole
        state = self.whole = self._state(self.length[before] + 1, _ROOT, {}, end)
        while before >= 0 and token not in following[before]:
            following[before][token] = state
            before = link[before]
        if before < 0:
            return
        # The link is to the state whose longest substring is the longest one of `before`, followed by `token`.
        target = link[state] = following[before][token]
        if self.length[target] == self.length[before] + 1:
            return
        split = self._state(self.length[before] + 1, link[target], following[target].copy(), self.latest[target])
        while before >= 0 and following[before].get(token) == target:
            following[before][token] = split
            before = link[before]
        link[target] = link[state] = split

    def _state(self, length: int, link: int, following: dict[int, int], latest: int) -> int:
        self.next.append(following)
        self.length.append(length)
        self.link.append(link)
        self.latest.append(latest)
        return len(self.length) - 1

    def lookup(self, limit: int, tail: Sequence[int] = ()) -> tuple[list[int], int]:
        """At most `limit` tokens after the latest occurrence of the longest suffix, and that suffix's length."""
        state, match = self.after(tail)
        while state > _ROOT and (state == self.whole or self.text[self.latest[state] + 1] == SEPARATOR):
            state = self.link[state]  # nothing follows the longer one
            match = self.length[state]
        if state == _ROOT:
            return [], 0
        start, most = self.latest[state] + 1, min(limit, 1 + _GUESSES_PER_MATCH * match)
        tokens = self.text[start : start + most]
        if start + len(tokens) == len(self.text):  # the text ends in a repetition, which may go on
            tokens = (tokens * (most // len(tokens) + 1))[:most]
        return tokens, match


class SuffixDraft(TextDraft):
    """Copies what followed the longest repeated suffix, at most 1 + 2 tokens per matched one (arXiv 2411.10666).

    It also searches the input of an encoder-decoder target.
    """

    source = "suffix"
    reads_encoder = True

    def index(self) -> SuffixAutomaton:
        return SuffixAutomaton()
