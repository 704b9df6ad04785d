"""The memory against a search by brute force, its bounds and its salts."""

import random
import sys
import threading
from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.proposers import NgramDraft, SuffixDraft
from specdec.proposers.copying import TextDraft
from specdec.proposers.memory import DEPTH, Memory
from tests.proposers.fakes import FakeSequence, one, task

texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=24), min_size=1, max_size=5)


def expected(
    texts: list[list[int]], tail: list[int], limit: int
) -> tuple[list[int], int, list[tuple[int, int]]] | None:
    """The most frequent continuations of the longest suffix of `tail` that a token follows in `texts`."""
    for n in range(min(len(tail), DEPTH), 1, -1):
        after = [
            (text, at)
            for text in texts[::-1]
            for at in range(len(text) - 1, n - 1, -1)
            if text[at - n : at] == tail[-n:]
        ]
        if after:
            tokens, counts = [], []
            while len(tokens) < min(limit, 1 + 2 * n):
                column = [text[at] if at < len(text) else None for text, at in after]
                [(token, times)] = Counter(column).most_common(1)
                if token is None:
                    break
                tokens.append(token)
                counts.append((times, len(after)))
                after = [(text, at + 1) for (text, at), other in zip(after, column, strict=True) if other == token]
            return tokens, n, counts
    return None


@given(texts, st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(1, 9))
@settings(max_examples=200)
def test_finds_the_most_frequent_continuation_of_the_longest_suffix(
    texts: list[list[int]], tail: list[int], limit: int
) -> None:
    """Also one that is longer than a key."""
    memory = Memory(2**20)
    memory.read(texts)
    assert memory.lookup(tail, "", limit) == expected(texts, tail, limit)


@given(texts)
def test_a_beginning_is_indexed_once(texts: list[list[int]]) -> None:
    """Texts that came one by one hold every continuation, and a text that came again adds nothing."""
    memory = Memory(2**20)
    for text in texts:
        memory.remember(text, "")
    size = memory.nbytes
    for text in texts:
        memory.remember(text, "")
        for at in range(2, len(text)):
            remembered = memory.lookup(text[:at], "", 1)
            assert remembered is not None
            assert remembered.match >= min(at, DEPTH)
    assert memory.nbytes == size


def test_the_least_used_text_goes_first() -> None:
    """The bound holds after every text, and what a draft copies from stays."""
    memory, rng = Memory(40_000), random.Random(0)
    used = [rng.randrange(1000) for _ in range(100)]
    memory.remember(used, "")
    for number in range(50):
        memory.remember([rng.randrange(1000, 2000) for _ in range(100)], str(number % 3))
        assert memory.nbytes <= memory.most_bytes
        assert memory.lookup(used[:9], "", 4).tokens == used[9:13]
    assert memory.nbytes > memory.most_bytes / 2
    memory.remember([rng.randrange(2000) for _ in range(10_000)], "")
    assert 0 < memory.nbytes <= memory.most_bytes


def test_salts_share_files_alone() -> None:
    """A text is seen by requests of its salt, a file by all; `forget` drops both (the files stayed)."""
    memory = Memory(2**20)
    memory.read([[1, 2, 3, 4]])
    memory.remember([5, 6, 7, 8], "a")
    for salt in ("", "a", "b"):
        assert memory.lookup([1, 2], salt, 5).tokens == [3, 4]
        assert (memory.lookup([5, 6], salt, 5) is not None) == (salt == "a")
    memory.forget()
    assert memory.lookup([5, 6], "a", 5) is memory.lookup([1, 2], "a", 5) is None
    assert not memory.nbytes


def test_shelves_of_several_sizes_hold_all_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new text moved all that was remembered; now a large shelf stays until an eighth of its size came."""
    monkeypatch.setattr("specdec.proposers.memory._SMALL", 0)
    memory, rng = Memory(2**20), random.Random(0)
    every = [[rng.randrange(9000) for _ in range(200)] for _ in range(30)]
    for text in every:
        memory.remember(text, "")
        memory.remember(text, "")
    [large, *small] = memory._shelves[""]
    assert small
    assert sum(len(shelf.used) for shelf in (large, *small)) == len(every)
    assert memory.nbytes == sum(shelf.nbytes for shelf in (large, *small))
    for text in every:
        assert memory.lookup(text[:9], "", 1).tokens == text[9:10]
    keys = large._keys
    memory.remember([*every[0], 1, 2], "")
    assert memory._shelves[""][0]._keys is keys
    assert memory.lookup([*every[0], 1], "", 1).tokens == [2]


def test_small_texts_count() -> None:
    """Shelves and texts of a few tokens took 1 kB and 100 bytes more than was counted."""
    memory = Memory(20_000)
    for number in range(1000):
        memory.remember([1, 2, 3], str(number))
    assert sum(memory.lookup([1, 2], str(number), 1) is not None for number in range(1000)) < 20


def test_files_are_read_as_far_as_they_fit() -> None:
    """All were taken, however many, before the first were dropped."""
    memory, files = Memory(20_000), count()
    assert not memory.read([number] * 50 for number in files)
    assert next(files) < 20
    assert memory.lookup([0, 0], "", 1).tokens == [0]
    assert memory.nbytes <= memory.most_bytes


def test_threads_share_a_memory() -> None:
    """A draft of the caller's in two generators had a text of one thread change the index under the other."""
    memory, failures = Memory(60_000), list[BaseException]()

    def work(first: int) -> None:
        try:
            for number in range(150):
                memory.remember([first + number, *range(40)], "")
                memory.lookup([first + number, 0, 1], "", 4)
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=work, args=(1000 * number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not failures
    assert memory.nbytes == sum(shelf.nbytes for shelf in memory._shelves[""]) <= memory.most_bytes


@pytest.fixture(params=[NgramDraft, SuffixDraft])
def draft(request: pytest.FixtureRequest) -> TextDraft:
    draft: TextDraft = request.param()
    draft.memory = Memory(2**20)
    return draft


def test_a_text_that_ended_is_copied_from(draft: TextDraft) -> None:
    """By later sequences of its salt, of any proposer; where the sequence repeats itself as much, it is preferred."""
    session = draft.start(50)
    one(session, FakeSequence([1, 2, 3, 4, 5, 6], task=task(salt="a")))
    session.drop([0])
    for salt, tokens in (("a", [4, 5, 6]), ("b", [])):
        assert one(draft.start(50), FakeSequence([9, 1, 2, 3], task=task(salt=salt))) == tokens
    assert one(draft.start(50), FakeSequence([2, 3, 7, 2, 3], task=task(salt="a")), 1) == [7]


def test_ids_that_the_target_lacks_are_not_proposed(draft: TextDraft) -> None:
    """A memory may hold the ids of another tokenizer."""
    draft.memory.read([[1, 2, 3, 70, 4]])
    assert one(draft.start(50), FakeSequence([8, 1, 2])) == [3]


def test_frequencies_are_the_confidence(draft: TextDraft) -> None:
    """A token that nine of ten texts have is surer than one that five of ten have."""
    draft.memory.read([[1, 2, 3 if n < 9 else 4] for n in range(10)] + [[5, 6, 7 if n < 5 else 8] for n in range(10)])
    session = draft.start(50)
    often, half = (session.guess(FakeSequence(text, n), 1)[1][0] for n, text in enumerate([[1, 2], [5, 6]]))
    assert half < 0.6 < 0.8 < often
