"""Lengths that a call, a generation config and a checkpoint name: the same number of tokens as in transformers."""

import warnings
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


@in_pairs(call=named(9, 7), config=[None, *named(10, 8)], checkpoint=named(11, 9))
def test_most_tokens(call: Lengths, config: Lengths | None, checkpoint: Lengths) -> None:
    """(A `max_length` of the call stood before the checkpoint's `max_new_tokens`, and both in a call were an error.)"""
    model = tiny("llama")
    model.generation_config = GenerationConfig(pad_token_id=0, **checkpoint)
    given: dict[str, Any] = {"do_sample": False, **call}
    if config is not None:
        given["generation_config"] = GenerationConfig(pad_token_id=0, **config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = model.generate(IDS, **given)
        ours = SpecGenerator(model, "suffix").generate(IDS, **given).sequences
    assert ours.equal(theirs)


@pytest.mark.parametrize("call", [{"min_length": 9}, {"min_new_tokens": 4}, {"min_length": 9, "min_new_tokens": 4}])
@pytest.mark.parametrize("checkpoint", [{}, {"min_length": 8}, {"min_new_tokens": 3}])
def test_least_tokens(call: Lengths, checkpoint: Lengths) -> None:
    """The same rule: new tokens stand before lengths."""
    model, ends = tiny("llama"), {"eos_token_id": list(range(2, 64)), "max_new_tokens": 12}
    model.generation_config = GenerationConfig(pad_token_id=0, **checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = model.generate(IDS, do_sample=False, **ends, **call)
        ours = SpecGenerator(model, "suffix").generate(IDS, **ends, **call).sequences
    assert ours.equal(theirs)


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
