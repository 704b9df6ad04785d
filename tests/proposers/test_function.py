"""The adapter of the user's own function."""

from itertools import count

import numpy as np
import pytest
import torch

from specdec.errors import DraftError, OptionError
from specdec.proposers import FunctionDraft
from tests.proposers.fakes import FakeBudget, FakeSequence, one


class Echo:
    def propose(self, tokens: list[int], k: int) -> list[int]:
        return tokens[:k]


@pytest.mark.parametrize("draft", [Echo(), Echo().propose, lambda tokens, k: torch.tensor(tokens[:k])])
def test_takes_objects_and_callables(draft: object) -> None:
    """A Drafter, a bound method and a lambda that returns a tensor all draft."""
    session = FunctionDraft(draft).start(50)  # type: ignore[arg-type]
    assert one(session, FakeSequence([1, 2, 3, 4]), 3) == [1, 2, 3]


@pytest.mark.parametrize(
    "value", [[1, 2], (1, 2), np.array([1, 2]), torch.tensor([1, 2]), [np.int64(1), torch.tensor(2)]]
)
def test_kinds_of_token_lists(value: object) -> None:
    assert one(FunctionDraft(lambda tokens, k: value).start(50), FakeSequence([1])) == [1, 2]  # type: ignore


def test_longer_proposals_are_cut() -> None:
    """Tokens beyond k, beyond the end of the text, and beyond what the budget keeps are left out."""
    session = FunctionDraft(lambda tokens, k: range(20)).start(50)
    assert one(session, FakeSequence([1]), 3) == [0, 1, 2]
    assert one(session, FakeSequence([1], remaining=3), 9) == [0, 1]
    assert one(FunctionDraft(lambda tokens, k: count()).start(50), FakeSequence([1]), 3) == [0, 1, 2]
    assert not session.propose([FakeSequence([1])], [FakeBudget(5, drop=2.0)])[0].tokens


def test_is_not_asked_for_nothing() -> None:
    """A limit of 0 and the last token to come do not call the function."""
    session = FunctionDraft(lambda tokens, k: 1 / 0).start(50)  # type: ignore
    assert one(session, FakeSequence([1]), 0) == []
    assert one(session, FakeSequence([1], remaining=1)) == []


@pytest.mark.parametrize(
    "value", [None, 7, "ab", [1.0], ["a"], [50], [-1], [True], [[1, 2]], torch.tensor([[1]]), torch.tensor(3)]
)
def test_says_what_came_instead_of_tokens(value: object) -> None:
    """Anything else raises DraftError that shows the value; nothing reaches the target."""
    with pytest.raises(DraftError, match="must return"):
        one(FunctionDraft(lambda tokens, k: value).start(50), FakeSequence([1]))  # type: ignore


def test_the_row_is_safe_from_the_function() -> None:
    """The function gets a copy of the text."""

    def greedy_eater(tokens: list[int], k: int) -> list[int]:
        tokens.clear()
        return []

    row = FakeSequence([1, 2])
    one(FunctionDraft(greedy_eater).start(50), row)
    assert row.tokens == [1, 2]


@pytest.mark.parametrize(("draft", "words"), [(3, "^`draft` must be"), (Echo, r"the class Echo': pass Echo\(\.\.\.\)")])
def test_refuses_what_makes_no_tokens(draft: object, words: str) -> None:
    """Neither a Drafter nor a callable, or a class, which can be called: the way out is an instance."""
    with pytest.raises(OptionError, match=words):
        FunctionDraft(draft)  # type: ignore[arg-type]
