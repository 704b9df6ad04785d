"""The suffix automaton against a search by brute force."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.proposers.copying import SEPARATOR
from specdec.proposers.suffix import SuffixAutomaton

texts = st.lists(st.integers(SEPARATOR, 2), max_size=24)


def expected(text: list[int], tail: list[int], limit: int) -> tuple[list[int], int]:
    """What followed the latest occurrence of the longest suffix after which something did, and its length."""
    whole = text + tail
    for n in range(len(whole), 0, -1):
        after = [at for at in range(n, len(text)) if text[at - n : at] == whole[-n:]]
        if after and text[after[-1]] != SEPARATOR:
            most = min(limit, 1 + 2 * n)
            return (text[after[-1] :] * most)[:most], n  # a text that ends in a repetition goes on with it
    return [], 0


@given(texts, st.lists(st.integers(0, 2), max_size=4), st.integers(1, 9))
@settings(max_examples=200)
def test_finds_what_followed_the_longest_suffix(text: list[int], tail: list[int], limit: int) -> None:
    """Of a text that was read in pieces, also after a branch."""
    automaton = SuffixAutomaton()
    for start in range(0, len(text), 5):
        automaton.extend(text[start : start + 5])
    assert automaton.lookup(limit, tail) == expected(text, tail, limit)


@given(texts)
def test_stays_small(text: list[int]) -> None:
    """At most 2n states and 3n transitions (Blumer et al., 1985)."""
    automaton = SuffixAutomaton()
    automaton.extend(text)
    assert len(automaton.length) <= max(2 * len(text), 2)
    assert sum(map(len, automaton.next)) <= max(3 * len(text), 1)


def test_one_repeated_token_stays_linear() -> None:
    """A run of one token has a link chain as long as the text; updates walk only part of it."""
    automaton = SuffixAutomaton()
    began = time.process_time()
    automaton.extend([7] * 20_000)
    assert time.process_time() - began < 5.0
    assert automaton.lookup(3) == ([7, 7, 7], 19_999)
