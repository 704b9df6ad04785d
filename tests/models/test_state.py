"""Models that change between two calls: nothing that is remembered of a model outlives what it was remembered of."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from types import MethodType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specdec import LanguageModel, OptionError, SpecGenerator, UnsupportedError
from specdec.models import ModelState
from specdec.models.hf.model_state import StateReader
from tests.matrix import endless
from tests.tiny import DECODERS, NAMES, tiny, tiny_inputs

COMMON = endless(12)
PROMPT = torch.tensor([[(7 * i) % 50 + 5 for i in range(40)]])


def in_peft(model: Any, how: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT's own, of transformers
        return import_module("peft").get_peft_model(model, how)


def lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "down_proj"]
    how = peft.LoraConfig(r=2, lora_alpha=16, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = in_peft(model, how)
    adapted.add_adapter("b", how)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.5)
    return adapted.eval()


@contextmanager
def another_adapter(model: Any, *, merged: bool = False) -> Iterator[None]:
    model.set_adapter("b")
    if merged:
        model.merge_adapter()
    yield
    if merged:
        model.unmerge_adapter()
    model.set_adapter("default")


@contextmanager
@torch.no_grad()
def written_weights(model: Any) -> Iterator[None]:
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.mul_(-1)
    yield
    weight.mul_(-1)


@contextmanager
def swapped(owner: Any, name: str, other: Callable[[Any], Any]) -> Iterator[None]:
    """Another value of an attribute, made of its own."""
    held = getattr(owner, name)
    setattr(owner, name, other(held))
    yield
    setattr(owner, name, held)


@contextmanager
def other_attention(_: Any) -> Iterator[None]:
    held = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def flipped(*args: Any, **options: Any) -> Any:
        out, weights = held(*args, **options)
        return -out, weights

    AttentionInterface.register("sdpa", flipped)
    yield
    AttentionInterface.register("sdpa", held)


def patched(model: Any) -> Any:
    layer = model.model.layers[0].mlp
    return patch.object(layer, "forward", MethodType(lambda self, x: -type(self).forward(self, x), layer))


def tripled(module: Any, args: Any, out: Any) -> Any:
    return out * 3 if type(module).__name__ == "LlamaMLP" else None


OF_ADAPTERS: dict[str, Any] = {
    "disabled": lambda model: model.disable_adapter(),
    "another adapter": another_adapter,
    "merged": lambda model: another_adapter(model, merged=True),
}
OF_CODE: dict[str, Any] = {  # which nobody can read
    "steering": lambda model: model.model.layers[0].register_forward_hook(lambda _, args, out: out + 1.5),
    "early steering": lambda model: model.model.layers[1].register_forward_pre_hook(
        lambda _, args: (args[0] * -1, *args[1:])
    ),
    "global hook": lambda _: torch.nn.modules.module.register_module_forward_hook(tripled),
    "other attention": other_attention,
    "patched": patched,
}
OF_MODELS: dict[str, Any] = {
    "written weights": written_weights,
    "moved storage": lambda model: swapped(model.model.layers[1].mlp.up_proj.weight, "data", torch.neg),
    "attribute": lambda model: swapped(model.model.layers[0].self_attn, "scaling", lambda held: 4 * held),
    "replaced module": lambda model: swapped(model.model.layers[0], "mlp", lambda _: torch.nn.Identity()),
    **OF_CODE,
}
CHANGES = {**OF_MODELS, **OF_ADAPTERS}
steering = OF_CODE["steering"]


def own_text(model: Any) -> list[list[int]]:
    out = model.generate(input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), do_sample=False, **COMMON)
    return out.tolist()


@pytest.mark.parametrize("change", CHANGES)
def test_eager_passes_follow_a_change(change: str) -> None:
    """The text is the changed model's, and afterwards the one of before. (Its old keys and values were continued.)"""
    model = lora(tiny("llama")) if change in OF_ADAPTERS else tiny("llama")
    generator = SpecGenerator(model, "suffix")
    before = own_text(model)

    def check(expected: list[list[int]], *, known: bool = True) -> None:
        for cached in (0, 39 if known else 0):
            out = generator.generate(PROMPT, **COMMON)
            assert (out.sequences.tolist(), out.stats.cached_prompt_tokens) == (expected, cached)

    check(before)
    with CHANGES[change](model):
        changed = own_text(model)
        assert changed != before
        check(changed, known=change not in OF_CODE)
    assert generator.generate(PROMPT, **COMMON).sequences.tolist() == before


@pytest.mark.parametrize("change", OF_MODELS)
def test_copied_weights_refuse_a_change(change: str, built: None) -> None:
    """Passes over packed weights would not follow. (They went on with the old ones.)"""
    model = tiny("llama")
    generator = SpecGenerator(model, backend="packed")
    before = generator.generate(PROMPT, **COMMON).sequences.tolist()
    with CHANGES[change](model):
        with pytest.raises(OptionError, match=r"the target was changed .* make another SpecGenerator"):
            generator.generate(PROMPT, **COMMON)
        fresh = SpecGenerator(model, backend="packed").generate(PROMPT, **COMMON)
        assert fresh.sequences.tolist() == own_text(model) != before


@pytest.mark.parametrize("change", ["attribute", "steering"])
def test_another_state_between_two_pieces_of_a_stream(change: str) -> None:
    """What a stream read while another call had changed the model is continued by nobody, though all is as before."""
    model = tiny("llama")
    generator = SpecGenerator(model)
    stream = generator.stream(PROMPT, **COMMON)
    begun = [next(stream).token_ids[0], next(stream).token_ids[0]]
    with CHANGES[change](model):
        generator.generate(PROMPT.flip(1), **COMMON)
    begun += [token for event in stream for token in event.token_ids]
    out = generator.generate([[*PROMPT[0].tolist(), *begun]], **COMMON)
    assert out.stats.cached_prompt_tokens == 0


def scale(kind: str, module: Any, strength: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a caller's own code scale what a module returns."""
    original, of_class = module.forward, type(module).forward
    if kind == "hook":
        module.register_forward_hook(lambda _, args, out: out * strength[0])
    elif kind == "class":
        other = wraps(of_class)(lambda self, x: of_class(self, x) * strength[0])
        monkeypatch.setattr(type(module), "forward", other)
    else:
        module.forward = wraps(original)(lambda *args: original(*args) * strength[0])
        if kind == "decorated method":
            module.forward = torch.no_grad()(module.forward)


@pytest.mark.parametrize("kind", ["hook", "method", "decorated method", "class"])
def test_what_nobody_can_read_is_continued_by_nobody(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller's code may look at anything. Where it is asked for, texts are kept all the same.

    (Code that had its name from `functools.wraps` was taken for the library's.)
    """
    model, strength = tiny("llama"), [1.0]
    scale(kind, model.model.layers[0].mlp, strength, monkeypatch)
    generator = SpecGenerator(model)
    for strength[0] in (1.0, -1.0):
        out = generator.generate(PROMPT, **COMMON)
        assert (out.sequences.tolist(), out.stats.cached_prompt_tokens) == (own_text(model), 0)
    asked = SpecGenerator(model, prefix_cache=True)
    loaded = SpecGenerator(LanguageModel(model, backend="eager", owned=True))
    for generator in (asked, loaded):  # a model that specdec has loaded belongs to it
        assert [generator.generate(PROMPT, **COMMON).stats.cached_prompt_tokens for _ in range(2)] == [0, 39]


@pytest.mark.parametrize("kind", ["list", "config", "number", "tensor", "weight"])
def test_an_equal_thing_in_the_place_of_another(kind: str) -> None:
    """A second look sees what happens to it later, though it was equal when it came in."""
    model = tiny("llama")
    layer = model.model.layers[0].mlp
    layer.names, layer.vector = ["a"], torch.ones(1)
    layer.register_buffer("one", torch.ones(1))
    reader = StateReader(model)
    before = reader.read()
    layer.names, layer.vector, layer.one = ["a"], torch.ones(1), torch.ones(1)
    model.config = copy.deepcopy(model.config)
    reader.read()
    held = {"tensor": layer.vector, "weight": layer.one.data}
    changes = {"list": lambda: layer.names.append("b"), "config": lambda: setattr(model.config, "scale", 3)}
    changes |= {"number": lambda: setattr(layer, "scale", 3.0)}
    changes.get(kind, lambda: held[kind].fill_(3))()
    assert reader.read() == ModelState.of(model) != before


def test_settings_of_every_kind_are_read() -> None:
    """Numbers of numpy, tensors that are plain attributes, buffers, weights in another order, classes' own methods."""
    model = tiny("llama")
    layer = model.model.layers[0]
    layer.mlp.up_proj.weight = torch.nn.Parameter(layer.mlp.up_proj.weight.data.t().contiguous().t())
    states = [ModelState.of(model)]

    def flipped(self: Any, x: torch.Tensor) -> torch.Tensor:
        return -x

    with pytest.MonkeyPatch.context() as context:
        for change in (
            lambda: setattr(layer, "scales", {"a": np.float64(2.0)}),
            lambda: setattr(layer, "scales", {"a": np.float64(3.0)}),
            lambda: setattr(layer, "vector", torch.ones(4)),
            lambda: layer.vector.mul_(2),
            lambda: layer.mlp.up_proj.weight.data.mul_(-1),
            lambda: model.model.rotary_emb.inv_freq.mul_(2),
            lambda: context.setattr(type(layer.mlp), "forward", flipped),
        ):
            change()
            states.append(ModelState.of(model))
    assert len({state.digest for state in states}) == len(states)
    assert [state.is_readable for state in states] == [True] * (len(states) - 1) + [False]  # the caller's own method
    layer.control = type("Control", (), {})()
    layer.rings = rings = []
    rings.append(rings)
    assert not ModelState.of(model).is_readable


def test_copied_weights_take_what_changes_nothing(tmp_path: Any, built: None) -> None:
    """What a forward does not read, and weights that are written anew as they were."""
    model = tiny("llama")
    generator = SpecGenerator(model, backend="packed")
    before = generator.generate(PROMPT, **COMMON).sequences.tolist()
    model.config.pad_token_id, model.note = 3, "mine"
    model.save_pretrained(tmp_path)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    assert generator.generate(PROMPT, **COMMON).sequences.tolist() == before


def test_one_look_for_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that end together are kept after one look at the model, and none where the caller waited for them."""
    looks, read = [], StateReader.read
    monkeypatch.setattr(StateReader, "read", lambda reader: (looks.append(1), read(reader))[1])
    generator = SpecGenerator(tiny("llama"))
    looks.clear()
    prompts, options = [[i + 5] * 20 for i in range(16)], {**COMMON, "max_new_tokens": 1}
    generator.generate(prompts, **options)
    assert len(looks) == 1
    list(generator.stream(prompts, **options))
    assert len(looks) == 1 + 2


def test_a_draft_over_copied_weights_refuses_changes() -> None:
    """Its guesses would be those of the model that it was."""
    draft = tiny("llama", seed=1)
    generator = SpecGenerator(tiny("llama"), draft, backend="packed")
    generator.generate(PROMPT, **COMMON)
    with steering(draft), pytest.raises(OptionError, match="the draft was changed"):
        generator.generate(PROMPT, **COMMON)
    generator.generate(PROMPT, **COMMON)


def test_a_model_that_was_cast_is_refused() -> None:
    """Masks, positions and buffers have the type that it had."""
    model = tiny("llama")
    generator = SpecGenerator(model)
    generator.generate(PROMPT, **COMMON)
    model.to(torch.bfloat16)
    with pytest.raises(OptionError, match=r"the target was changed .*dtype.*make another SpecGenerator"):
        generator.generate(PROMPT, **COMMON)
    model.to(torch.float32)
    model.set_attn_implementation("eager")
    with pytest.raises(OptionError, match="attention implementation"):
        generator.generate(PROMPT, **COMMON)


class Centred(torch.nn.Linear):
    """A layer whose rows depend on each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean())


def centred_head(model: Any) -> Any:
    return swapped(model, "lm_head", lambda head: Centred(*reversed(head.weight.shape), bias=False))


def test_exactness_is_of_the_call() -> None:
    """A call under way is described as it began. (It was as another call, which came later, had found the model.)"""
    model = tiny("llama")
    generator = SpecGenerator(model, prefix_cache=False)
    stream = generator.stream(PROMPT, **COMMON)
    with centred_head(model):
        assert generator.generate(PROMPT, **COMMON).stats.exactness == "row-dependent"
    ends = []

    def to_the_end() -> Iterator[Any]:
        ends.append((yield from stream))

    list(to_the_end())
    assert ends[0].stats.exactness == "exact"


@pytest.mark.parametrize("change", ["replaced", "written"])
def test_weights_that_are_read_for_each_pass(change: str) -> None:
    """Another weight in what an offloaded model reads is noticed. (Its old keys and values were continued.)"""
    model = cpu_offload(tiny("llama"), execution_device=torch.device("cpu"))
    generator = SpecGenerator(model, "suffix")
    weights = model.model.layers[0].mlp.down_proj._hf_hook.weights_map.dataset
    name = "model.layers.0.mlp.down_proj.weight"
    for cached in (0, 39):
        assert generator.generate(PROMPT, **COMMON).stats.cached_prompt_tokens == cached
    if change == "replaced":
        weights[name] = -weights[name]
    else:
        weights[name].data.mul_(-1)
    out = generator.generate(PROMPT, **COMMON)
    assert (out.sequences.tolist(), out.stats.cached_prompt_tokens) == (own_text(model), 0)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_rounded_float32_is_not_exact(precision: str) -> None:
    """Products of fewer bits round differently in passes of other widths. (They were called exact, and continued.)

    Neither kind of call continues what the other has read.
    """
    generator = SpecGenerator(tiny("llama"))
    rounds = precision == "medium"  # oneDNN takes no tf32
    torch.set_float32_matmul_precision(precision)
    try:
        for cached in (0, 39):
            out = generator.generate(PROMPT, **COMMON)
            assert (out.stats.exactness, out.stats.cached_prompt_tokens) == ("rounding" if rounds else "exact", cached)
    finally:
        torch.set_float32_matmul_precision("highest")
    out = generator.generate(PROMPT, **COMMON)
    assert (out.stats.exactness, out.stats.cached_prompt_tokens) == ("exact", 0 if rounds else 39)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "rwkv"])  # which scales its weights in a pass
def test_passes_change_no_state(name: str) -> None:
    """What they leave behind in a model is not taken for a change, and everything in it can be read."""
    model = tiny(name)
    before = ModelState.of(model)
    assert before.is_readable
    inputs = {"input_ids": PROMPT} if name in DECODERS else tiny_inputs(name, 1)
    SpecGenerator(model, "suffix").generate(**inputs, **COMMON, output_hidden_states=True)
    assert ModelState.of(model) == before


def test_models_of_peft() -> None:
    """Their adapters lie in the layers of a transformers model, which is taken; prompts that are learned do not."""
    peft = pytest.importorskip("peft")
    adapted = lora(tiny("llama"))
    generator = SpecGenerator(adapted, lora(tiny("llama", seed=1)))
    of_tokens = peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"], init_lora_weights=False)
    looked_up = in_peft(tiny("llama"), of_tokens).eval()
    assert SpecGenerator(looked_up).generate(PROMPT, **COMMON).sequences.tolist() == own_text(looked_up)
    assert generator.generate(PROMPT, **COMMON).sequences.tolist() == own_text(adapted)
    how = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, token_dim=32)
    learned = in_peft(tiny("llama"), how)
    with pytest.raises(UnsupportedError, match="`target` has the adapter 'default', a PromptTuningConfig"):
        SpecGenerator(learned.eval())
