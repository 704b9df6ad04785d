"""Whisper's encoder as few calls: it gives what transformers' encoder gives."""

from typing import Any

import pytest
import torch

from specdec import OptionError, SpecGenerator
from specdec.models import LanguageModel
from specdec.models.backends.packed_layers import likeness
from specdec.models.cache.buffers import KvBuffers
from tests.tiny import tiny, tiny_inputs

pytestmark = pytest.mark.usefixtures("built")
WIDE = {"d_model": 64, "encoder_ffn_dim": 96}  # queries, keys and values are whole blocks
OTHERS: list[dict[str, Any]] = [{}, WIDE, {"activation_function": "relu"}, {"encoder_attention_heads": 2}]


def few_calls(model: Any, **how: Any) -> LanguageModel:
    language = LanguageModel(model, backend="packed", **how)
    assert language.ragged is not None
    assert language.ragged.frame_encoder is not None
    return language


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OTHERS)
@torch.no_grad()
def test_its_output_and_projections_are_transformers(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Also of a model whose layers are joined; each row of a batch has the bits that it has alone."""
    model, inputs = tiny("whisper", **options), tiny_inputs("whisper", 2)
    expected = model.get_encoder()(**inputs).last_hidden_state
    layers = [layer.encoder_attn for layer in model.get_decoder().layers]
    language = few_calls(tiny("whisper", **options).to(dtype))
    heard = language.encode(inputs)
    assert torch.equal(language.encode({"input_features": inputs["input_features"][1:]}).hidden, heard.hidden[1:])
    pairs = language.project(heard)
    if dtype == torch.bfloat16:
        assert likeness(heard.hidden, expected) > 0.999
    else:
        torch.testing.assert_close(heard.hidden, expected, rtol=1e-4, atol=1e-4)
    assert len(pairs) == len(layers)
    for module, pair in zip(layers, pairs, strict=True):
        for side, of_expected in zip(pair, (module.k_proj(expected), module.v_proj(expected)), strict=True):
            assert likeness(side.transpose(1, 2).flatten(2), of_expected) > 0.999


def test_hooks_of_a_caller_are_called() -> None:
    """Within the encoder, which then runs as transformers wrote it."""
    model, seen = tiny("whisper"), []
    model.get_encoder().layers[1].register_forward_hook(lambda *_: seen.append(1))
    language = LanguageModel(model, backend="packed")
    assert language.ragged is not None
    assert language.ragged.frame_encoder is None
    language.encode(tiny_inputs("whisper"))
    assert seen


@pytest.mark.parametrize("place", ["layers.0", "layers.0.self_attn", "conv1"])
def test_classes_of_a_caller_run(place: str) -> None:
    """A subclass of a layer was passed over, and the frames were other ones."""
    model = tiny("whisper")
    part = model.get_encoder().get_submodule(place)
    part.__class__ = type("Own", (type(part),), {})
    language = LanguageModel(model, backend="packed")
    assert language.ragged is not None
    assert language.ragged.frame_encoder is None


def test_features_of_another_size() -> None:
    """They are refused in the words of other encoders. (The packed encoder's error was transformers' own.)"""
    generator = SpecGenerator(tiny("whisper"), backend="packed")
    with pytest.raises(OptionError, match=r"cannot read `input_features` \[1, 8, 30\]"):
        generator.generate(input_features=torch.zeros(1, 8, 30), max_new_tokens=2)


def test_buffers_keep_the_order_of_keys() -> None:
    """Column beside column, also when they grow; values lie as ever."""
    keys, values = torch.randn(2, 3, 5).transpose(1, 2), torch.randn(2, 5, 3)
    buffers = KvBuffers(1, 8, torch.device("cpu"), lambda: 5)
    buffers.reserve(1)
    buffers.write_prefix(0, [(keys, values)], 5)
    buffers.reserve(40)
    [sides] = buffers.pairs()
    assert [side.stride(2) == 1 for side in sides] == [True, False]
    assert all(torch.equal(side[0, :, :5], own) for side, own in zip(sides, (keys, values), strict=True))
