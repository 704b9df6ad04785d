"""Drafts that copy from the text: prompt lookup, the suffix draft, and what they share."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from specdec.errors import OptionError
from specdec.proposers import NgramDraft, SuffixDraft
from specdec.proposers.copying import Calibration, TextDraft
from specdec.proposers.suffix import SuffixAutomaton
from tests.proposers.fakes import FakeBudget, FakeSequence, one, task

Make = type[NgramDraft] | type[SuffixDraft]
texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@pytest.fixture(params=[NgramDraft, SuffixDraft])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


@given(texts, st.integers(1, 4), st.integers(1, 6))
def test_prompt_lookup_is_the_references(text: list[int], max_ngram: int, num_tokens: int) -> None:
    """The proposal is the one of transformers' PromptLookupCandidateGenerator, token for token."""
    reference = PromptLookupCandidateGenerator(
        eos_token_id=None, num_output_tokens=num_tokens, max_matching_ngram_size=max_ngram, max_length=1000
    )
    expected = reference.get_candidates(torch.tensor([text]))[0][0, len(text) :].tolist()
    session = NgramDraft(num_tokens, max_ngram).start(50)
    assert one(session, FakeSequence(text), 100) == expected


def test_reading_in_pieces_equals_reading_at_once(make: Make) -> None:
    """Rows that grow by one to four tokens a round draft what a new session drafts, each for itself."""
    rng = random.Random(1)
    session = make().start(50)
    rows = [FakeSequence([rng.randrange(4)], key) for key in range(3)]
    for _ in range(40):
        for row in rows:
            row.tokens += [rng.randrange(4) for _ in range(rng.randint(1, 4))]
        limits = [FakeBudget(rng.choice([0, 1, 7])) for _ in rows]
        for row, budget, tree in zip(rows, limits, session.propose(rows, limits), strict=True):
            assert tree.tokens == one(make().start(50), row, budget.limit)
            assert len(tree.confidence or ()) == len(tree)
            assert tree.q is None


def test_cuts_to_the_plan_and_to_the_end(make: Make) -> None:
    """No more than the limit, than the tokens that may come but one, and than what the budget keeps."""
    text = list(range(9)) * 3
    assert one(make().start(50), FakeSequence(text), 4) == [0, 1, 2, 3]
    assert one(make().start(50), FakeSequence(text, remaining=3), 9) == [0, 1]
    assert one(make().start(50), FakeSequence(text, remaining=1), 9) == []
    assert one(make().start(50), FakeSequence(text), 0) == []
    assert not make().start(50).propose([FakeSequence(text)], [FakeBudget(5, drop=2.0)])[0].tokens


def test_a_prediction_begins_where_the_prompt_ends(make: Make) -> None:
    """Also for a draft that comes to the text late. (It was taken to begin where the draft did.)"""
    prediction = [11, 12, 13, 14]
    for known in range(3):
        row = FakeSequence([7, 8, 9, *prediction[:known]], prompt_length=3, prediction=prediction)
        assert one(make().start(50), row) == prediction[known:]


def test_copies_nothing_after_the_end_of_a_text(make: Make) -> None:
    """What followed it in another text does not follow it here."""
    row = FakeSequence([*range(9), *range(9), 0, 1], task=task(ends=frozenset({4, 6})))
    assert one(make().start(50), row, 5) == [2, 3, 4]


def test_searches_the_encoders_input() -> None:
    """Encoder tokens are copied from, but never across their end nor beyond the target's vocabulary."""
    row = FakeSequence([7, 1, 2], encoder_tokens=[1, 2, 3, 4])
    assert one(SuffixDraft().start(50), row) == [3, 4]
    row = FakeSequence([0, 3, 4], encoder_tokens=[1, 2, 3, 4])
    assert one(SuffixDraft().start(50), row) == []
    row = FakeSequence([0, 1, 2], encoder_tokens=[1, 2, 3, 60])
    assert one(SuffixDraft().start(50), row) == [3]


def test_a_failure_leaves_the_session_usable(make: Make) -> None:
    """A row whose reading failed half way is read anew; the others keep theirs."""
    session, row = make().start(50), FakeSequence([1, 2, 3, 1, 2])
    assert one(session, row, 1) == [3]
    row.tokens += [3, [], 1]  # type: ignore[list-item]
    with pytest.raises(TypeError):
        one(session, row)
    row.tokens[-2] = 1
    assert one(session, row) == one(make().start(50), row)


def test_a_text_that_was_written_anew_is_read_anew(make: Make) -> None:
    """Copies come from the text as it is now."""
    session, row = make().start(50), FakeSequence([1, 2, 3, 1, 2])
    one(session, row)
    row.tokens = [1, 2, 4, 1, 2]
    assert one(session, row, 1) == [4]


def test_suffix_prefers_the_longest_match_and_the_latest_occurrence() -> None:
    """Where prompt lookup takes the first place that two tokens match, the suffix draft takes the best one."""
    text = [1, 2, 3, 9, 8, 1, 2, 4, 5, 8, 1, 2]
    assert one(NgramDraft(2).start(50), FakeSequence(text)) == [3, 9]
    assert one(SuffixDraft().start(50), FakeSequence(text), 2) == [4, 5]
    text = [1, 5, 0, 1, 5, 0, 2, 1, 6, 0, 3, 1]
    assert one(SuffixDraft().start(50), FakeSequence(text), 1) == [6]


def test_a_text_draft_needs_an_index_only() -> None:
    """Its name is its class's, and its `__init__` may be any. (Both were AttributeErrors at the first proposal.)"""

    class Mine(TextDraft):
        def __init__(self) -> None:
            self.most = 2

        def index(self) -> SuffixAutomaton:
            return SuffixAutomaton()

    [tree] = Mine().start(50).propose([FakeSequence([1, 2, 1, 2])], [FakeBudget(2)])
    assert (tree.tokens, tree.source) == ([1, 2], "Mine")


def test_calibration_learns_from_what_came() -> None:
    """Confidence starts high for long matches alone, and goes where the outcomes go; untested guesses do not count."""
    calibration = Calibration()
    assert calibration.rates(1, 2) == [0.2, 0.5]
    assert calibration.rates(16, 1)[0] > 0.9
    for _ in range(50):
        calibration.learn([1, 2, 3], 16, [1, 2, 3])
        calibration.learn([1, 2, 3], 1, [2, 2, 3])
        calibration.learn([1, 2, 3], 64, [2, 2, 3])
    [short], [long], [longest] = (calibration.rates(match, 1) for match in (1, 16, 64))
    assert max(short, longest) < 0.1
    assert long > 0.9
    assert calibration.rates(2, 1)[0] == 0.5


def test_confidence_rises_for_a_text_that_repeats() -> None:
    """A session scores its own guesses against the text that came."""
    draft = SuffixDraft()
    session, row = draft.start(50), FakeSequence([1, 2, 3, 4, 5])
    for _ in range(30):
        row.tokens.append(row.tokens[-5])
        session.propose([row], [FakeBudget(3)])
    confidence = session.propose([row], [FakeBudget(3)])[0].confidence
    assert min(confidence) > 0.8
    assert draft.start(50).guess(FakeSequence([1, 1]), 1)[1][0] > 0.2


@pytest.mark.parametrize("bad", [{"num_tokens": 0}, {"max_ngram": 0}])
def test_ngram_refuses_nonsense(bad: dict[str, int]) -> None:
    """Counts below one raise and name the argument."""
    with pytest.raises(OptionError, match=next(iter(bad))):
        NgramDraft(**bad)
