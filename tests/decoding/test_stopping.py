"""A row ends at the token that ends it, also in the middle of an accepted block."""

from __future__ import annotations

import time

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
    StopStringCriteria,
)

from specdec.decoding.stopping import Stopping
from tests.proposers.fakes import FakeSequence


def row() -> FakeSequence:
    return FakeSequence([1, 2, 3], prompt_length=2)


def test_eos_and_length_without_criteria() -> None:
    """Integers only; end-of-sequence is named before the length."""
    stop = Stopping(frozenset({7, 9}), 6)
    reasons = [stop(row(), new) for new in ([5], [5, 7], [5, 6], [5, 6, 4], [5, 6, 9])]
    assert reasons == [None, "eos", None, "length", "eos"]
    assert Stopping()(row(), [7] * 50) is None


def test_criteria_see_the_text_up_to_the_new_token() -> None:
    """Once per token, as ids `[1, length]`, with the scores they may ask for."""
    seen = []

    def own(ids, scores):
        seen.append((ids.tolist(), scores))
        return torch.tensor([ids.shape[1] >= 5])

    stop, scores = Stopping(criteria=StoppingCriteriaList([own])), (torch.zeros(1, 3),)
    assert [stop(row(), new, scores) for new in ([5], [5, 6])] == [None, "criteria"]
    assert seen == [([[1, 2, 3, 5]], scores), ([[1, 2, 3, 5, 6]], scores)]


def test_all_criteria_are_asked_even_at_the_end() -> None:
    """A criterion that counts its calls counts as in plain decoding; a bare bool is an answer too."""
    calls = []
    counting = [lambda ids, scores, n=n: calls.append(n) or n == 0 for n in range(2)]
    assert Stopping(frozenset({5}), criteria=counting)(row(), [5]) == "eos"
    assert calls == [0, 1]


@pytest.mark.parametrize(
    ("criterion", "reason"),
    [
        (MaxLengthCriteria(4), "length"),
        (EosTokenCriteria(5), "eos"),
        (MaxTimeCriteria(1.0, initial_timestamp=time.time() - 9), "time"),
    ],
)
def test_transformers_criteria_have_names(criterion, reason) -> None:
    """The finish reason names the kind of criterion."""
    assert Stopping(criteria=[criterion])(row(), [5]) == reason


def test_stop_strings_end_inside_a_block() -> None:
    """The string is complete at the second of three tokens: there the row ends."""
    words = {"<unk>": 0, "a": 1, "b": 2, "abcdef": 3, "st": 4, "op": 5, "x": 6}  # transformers probes with "abcdef"
    model = Tokenizer(WordLevel(words, "<unk>"))
    model.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>")
    stop = Stopping(criteria=StoppingCriteriaList([StopStringCriteria(tokenizer, ["stop"])]))
    assert [stop(row(), new) for new in ([4], [4, 5], [6, 5])] == [None, "stop", None]
