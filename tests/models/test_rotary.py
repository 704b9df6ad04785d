"""Rotary scaling that depends on the length: the same text with any draft, batch or chunk, and transformers' own."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdec import LanguageModel, SpecGenerator, UnsupportedError
from specdec.models.hf.positions import Scaling
from specdec.models.protocols import Capability
from tests.matrix import endless, in_turn
from tests.oracle import KINDS, oracle
from tests.test_exact import new_tokens, reference
from tests.tiny import tiny
from tests.versions import OLD

pytestmark = pytest.mark.filterwarnings("ignore")

SWITCH = 32
THETA = {"rope_theta": 1e4}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, **THETA}
LONG = {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": SWITCH}, "max_position_embeddings": 128}
TWICE = {"rope_type": "dynamic", "factor": 2.0, **THETA}
BY_LAYER = {"full_attention": TWICE, "sliding_attention": {"rope_type": "default", **THETA}}
DYNAMIC = {"rope_parameters": TWICE, "max_position_embeddings": 26}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "rereads": ("phi3", {**LONG, "original_max_position_embeddings": SWITCH}),
    "longrope": ("llama", LONG),
    "dynamic": ("llama", DYNAMIC),
    "layers": ("gemma3_text", {**DYNAMIC, "rope_parameters": BY_LAYER}),
    "complex": ("llama4_text", DYNAMIC),
    "recurrent": ("qwen3_next", {**DYNAMIC, "rope_parameters": {**TWICE, "partial_rotary_factor": 0.5}}),
}
PROMPTS = (20, 26, 31, 32, 33, 45)
LENGTH = 16
OPTIONS = endless(LENGTH)


def scaled(name: str) -> Any:
    """A model that no pass has run through yet: dynamic scaling remembers the longest text."""
    if OLD and name == "rereads":
        pytest.skip("transformers before 5.18 reads one token instead of the whole text")
    kind, options = MODELS[name]
    return tiny(kind, **deepcopy(options))  # configs write into what they are given


def prompt(length: int, seed: int = 1) -> Tensor:
    return torch.randint(5, 64, (1, length), generator=torch.Generator().manual_seed(seed))


def theirs(name: str, ids: Tensor, **options: Any) -> list[list[int]]:
    """transformers' own text, with a cache, from a fresh model."""
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return reference(scaled(name), inputs, max_new_tokens=LENGTH, **options).tolist()


@in_turn(name=[*MODELS], length=PROMPTS)
def test_text_equals_transformers(name: str, length: int) -> None:
    """Before, across and beyond the switch. (Drafted nodes beyond it changed the angles of the whole pass.)"""
    ids = prompt(length)
    expected = theirs(name, ids)
    model = LanguageModel(scaled(name))
    others = (
        oracle("wrong", expected, 64),
        oracle("random", expected, 64),
        tiny(MODELS[name][0]),
        "suffix",
        "early_exit:1",
    )
    turn = PROMPTS.index(length) + list(MODELS).index(name)
    for draft in (None, oracle("perfect", expected, 64), oracle("half", expected, 64), others[turn % len(others)]):
        assert SpecGenerator(model, draft).generate(ids, **OPTIONS).sequences.tolist() == expected, draft


@pytest.mark.parametrize("name", MODELS)
def test_rows_equal_themselves_alone(name: str) -> None:
    """Rows on both sides of the switch. (The short rows took the longest row's angles.)"""
    prompts = [prompt(n, seed=n)[0].tolist() for n in (3, 19, 30, 44)]
    model = LanguageModel(scaled(name))
    alone = [theirs(name, torch.tensor([p]))[0] for p in prompts]
    for draft in (None, oracle("half", alone, 64), oracle("perfect", alone, 64)):
        together = new_tokens(SpecGenerator(model, draft), prompts, OPTIONS)
        assert together == [row[len(p) :] for row, p in zip(alone, prompts, strict=True)]


@in_turn(name=[*MODELS], length=[31, 45])
def test_prompts_in_chunks(name: str, length: int) -> None:
    """A chunk is scaled as the prompt that it is part of. (Each went by its own length.)"""
    ids = prompt(length)
    expected = theirs(name, ids)
    for draft in (None, oracle("half", expected, 64)):
        generator = SpecGenerator(scaled(name), draft)
        assert generator.generate(ids, **OPTIONS, prefill_chunk_size=7).sequences.tolist() == expected


@in_turn(name=["rereads", "longrope", "dynamic"], length=[20, 31])
def test_beams(name: str, length: int) -> None:
    """Branches cross the switch together, whatever they share; also where all of them are read again, in chunks."""
    ids = prompt(length)
    expected = theirs(name, ids, num_beams=3)
    for draft in (None, "suffix", "early_exit:1", oracle("half", expected, 64), scaled(name)):
        chunk = 2048 if draft is None or draft == "suffix" else 7
        out = SpecGenerator(scaled(name), draft).generate(ids, **OPTIONS, num_beams=3, prefill_chunk_size=chunk)
        assert out.sequences.tolist() == expected, draft


@pytest.mark.parametrize("name", ["rereads", "longrope", "dynamic"])
@pytest.mark.parametrize("capability", [Capability("replay"), Capability("replay", chunks=False)], ids=["all", "one"])
def test_the_library_s_own_cache(name: str, capability: Capability) -> None:
    """Sessions that feed text again after a rollback scale it as they did before."""
    ids = prompt(25)
    expected = theirs(name, ids)
    model = LanguageModel(scaled(name), capability=capability)
    for draft in (None, *(oracle(kind, expected, 64) for kind in KINDS)):
        assert SpecGenerator(model, draft).generate(ids, **OPTIONS).sequences.tolist() == expected


@pytest.mark.parametrize("seed", range(4))
def test_guidance_crosses_twice(seed: int) -> None:
    """A negative prompt of another length comes to the switch at another time."""
    ids, negative = prompt(20, seed), prompt(27, seed + 9)
    options = {**OPTIONS, "guidance_scale": 4.0, "negative_prompt_ids": negative}
    plain = SpecGenerator(scaled("rereads")).generate(ids, **options).sequences.tolist()
    for kind in KINDS:
        generator = SpecGenerator(scaled("rereads"), oracle(kind, plain, 64))
        assert generator.generate(ids, **options).sequences.tolist() == plain, kind


def test_hidden_states_of_a_text_read_again() -> None:
    """The token at the switch comes with those of the whole text, as in transformers."""
    ids, options = prompt(30), {"return_dict_in_generate": True, "output_hidden_states": True}
    expected: Any = reference(scaled("rereads"), {"input_ids": ids}, max_new_tokens=LENGTH, **options)
    out = SpecGenerator(scaled("rereads"), "suffix").generate(ids, **OPTIONS, **options)
    for ours, own in zip(out.hidden_states, expected.hidden_states, strict=True):
        assert all(torch.allclose(a, b, atol=2e-4) for a, b in zip(ours, own, strict=True))


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_nothing_is_remembered(name: str) -> None:
    """Texts do not depend on earlier ones, nor the model's own calls on ours. (Dynamic scaling keeps its longest.)"""
    ids, model = prompt(30), scaled(name)
    generator = SpecGenerator(model, "suffix")
    expected = theirs(name, ids)
    own = model(ids).logits
    for earlier in (60, 90):
        generator.generate(prompt(earlier), **OPTIONS)
        assert torch.equal(model(ids).logits, own)
        assert generator.generate(ids, **OPTIONS).sequences.tolist() == expected
    model(prompt(100))
    assert generator.generate(ids, **OPTIONS).sequences.tolist() == expected


def test_scaling_that_nobody_can_set() -> None:
    """A rotary module that is not the library's cannot be asked for spans."""
    with pytest.raises(UnsupportedError, match="rope_scaling"):
        Scaling(nn.Linear(2, 2), 32)
