"""Backends: packed layers say what the model says, models that were handed over stay as they are, "auto" measures."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Blip2ForConditionalGeneration

from specdec import LanguageModel, OptionError, SpecGenerator, UnsupportedError, kernels
from specdec.models.backends import packed_layers
from specdec.models.backends.packed_layers import PackedEmbedding, is_packed
from specdec.models.loading import load
from specdec.models.loading.load import load_model
from specdec.options.load import Loading
from tests.folders import saved
from tests.matrix import endless, in_pairs, slow
from tests.shrink import tiny_of
from tests.tiny import NAMES, never, tiny, tiny_inputs

COMMON = endless(14)
READERS = ("mamba", "mamba2", "falcon_mamba", "jamba")
USUAL = (  # one of each kind of layers
    "llama", "qwen2", "gpt2", "gemma2", "bloom", "opt", "gpt_neox", "falcon_alibi", "mixtral", "deepseek_v3", "gpt_oss",
    "qwen3_next", "recurrent_gemma", "lfm2", "mamba", "jamba", "t5", "bart", "whisper", "marian",
)  # fmt: skip
PROMPT = [[5, 9, 12, 7, 9, 12, 7]]


def logits(model: Any, name: str, rows: int = 2) -> torch.Tensor:
    ids = torch.tensor([[5, 9, 12, 7], [6, 6, 9, 30]])[:rows]
    if not model.config.is_encoder_decoder:
        return model(ids).logits
    inputs = {key: value[:1].expand(rows, *value.shape[1:]) for key, value in tiny_inputs(name).items()}
    inputs = {key: value.to(model.dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    return model(decoder_input_ids=ids, **inputs).logits


@torch.no_grad()
@pytest.mark.parametrize("name", [name if name in USUAL else slow(name) for name in NAMES])
def test_packed_layers_say_the_same(name: str) -> None:
    """A model that was handed over keeps its modules and weights; what runs in its place computes the same."""
    model = tiny(name)
    before = {key: (type(module), *map(id, module.parameters(recurse=False))) for key, module in model.named_modules()}
    if name in READERS:
        with pytest.raises(
            UnsupportedError, match=r"reads weights of its layers by itself, .*: leave out `backend`='packed'"
        ):
            LanguageModel(model, backend="packed")
        return
    language = LanguageModel(model, backend="packed")
    assert language.backend == "packed"
    assert "packed" in repr(language)
    assert language.model is not model
    assert not is_packed(model)
    after = {key: (type(module), *map(id, module.parameters(recurse=False))) for key, module in model.named_modules()}
    assert after == before
    torch.testing.assert_close(logits(language.model, name), logits(model, name), rtol=1e-4, atol=1e-4)


def test_a_model_object_that_would_be_faster_packed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A caller's model ran eager, at a fraction of the speed, without a word; small ones, and by choice, still do."""
    SpecGenerator(tiny("llama"))
    monkeypatch.setattr(load, "_LARGE", 1)
    load._report_slow.cache_clear()
    for name, backend in (("llama", "eager"), ("llama", "packed"), ("mamba", "auto")):
        SpecGenerator(tiny(name), backend=backend)
    assert "as you loaded it" not in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr("specdec.kernels.build._lack", never)  # (to say so, kernels were built for a minute)
        for draft in (None, tiny("llama")):
            SpecGenerator(tiny("llama"), draft)
    [line] = [line for line in caplog.messages if "as you loaded it" in line]
    assert line.startswith("the target, a LlamaForCausalLM, stays")
    assert "pass `backend='packed'`" in line


@pytest.mark.parametrize("name", ["bloom", "t5", "bart", "llama"])
def test_packed_passes_write_the_same(name: str) -> None:
    """However positions are given, also beside a packed embedding. (Bloom's ended in an AttributeError.)"""
    model = tiny(name)
    plain, packed = (SpecGenerator(model, "suffix", backend=backend) for backend in ("eager", "packed"))
    prompts = [*PROMPT, PROMPT[0][:3]]
    assert packed.generate(prompts, **COMMON).sequences.tolist() == plain.generate(prompts, **COMMON).sequences.tolist()


@torch.no_grad()
@in_pairs(
    name=["llama", "gpt2", "t5", "whisper", "qwen2", "bart"], tied=[True, False], dtype=[torch.float32, torch.bfloat16]
)
def test_loaded_models_hold_their_weights_once(name: str, tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """In place of the layers, and an embedding reads the head's copy."""
    folder = saved(name, tmp_path, tie_word_embeddings=tied)
    plain, packed = (load_model(folder, Loading(dtype=dtype, backend=backend)) for backend in ("eager", "packed"))
    assert (plain.backend, packed.backend) == ("eager", "packed")
    assert not [name for name, module in packed.model.named_modules() if type(module) is nn.Linear]
    shares = any(isinstance(module, PackedEmbedding) for module in packed.model.modules())
    assert shares == (plain.model.get_output_embeddings().weight is plain.model.get_input_embeddings().weight)
    assert packed.weight_bytes < 2.2 * plain.weight_bytes  # tiny layers are mostly padding
    torch.testing.assert_close(
        logits(packed.model, name), logits(plain.model, name), rtol=3e-2, atol=3e-2 if dtype != torch.float32 else 1e-4
    )


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_whisper_s_encoder(dtype: torch.dtype, tolerance: float) -> None:
    """Packed, over attention of our own: the same frames for each of several inputs, and the same encoder to others."""
    model = tiny("whisper").to(dtype)
    plain, packed = LanguageModel(model), LanguageModel(model, backend="packed")
    inputs = tiny_inputs("whisper", 3)
    expected, found = (language.encode(inputs).hidden for language in (plain, packed))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert not torch.equal(found, expected)  # another order of sums
    assert torch.equal(packed.encode({"input_features": inputs["input_features"][1:2]}).hidden, found[1:2])
    assert packed.encode(inputs, output_hidden_states=True).hidden_states is not None
    assert packed.shares_encoder_with(plain)


def test_the_backend_reaches_drafts(tmp_path: Path) -> None:
    """Named by id, as an object, in a pair, or made of the target's own layers."""
    folder = saved("llama", tmp_path, tie_word_embeddings=True)
    for draft in (folder, tiny("llama", seed=1), f"suffix+{folder}", "early_exit:1"):
        generator = SpecGenerator(tiny("llama"), draft, backend="packed")
        assert [model.backend for model in generator.draft.models if model is not generator.target] == ["packed"]
    shallow = SpecGenerator.from_pretrained(folder, "early_exit:1", backend="packed")
    assert [model.backend for model in shallow.draft.models] == ["packed"]
    assert shallow.generate(torch.tensor(PROMPT), **COMMON).stats.num_draft_tokens
    generator = SpecGenerator.from_pretrained(folder, folder, backend="packed")
    assert [generator.target.backend, *(model.backend for model in generator.draft.models)] == ["packed", "packed"]


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("faster", [True, False])
def test_auto_measures_once(
    faster: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_verdicts: Path
) -> None:
    """A loaded model is packed where its passes are faster then, which is known the next time; else it is as loaded."""
    timed: list[bool] = []

    def measured(model: Any) -> float:
        timed.append(is_packed(model))
        return 1.0 if is_packed(model) == faster else 2.0

    monkeypatch.setattr(packed_layers, "_seconds", measured)
    monkeypatch.setattr(packed_layers, "_LEAST", 1)
    for name, tied in (("llama", True), ("gpt2", True), ("bart", False)):
        timed.clear()
        folder = saved(name, tmp_path / name, tie_word_embeddings=tied)
        plain = load_model(folder, Loading(backend="eager"))
        first, second = load_model(folder), load_model(folder)
        assert timed == [False, True], name
        assert (first.backend, second.backend) == (("packed",) * 2 if faster else ("eager",) * 2)
        if not faster:
            expected = {key: type(module) for key, module in plain.model.named_modules()}
            assert {key: type(module) for key, module in first.model.named_modules()} == expected
            assert first.model.state_dict().keys() == plain.model.state_dict().keys()
            for key, weight in plain.model.state_dict().items():
                assert torch.equal(first.model.state_dict()[key], weight)
        with torch.no_grad():
            torch.testing.assert_close(logits(first.model, name), logits(plain.model, name), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.usefixtures("built")
@in_pairs(
    name=["llama", "t5", "whisper", "gpt2", "gemma2"], tied=[True, False], quantization=["int8-weight", "int4-weight"]
)
def test_heads_of_quantized_models(name: str, tied: bool, quantization: str, tmp_path: Path) -> None:
    """They are held in eight bits, and tied embeddings are rows of the very same numbers, in the model's dtype."""
    folder = saved(name, tmp_path, tie_word_embeddings=tied)
    plain = load_model(folder, Loading(dtype="bfloat16", backend="eager")).model
    language = load_model(folder, Loading(dtype="bfloat16", quantization=quantization))
    head, embedding = language.model.get_output_embeddings(), language.model.get_input_embeddings()
    assert head.kind == "int8"
    assert language.vocab_size == plain.get_output_embeddings().out_features
    shares = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    assert shares == (getattr(embedding, "head", None) is head)
    ids = torch.tensor([[5, 9, 12]])
    found, expected = embedding(ids), plain.get_input_embeddings()(ids)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert float((found - expected).abs().max()) < 0.01 * float(expected.abs().max())
    assert logits(language.model, name).dtype == torch.bfloat16


@pytest.mark.usefixtures("built")
def test_heads_that_are_no_layers_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that reads its head's weight by itself has it, and its embedding, as floats."""
    folder = saved("llama", tmp_path, tie_word_embeddings=True)
    kind = type(load_model(folder).model)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *a, **k: self.lm_head.weight.sum() and forward(self, *a, **k))
    model = load_model(folder, Loading(quantization="int8-weight")).model
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_auto_leaves_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models, those that were handed over, and all where there are no kernels."""
    folder = saved("llama", tmp_path)
    assert load_model(folder).backend == "eager"
    monkeypatch.setattr(packed_layers, "_LEAST", 1)
    assert LanguageModel(tiny("llama")).backend == "eager"
    monkeypatch.setattr(kernels, "available", lambda: False)
    assert load_model(folder).backend == "eager"
    assert load_model(folder, Loading(dtype="float16")).backend == "eager"


def test_models_that_read_no_ids_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not packed, as no trial can tell whether that is right. (The load ended in the model's own error.)"""
    monkeypatch.setattr(packed_layers, "_LEAST", 1)
    model = tiny_of(Blip2ForConditionalGeneration)
    assert not is_packed(packed_layers.in_backend(model, "auto", owned=True))
    with pytest.raises(UnsupportedError, match="or no ids alone: leave out `backend`='packed'"):
        packed_layers.in_backend(model, "packed", owned=False)


def test_backends_that_cannot_be(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    with pytest.raises(OptionError, match=r"`backend` must be one of auto, eager, packed, got 'third'"):
        SpecGenerator(tiny("llama"), backend="third")
    with pytest.raises(OptionError, match="`backend` must be one of"):
        SpecGenerator.from_pretrained(folder, backend="third")
    with pytest.raises(UnsupportedError, match=r"read for each pass: leave out `backend`='packed'"):
        load_model(folder, Loading(offload="disk", backend="packed"))
    with pytest.raises(UnsupportedError, match=r"no linear layers in bfloat16 or float32"):
        load_model(folder, Loading(dtype="float16", backend="packed"))
    wrapped = LanguageModel(tiny("llama"))
    with pytest.raises(
        OptionError, match=r"in backend 'eager' already: make it with LanguageModel\(model, backend='packed'"
    ):
        SpecGenerator(wrapped, backend="packed")
    packed = LanguageModel(tiny("llama"), backend="packed")
    assert SpecGenerator(packed, backend="packed").target is packed


@torch.no_grad()
@pytest.mark.usefixtures("built")
@in_pairs(quantization=["int8-weight", "int4-weight"], backend=["auto", "eager"], dtype=["float32", "bfloat16"])
def test_quantized_layers(quantization: str, backend: str, dtype: str, tmp_path: Path) -> None:
    """In few bits the model says nearly the same, in both backends; heads that are not packed stay as they are."""
    folder = saved("llama", tmp_path)
    plain = load_model(folder, Loading(dtype=dtype, backend="eager"))
    how = Loading(dtype=dtype, backend=backend, quantization=quantization)
    if backend == "eager" and quantization == "int4-weight":
        with pytest.raises(OptionError, match="whose weights are packed"):
            load_model(folder, how)
        return
    small = load_model(folder, how)
    assert small.backend == ("packed" if backend == "auto" else "eager")
    floats = [name for name, module in small.model.named_modules() if type(module) is nn.Linear]
    assert floats == (["lm_head"] if backend == "eager" else [])
    found, expected = logits(small.model, "llama").float(), logits(plain.model, "llama").float()
    off = float((found - expected).std() / expected.std())
    assert 0 < off < (0.05 if quantization == "int8-weight" else 0.6)
    draft = tiny("llama", seed=1).to(getattr(torch, dtype))
    texts = [SpecGenerator(small, d).generate(torch.tensor(PROMPT), **COMMON).sequences for d in (None, draft)]
    assert torch.equal(*texts)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("how", [{"backend": "packed"}, {"quantization": "int8-weight", "backend": "eager"}])
def test_layers_of_our_own_are_not_saved(how: dict[str, Any], tmp_path: Path) -> None:
    """`save_pretrained` refuses before it writes: it left files without the weights, or with rounded ones."""
    folder = saved("llama", tmp_path / "model")
    with pytest.raises(UnsupportedError, match=r"`save_pretrained` cannot save this model.*`backend`='eager'"):
        load_model(folder, Loading(**how)).model.save_pretrained(tmp_path / "other")
    assert not (tmp_path / "other").exists()
    given = load_model(folder, Loading(backend="eager")).model
    LanguageModel(given, backend="packed")  # of a copy
    given.save_pretrained(tmp_path / "other")


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked for and needs kernels is refused before any pass, with the reason; 8 bits do without."""
    lack = kernels.Lack("there is no compiler", "install one")
    monkeypatch.setattr("specdec.kernels.build.lack", lambda: lack)
    folder = saved("llama", tmp_path)
    for how, otherwise in (
        ({"backend": "packed"}, "leave it out"),
        ({"exactness": "strict"}, "leave it out"),
        ({"quantization": "int4-weight"}, "use 'int8-weight'"),
    ):
        [(name, value)] = how.items()
        told = f"`{name}`={value!r} needs kernels, and there is no compiler: install one; without them, {otherwise}"
        with pytest.raises(UnsupportedError, match=re.escape(told)):
            load_model(folder, Loading(**how))
    monkeypatch.setattr(packed_layers, "_LEAST", 1)
    for dtype in ("float32", "bfloat16"):
        small = load_model(folder, Loading(dtype=dtype, quantization="int8-weight"))
        assert small.backend == "eager"
        assert SpecGenerator(small, "suffix").generate(torch.tensor(PROMPT), **COMMON).stats.num_draft_tokens
