"""A row ends at the token that ends it, also in the middle of an accepted block."""

import time

import pytest
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from specdec.decoding.stopping import Stopping
from tests.proposers.fakes import FakeSequence


def row() -> FakeSequence:
    return FakeSequence([1, 2, 3], prompt_length=2)


def test_all_criteria_are_asked_even_at_the_end() -> None:
    """A criterion that counts its calls counts as in plain decoding; bare bools are answers too, before the length."""
    calls = []
    counting = [lambda ids, scores, n=n: calls.append(n) or n == 0 for n in range(2)]
    assert Stopping(frozenset({5}), criteria=counting)(row(), [5]) == "eos"
    assert calls == [0, 1]
    assert Stopping(max_length=4, criteria=counting)(row(), [5]) == "criteria"


@pytest.mark.parametrize(
    ("criterion", "reason"),
    [
        (MaxLengthCriteria(4), "length"),
        (EosTokenCriteria(5), "eos"),
        (MaxTimeCriteria(1.0, initial_timestamp=time.time() - 9), "time"),
    ],
)
def test_transformers_criteria_have_names(criterion, reason) -> None:
    assert Stopping(criteria=[criterion])(row(), [5]) == reason
