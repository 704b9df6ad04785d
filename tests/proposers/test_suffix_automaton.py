"""The suffix automaton against a search by brute force."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.proposers.suffix import SuffixAutomaton

texts = st.lists(st.integers(0, 2), max_size=24)


def ends(text: list[int], part: list[int]) -> list[int]:
    """Where `part` ends in `text`."""
    n = len(part)
    return [end for end in range(n - 1, len(text)) if text[end - n + 1 : end + 1] == part]


def find(automaton: SuffixAutomaton, tokens: list[int]) -> int | None:
    """The state of the substring `tokens`, None if it does not occur."""
    state: int | None = 0
    for token in tokens:
        state = None if state is None else automaton.next[state].get(token)
    return state


def matches(automaton: SuffixAutomaton) -> list[int]:
    """The states of the text's suffixes that occurred before, longest first."""
    states, state = [], automaton.link[automaton.whole]
    while state > 0:
        states.append(state)
        state = automaton.link[state]
    return states


@given(texts, texts)
@settings(max_examples=60)
def test_knows_every_substring_and_its_ends(text: list[int], other: list[int]) -> None:
    """Each substring is found with its latest end, the text's own left out."""
    automaton = SuffixAutomaton()
    automaton.extend(text)
    for start in range(len(text)):
        for stop in range(start + 1, len(text) + 1):
            state = find(automaton, text[start:stop])
            followed = [end for end in ends(text, text[start:stop]) if end < len(text) - 1]
            if followed:
                assert automaton.latest[state] == followed[-1]
    assert (find(automaton, other) is not None) == (not other or bool(ends(text, other)))


@given(texts)
def test_matches_are_the_suffixes_that_occurred_before(text: list[int]) -> None:
    """The longest match is the longest suffix that occurred earlier; the others are shorter ones, longest first."""
    automaton = SuffixAutomaton()
    for token in text:
        automaton.extend([token])
    lengths = [automaton.length[state] for state in matches(automaton)]
    repeated = [n for n in range(1, len(text)) if len(ends(text, text[-n:])) > 1]
    assert lengths == sorted(lengths, reverse=True)
    assert set(lengths) <= set(repeated)
    assert max(lengths, default=0) == max(repeated, default=0)


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
    longest = matches(automaton)[0]
    assert automaton.length[longest] == 19_999
    assert automaton.latest[longest] == 19_998
