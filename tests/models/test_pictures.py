"""Models that see write what `model.generate` writes: every family, with any draft, whatever shares their passes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from torch import Tensor
from transformers import GenerationMixin

from specdec import SpecGenerator
from tests.matrix import endless
from tests.oracle import oracle
from tests.pictures import FAMILIES, VOCAB, batch, prompt, seeing

LENGTH = 16
BEGINNING, MIDDLE, ENDING = [1, 5, 6, 7, 8], [20, 21], [9, 10, 11, 12, 13]


@cache
def model_of(family: str) -> Any:
    return seeing(family)


def rows_of(family: str) -> list[dict[str, Tensor]]:
    """Text alone, a picture at the beginning, one in text, and two."""
    parts = [(BEGINNING, ENDING), ([1], 0, ENDING), (BEGINNING, 0, ENDING), (BEGINNING, 1, MIDDLE, 2, ENDING)]
    return [prompt(family, *row) for row in parts]


def reference(model: Any, row: dict[str, Tensor], **options: Any) -> list[list[int]]:
    """transformers' text of one row."""
    settings = endless(LENGTH, **{"do_sample": False, "eos_token_id": None, **options})
    found: list[list[int]] = GenerationMixin.generate(model, **row, **settings).tolist()
    return found


@cache
def expected(family: str) -> list[list[int]]:
    """The greedy text of every row."""
    return [reference(model_of(family), row)[0] for row in rows_of(family)]


def new(rows: Any) -> list[list[int]]:
    """The new tokens of rows of ids."""
    return [list(map(int, row[-LENGTH:])) for row in rows]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(family: str) -> None:
    """In one batch, with drafts that are right, half right, wrong and random."""
    model, inputs = model_of(family), batch(family, rows_of(family))
    other = reference(model, prompt(family, BEGINNING, 3, ENDING))
    assert new(other) != new(expected(family)[2:3]), "another picture in the same text changes nothing"
    for kind in (None, "perfect", "half", "wrong", "random"):
        draft = None if kind is None else oracle(kind, expected(family), VOCAB)
        out = SpecGenerator(model, draft).generate(**inputs, **endless(LENGTH))
        assert new(out.sequences) == new(expected(family)), kind
        if kind == "perfect":
            assert out.stats.draft_acceptance_rate == 1.0


@pytest.mark.parametrize("family", FAMILIES)
def test_beams_equal_transformers(family: str) -> None:
    """Of two pictures in one text, with a draft."""
    model, row = model_of(family), rows_of(family)[3]
    options = {"num_beams": 3, "num_return_sequences": 2}
    out = SpecGenerator(model, "ngram").generate(**row, **endless(8, **options))
    assert out.sequences.tolist() == reference(model, row, max_new_tokens=8, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_and_layers_of_our_own(family: str) -> None:
    """Packed passes write the same greedy text; a seed's text is the same with and without a draft."""
    model, inputs = model_of(family), batch(family, rows_of(family))
    packed = SpecGenerator(model, "suffix", backend="packed")
    assert new(packed.generate(**inputs, **endless(LENGTH)).sequences) == new(expected(family))
    sampled = endless(LENGTH, do_sample=True, seed=3, num_return_sequences=2)
    plain = SpecGenerator(model).generate(**inputs, **sampled)
    assert packed.generate(**inputs, **sampled).sequences.tolist() == plain.sequences.tolist()
