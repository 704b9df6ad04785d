"""Models that change between two calls: nothing that is remembered of a model outlives what it was remembered of."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import MethodType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specdec import LanguageModel, OptionError, SpecGenerator, UnsupportedError
from specdec.models import language_model
from tests.matrix import endless
from tests.tiny import tiny

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
UNSEEN = {"attribute", "patched", "other attention", "global hook"}
"""Changes that copies of weights do not see by themselves."""
steering = OF_CODE["steering"]


def adapted(change: str) -> Any:
    return lora(tiny("llama")) if change in OF_ADAPTERS else tiny("llama")


def own_text(model: Any) -> list[list[int]]:
    out = model.generate(input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), do_sample=False, **COMMON)
    return out.tolist()


@pytest.mark.parametrize("change", CHANGES)
def test_eager_passes_follow_a_change(change: str) -> None:
    """The text is the changed model's, and afterwards the one of before. (Its old keys and values were continued.)

    Where a caller asks to continue earlier texts, it is so once the change was told.
    """
    model = adapted(change)
    generator, promised = SpecGenerator(model, "suffix"), SpecGenerator(model, "suffix", prefix_cache=True)

    def check(expected: list[list[int]]) -> None:
        promised.model_changed()
        for cached in (0, 39):
            assert generator.generate(PROMPT, **COMMON).sequences.tolist() == expected
            out = promised.generate(PROMPT, **COMMON)
            assert (out.sequences.tolist(), out.stats.cached_prompt_tokens) == (expected, cached)

    before = own_text(model)
    check(before)
    with CHANGES[change](model):
        assert own_text(model) != before
        check(own_text(model))
    check(before)


@pytest.mark.parametrize("change", OF_MODELS)
def test_copied_weights_are_made_anew(change: str, built: None) -> None:
    """Once a change was told, the text is the changed model's; what a copy sees by itself is an error until then.

    (Passes went on with the old weights.)
    """
    model = tiny("llama")
    generator = SpecGenerator(model, "early_exit:1", backend="packed", prefix_cache=True)
    before = own_text(model)
    assert generator.generate(PROMPT, **COMMON).sequences.tolist() == before
    with CHANGES[change](model):
        if change not in UNSEEN:
            with pytest.raises(OptionError, match=r"the target was changed .* call `generator.model_changed\(\)`"):
                generator.generate(PROMPT, **COMMON)
        generator.model_changed()
        out = generator.generate(PROMPT, **COMMON)
        assert (out.sequences.tolist(), out.stats.cached_prompt_tokens) == (own_text(model), 0)
        assert own_text(model) != before
    generator.model_changed()
    assert generator.generate(PROMPT, **COMMON).sequences.tolist() == before


def test_a_change_reaches_calls_that_were_made_before() -> None:
    """What a stream or a job began with is continued by nobody, and generators that share a model all forget."""
    model = tiny("llama")
    target = LanguageModel(model)
    generator, other = (SpecGenerator(target, prefix_cache=True) for _ in range(2))
    stream, job = generator.stream(PROMPT, **COMMON), other.submit(PROMPT, **COMMON)
    begun = [next(stream).token_ids[0], next(stream).token_ids[0]]
    other.generate(PROMPT, **COMMON)
    with CHANGES["written weights"](model):
        generator.model_changed()
        out = job.run()
        assert (out.sequences.tolist(), out.stats.cached_prompt_tokens) == (own_text(model), 0)
        begun += [token for event in stream for token in event.token_ids]
        out = generator.generate([[*PROMPT[0].tolist(), *begun]], **COMMON)
        assert out.stats.cached_prompt_tokens == 0


def test_nobody_looks_at_what_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at a model that belongs to specdec, nor, in eager passes, at a caller's weights. (Each call read all.)"""
    monkeypatch.setattr(language_model, "origins", None)
    for model in (tiny("llama"), LanguageModel(tiny("llama"), backend="eager", owned=True)):
        SpecGenerator(model, tiny("llama", seed=1)).generate(PROMPT, **COMMON)


def test_a_draft_over_copied_weights_refuses_changes() -> None:
    """Its guesses would be those of the model that it was."""
    draft = tiny("llama", seed=1)
    generator = SpecGenerator(tiny("llama"), draft, backend="packed")
    generator.generate(PROMPT, **COMMON)
    with steering(draft), pytest.raises(OptionError, match="the draft was changed"):
        generator.generate(PROMPT, **COMMON)
    generator.generate(PROMPT, **COMMON)


@pytest.mark.parametrize("backend", ["eager", "packed"])
def test_a_model_that_was_cast_is_refused(backend: str, built: None) -> None:
    """Masks, positions and buffers have the type that it had, also after the change was told."""
    model = tiny("llama")
    generator = SpecGenerator(model, backend=backend)
    generator.generate(PROMPT, **COMMON)
    model.to(torch.bfloat16)
    with pytest.raises(OptionError, match=r"the target was changed .*dtype.*make another SpecGenerator"):
        generator.generate(PROMPT, **COMMON)
    generator.model_changed()
    with pytest.raises(OptionError, match=r"dtype.*make another SpecGenerator"):
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
        generator.model_changed()
        assert generator.generate(PROMPT, **COMMON).stats.exactness == "row-dependent"
    ends = []

    def to_the_end() -> Iterator[Any]:
        ends.append((yield from stream))

    list(to_the_end())
    assert ends[0].stats.exactness == "exact"


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_rounded_float32_is_not_exact(precision: str) -> None:
    """Products of fewer bits round differently in passes of other widths. (They were called exact, and continued.)

    Neither kind of call continues what the other has read.
    """
    generator = SpecGenerator(tiny("llama"), prefix_cache=True)
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
