"""Drafts in few bits: which layers, whose model, and that no text changes; speech in the fastest numbers."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from specdec import SpecGenerator, kernels
from specdec.models.backends.packed_layers import alike, likeness
from specdec.models.loading import lighten, load
from specdec.models.loading.load import load_model
from specdec.options.load import Loading
from tests.folders import byte_tokenizer, saved, saved_model
from tests.tiny import tiny, tiny_inputs

pytestmark = pytest.mark.skipif(not kernels.available(), reason="needs kernels")
PROMPT = "def add(a, b):"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets tiny drafts count as large, and 4 bits as faster."""
    monkeypatch.setattr(lighten, "_LEAST", 0)
    monkeypatch.setattr(lighten, "measured", lambda *_: [1])


def kinds(model: Any) -> dict[str, str]:
    return {name: layer.kind for name, layer in model.named_modules() if isinstance(layer, kernels.PackedLinear)}


@pytest.mark.usefixtures("small")
def test_a_draft_is_loaded_in_few_bits_and_the_text_stays(tmp_path: Path) -> None:
    """By path, layers get 4 bits; the target keeps its weights, and its text."""
    target, draft = saved_model(tmp_path / "target"), saved_model(tmp_path / "draft", seed=1)
    plain = SpecGenerator.from_pretrained(target).generate(PROMPT, max_new_tokens=12)
    generator = SpecGenerator.from_pretrained(target, draft)
    out = generator.generate(PROMPT, max_new_tokens=12)
    found = kinds(generator.draft.models[0].model)  # type: ignore[union-attr]
    assert found.pop("lm_head") == "int4"
    assert set(found.values()) == {"int4"}
    assert out.texts == plain.texts
    assert out.stats is not None
    assert (out.stats.settings["weight_kind"], out.stats.settings["draft_weight_kind"]) == ("float32", "int4")
    kept = SpecGenerator.from_pretrained(target, draft, draft_options={"quantization": "none"})
    assert kept.draft.models[0].weight_kind == "float32"  # type: ignore[union-attr]


@pytest.mark.usefixtures("small")
def test_a_callers_draft_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's model stays as it is; the copy follows it when told, and is not made where memory lacks room."""
    target, draft = tiny("llama", vocab=259), tiny("llama", vocab=259, seed=1)
    generator = SpecGenerator(target, draft, tokenizer=byte_tokenizer())
    expected = SpecGenerator(target, tokenizer=byte_tokenizer()).generate(PROMPT, max_new_tokens=12).texts
    assert not kinds(draft)
    assert generator.generate(PROMPT, max_new_tokens=12).texts == expected
    model = generator.draft.models[0]  # type: ignore[union-attr]
    before = model.model.lm_head.weight()
    with torch.no_grad():
        draft.lm_head.weight.copy_(target.lm_head.weight)
    generator.model_changed()
    assert not torch.equal(model.model.lm_head.weight(), before)
    monkeypatch.setattr(lighten, "free_bytes", lambda _: 0)
    full = SpecGenerator(target, draft, tokenizer=byte_tokenizer())
    assert full.draft.models[0].model is draft  # type: ignore[union-attr]


@pytest.mark.usefixtures("small")
def test_layers_as_they_are_stay() -> None:
    """The backend "eager" is not changed, nor half precision that no kernel multiplies, nor a small draft."""
    target, draft = tiny("llama", vocab=259), tiny("llama", vocab=259, seed=1)
    eager = SpecGenerator(target, draft, tokenizer=byte_tokenizer(), backend="eager")
    assert eager.draft.models[0].model is draft  # type: ignore[union-attr]
    assert lighten.lightened(draft.half(), owned=False) is draft


@pytest.mark.usefixtures("small")
def test_blocks_of_files_become_four_bits() -> None:
    """Layers that are packed in other kinds are rounded anew, heads are not."""
    model = tiny("llama", vocab=259)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear):
            model.set_submodule(name, kernels.round_weight(layer.weight, 8))
    found = kinds(lighten.lightened(model, owned=True))
    assert found.pop("lm_head") == "int4"
    assert set(found.values()) == {"int4"}


def test_rounded_rows_may_differ_more() -> None:
    """Layers that round rows to 8 bits turn another order of sums into other levels: the 0.5B file of Qwen2.5-Coder in
    float32, whose logits are alike to 0.99988, lost passes of our own."""
    plain, rounding = torch.nn.Linear(32, 32), kernels.round_weight(torch.ones(32, 32), 8)
    expected = torch.linspace(-1, 1, 1000, device="cpu")
    logits = expected + 0.02 * torch.linspace(-1, 1, 1000, device="cpu").mul(99).cos()
    assert 0.98 < likeness(logits, expected) < 0.9999
    assert not alike(logits, expected, plain)
    assert alike(logits, expected, rounding)
    assert not alike(expected.flip(0), expected, rounding)


@pytest.fixture
def whisper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The folder of a tiny Whisper, which counts as large, as do drafts."""
    monkeypatch.setattr(lighten, "_LEAST", 0)
    monkeypatch.setattr(lighten, "_LEAST_HEARING", 0)
    return saved("whisper", tmp_path)


@pytest.mark.parametrize(
    ("faster", "dtype", "encoder", "head"),
    [
        (("256-rows-bfloat16", "256-rows-int8", "1-rows-int8"), torch.bfloat16, "int8", "bfloat16"),
        (("256-rows-bfloat16",), torch.bfloat16, "bfloat16", "bfloat16"),
        (("256-rows-int8",), torch.float32, "int8", "float32"),
        (("1-rows-int8",), torch.float32, "float32", "float32"),
    ],
)
@torch.no_grad()
def test_speech_is_heard_in_the_fastest_numbers(
    whisper: str, monkeypatch: pytest.MonkeyPatch, faster: tuple[str, ...], dtype: torch.dtype, encoder: str, head: str
) -> None:
    """What is faster is measured, for 8 bits in layers that read frames; a dtype that is asked for is what runs."""
    monkeypatch.setattr(lighten, "measured", lambda what, *_: [what.startswith(faster)])
    plain, exact, loaded = (
        load_model(whisper, how)
        for how in (Loading(backend="eager"), Loading(backend="packed", dtype="float32"), Loading(backend="packed"))
    )
    assert set(kinds(exact.model).values()) == {"float32"}
    assert loaded.dtype == dtype
    assert {kind for name, kind in kinds(loaded.model).items() if ".encoder.layers" in name} == {encoder}
    assert loaded.output_embeddings.kind == head
    of_layers = {kind for name, kind in kinds(loaded.model).items() if "decoder.layers" in name}
    assert of_layers == {encoder, str(dtype).removeprefix("torch.")}
    states = [one.encode(tiny_inputs("whisper", 2)).hidden for one in (plain, exact, loaded)]
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=1e-5)
    assert likeness(states[2], states[0]) > 0.999


def test_a_draft_has_the_target_s_encoder(whisper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever numbers that is. (Named drafts had encoders of their own in 4 bits, which heard the sound again.)"""
    for faster in (True, False):
        monkeypatch.setattr(lighten, "measured", lambda *_, faster=faster: [faster])
        draft: Any = SpecGenerator.from_pretrained(whisper, whisper).draft
        assert (draft.shared_encoder, draft.models[0].output_embeddings.kind) == (True, "int4" if faster else "int8")


def test_weights_of_speech_are_read_as_they_are_stored(whisper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And narrowed one by one. (float16 weights became float32 first, beside the files: 940 MB for whisper-base.)"""
    monkeypatch.setattr(lighten, "measured", lambda *_: [1])
    tiny("whisper").half().save_pretrained(whisper)
    monkeypatch.setattr(load, "_read", read := Mock(wraps=load._read))
    assert load_model(whisper, Loading()).dtype == torch.bfloat16
    assert [call.args[1].dtype for call in read.call_args_list] == [torch.float16]


def test_small_models_stay_as_they_are_stored(tmp_path: Path) -> None:
    assert load_model(saved("whisper", tmp_path / "a"), Loading()).dtype == torch.float32
    draft = load_model(saved_model(tmp_path / "b"), Loading().of_draft(None), name="draft")
    assert draft.weight_kind == "float32"
