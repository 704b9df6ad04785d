"""Own processors in place of transformers' say the same, bit for bit, after every text."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as stock

from specdec import kernels
from specdec.decoding.noise import EMPTY
from specdec.decoding.processors import Processors, Timestamps
from specdec.decoding.processors.builtin import MinLength, MinNewTokens, Suppress, SuppressAtBegin

VOCAB, FIRST, END = 26, 14, 10  # between the end and the timestamps: a few tokens of other use
TOKEN = st.one_of(st.integers(0, FIRST - 1), st.integers(FIRST, VOCAB - 1))  # half of all tokens are timestamps
TEXTS = st.integers(1, 9).flatmap(
    lambda length: st.lists(st.lists(TOKEN, min_size=length, max_size=length), min_size=1, max_size=3)
)


def settings(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"no_timestamps_token_id": FIRST - 1, "eos_token_id": END, "bos_token_id": 1, **more})


def logits_of(rows: int, seed: int, dtype: torch.dtype, scale: float = 3.0) -> Tensor:
    """Of bfloat16 there are many equal ones."""
    return (torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@given(
    texts=TEXTS, seed=st.integers(0, 999), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    begin=st.integers(0, 4), most=st.sampled_from([None, 0, 3, 50]), by_probability=st.booleans(),
    scale=st.sampled_from([0.0, 0.3, 3.0]),
)  # fmt: skip
def test_timestamps(texts, seed, dtype, begin, most, by_probability, scale) -> None:
    """Whatever the order of timestamps and their probability, ties among them included."""
    ids, logits = torch.tensor(texts), logits_of(len(texts), seed, dtype, scale)
    theirs = stock.WhisperTimeStampLogitsProcessor(
        settings(max_initial_timestamp_index=most), begin, _detect_timestamp_from_logprob=by_probability
    )
    own = Timestamps(FIRST, begin, END, most_initial=most, by_probability=by_probability)
    before = logits.clone()
    for length in range(1, ids.shape[1] + 1):
        found = theirs(ids[:, :length], logits)
        assert torch.equal(own(ids[:, :length], logits), found)
    assert torch.equal(logits, before)


@given(
    length=st.integers(1, 8), tokens=st.lists(st.integers(-1, VOCAB + 2), max_size=30), seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), least=st.integers(0, 6),
)  # fmt: skip
def test_suppressed_tokens(length, tokens, seed, dtype, least) -> None:
    """Never, at the begin, or before a least length; ids that the vocabulary lacks do nothing."""
    ids, logits = torch.ones(2, length, dtype=torch.long), logits_of(2, seed, dtype)
    ends = torch.tensor(tokens, dtype=torch.long)
    pairs = [
        (Suppress(tokens), stock.SuppressTokensLogitsProcessor(tokens)),
        (SuppressAtBegin(tokens, least), stock.SuppressTokensAtBeginLogitsProcessor(tokens, least)),
        (MinLength(least, ends), stock.MinLengthLogitsProcessor(least, ends)),
        (MinNewTokens(2 + least, ends), stock.MinNewTokensLengthLogitsProcessor(2, least, ends)),
    ]
    before = logits.clone()
    for own, theirs in pairs:
        assert torch.equal(own(ids, logits), theirs(ids, logits))
        assert type(own).stands_for is type(theirs)
    assert torch.equal(logits, before)


@pytest.mark.skipif(not kernels.available(), reason="needs kernels")
@given(
    text=st.lists(TOKEN, min_size=1, max_size=9),
    tokens=st.sets(st.integers(-1, VOCAB + 3)),
    seed=st.integers(0, 999),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.sampled_from([0.0, 3.0]),
)
def test_the_best_token_in_one_call(text, tokens, seed, dtype, scale) -> None:
    """It is the argmax of the scores that the processors make, the first of equals."""
    logits = logits_of(1, seed, dtype, scale)
    processors = Processors((Suppress(tokens), SuppressAtBegin([3, 17], 4), Timestamps(FIRST, 1, END, most_initial=3)))
    scores = processors(torch.tensor([text]), logits)[0]
    expected = EMPTY if scores.max() == -torch.inf else int(scores.numpy().argmax())
    assert kernels.best_token(logits[0], processors.in_numbers(text)) == expected
