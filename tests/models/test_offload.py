"""Offloaded models: their weights come in for each pass, and the text stays the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload

from specdec import LanguageModel, SpecGenerator, UnsupportedError
from tests.matrix import endless
from tests.oracle import oracle
from tests.test_exact import prompt_for, reference
from tests.tiny import tiny

pytestmark = pytest.mark.filterwarnings("ignore")
OPTIONS = endless(8)
CPU = torch.device("cpu")


def check(model: Any, inputs: dict[str, torch.Tensor], expected: list[list[int]], *drafts: Any) -> None:
    assert LanguageModel(model).device == CPU
    for draft in (None, "suffix", oracle("half", expected, 64), *drafts):
        assert SpecGenerator(model, draft).generate(**inputs, **OPTIONS).sequences.tolist() == expected, draft


NAMES = ["llama", "gemma2", "gpt2", "opt", "bloom", "falcon_alibi", "mamba2", "t5", "bart", "marian", "whisper"]
PLACES = [  # in turns, and all of them among the slow tests
    pytest.param(name, place, marks=[pytest.mark.slow] * ((i + j) % 2))
    for i, name in enumerate(NAMES)
    for j, place in enumerate(("disk", "cpu"))
]


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_offloaded_text(name: str, place: str, tmp_path: Path) -> None:
    """Weights that accelerate keeps elsewhere. (Their device was taken for the place of the ids: `meta`.)"""
    model, inputs = tiny(name), prompt_for(name, rows=2)
    expected = reference(model, inputs, max_new_tokens=8).tolist()
    if place == "cpu":
        cpu_offload(model, execution_device=CPU)
    else:
        disk_offload(model, tmp_path, execution_device=CPU)
    check(model, inputs, expected, tiny(name, seed=1))


def test_offloaded_later() -> None:
    """A model may be offloaded after its positions are looked up by a wrapper."""
    for name in ("bart", "t5", "bloom"):
        model, inputs = tiny(name), prompt_for(name)
        expected = reference(model, inputs, max_new_tokens=8).tolist()
        language = LanguageModel(model)
        cpu_offload(model, execution_device=CPU)
        assert SpecGenerator(language, "suffix").generate(**inputs, **OPTIONS).sequences.tolist() == expected


def test_what_offloading_rules_out() -> None:
    """An early exit says so; encoders whose weights are away are not compared."""
    model = tiny("bart")
    cpu_offload(model, execution_device=CPU)
    language = LanguageModel(model)
    assert not language.shares_encoder_with(LanguageModel(tiny("bart")))
    with pytest.raises(UnsupportedError, match="offloading"):
        language.early_exit(1)
