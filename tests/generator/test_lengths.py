"""Lengths that a call, a generation config and a checkpoint name: the same number of tokens as in transformers."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from specdec import SpecGenerator
from tests.matrix import in_pairs
from tests.tiny import tiny

IDS = torch.tensor([[5, 9, 12, 7]])
Lengths = dict[str, int]


def named(length: int, new: int) -> list[Lengths]:
    """No limit, either one, and both."""
    return [{}, {"max_length": length}, {"max_new_tokens": new}, {"max_length": length, "max_new_tokens": new}]


def check(model: Any, **given: Any) -> None:
    """The text is transformers' own."""
    theirs = model.generate(IDS, do_sample=False, **given)
    assert SpecGenerator(model, "suffix").generate(IDS, do_sample=False, **given).sequences.equal(theirs)


@pytest.mark.filterwarnings("ignore")
@in_pairs(call=named(9, 7), config=[None, *named(10, 8)], checkpoint=named(11, 9))
def test_most_tokens(call: Lengths, config: Lengths | None, checkpoint: Lengths) -> None:
    """(A `max_length` of the call stood before the checkpoint's `max_new_tokens`, and both in a call were an error.)"""
    model = tiny("llama")
    model.generation_config = GenerationConfig(pad_token_id=0, **checkpoint)
    check(model, **call, generation_config=None if config is None else GenerationConfig(pad_token_id=0, **config))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", [{"min_length": 9}, {"min_new_tokens": 4}, {"min_length": 9, "min_new_tokens": 4}])
@pytest.mark.parametrize("checkpoint", [{}, {"min_length": 8}, {"min_new_tokens": 3}])
def test_least_tokens(call: Lengths, checkpoint: Lengths) -> None:
    """The same rule: new tokens stand before lengths."""
    model = tiny("llama")
    model.generation_config = GenerationConfig(pad_token_id=0, **checkpoint)
    check(model, **call, eos_token_id=list(range(2, 64)), max_new_tokens=12)


def test_a_generators_lengths_are_defaults() -> None:
    """A call that names a length in either word replaces the generator's; those stand before the checkpoint's."""
    model = tiny("llama")
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None, max_length=30)
    generator = SpecGenerator(model, max_new_tokens=7)
    assert generator.generate(IDS).stats.num_new_tokens == 7
    assert generator.generate(IDS, max_length=9).stats.num_new_tokens == 5
    model.generation_config.max_new_tokens = 6
    with pytest.warns(UserWarning, match="`max_length`=9 has no effect beside `max_new_tokens`=6"):
        assert generator.generate(IDS, max_length=9).stats.num_new_tokens == 6
