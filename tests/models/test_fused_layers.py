"""Layers as few calls: what is fused, and that it changes no bit."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from specdec.core.tree import Tree
from specdec.core.work import Work
from specdec.models import LanguageModel
from specdec.models.backends import fused_layers
from specdec.models.backends.packed_layers import pack_layers, packable_layers
from specdec.models.backends.ragged_model import RaggedModel
from specdec.models.hf.tiny_models import SIZES
from tests.kernels.rounding import to_int4, to_int8
from tests.tiny import random_model, tiny, tiny_inputs

pytestmark = pytest.mark.usefixtures("built")
WHOLE = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma", "gemma2", "gemma3_text", "granite")
PARTS = {
    "olmo2": {"_Attention": 2, "_Gated": 2, "_Norm": 9}, "mixtral": {"_Attention": 2, "_Norm": 5},
    "qwen3_moe": {"_Attention": 2, "_Norm": 9}, "stablelm": {"_Attention": 2, "_Gated": 2}, "cohere": {"_Gated": 2},
    "phi": {}, "gpt2": {},
}  # fmt: skip
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
DTYPES = (torch.float32, torch.bfloat16)


def fused(language: LanguageModel) -> dict[str, int]:
    """How many modules of each kind are one call."""
    assert language.ragged is not None
    calls = (vars(module).get("forward") for module in language.ragged.fused.modules())
    return Counter(type(call).__name__ for call in calls if call is not None)


def passes(language: LanguageModel) -> Iterator[tuple[Tensor, Sequence[Any]]]:
    """Logits and hidden states of passes of several widths over two rows, one of them with a tree."""
    session = language.session()
    heard = language.encode(tiny_inputs("whisper", 2)) if language.is_encoder_decoder else None
    rows = [session.add(heard and heard.select([row])) for row in range(2)]
    for width in (7, 1, 2, 16, 33):
        ids = [[(5 * row + 3 * place + width) % 60 + 3 for place in range(width)] for row in rows]
        works = [Work(rows[0], Tree(ids[0], [-1] + [0] * (width - 1)), width), Work.text(rows[1], ids[1], width)]
        for out in session.run(works, hidden=True):
            yield out.logits, out.hidden_states or ()
        session.commit(rows, [[0], list(range(width))])


def check_equal(language: LanguageModel) -> None:
    """Fused passes are equal to passes of the same layers one by one, bit for bit."""
    assert language.ragged is not None
    found = list(passes(language))
    language.ragged.fused = language.ragged.model
    for (logits, states), (expected, others) in zip(found, passes(language), strict=True):
        assert torch.equal(logits, expected)
        assert all(torch.equal(*pair) for pair in zip(states, others, strict=True))
        assert states


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*WHOLE, *PARTS])
def test_families(name: str, dtype: torch.dtype) -> None:
    """Whole layers are one call where a family is alike, and else the parts that are; no bit changes."""
    language = LanguageModel(tiny(name).to(dtype), backend="packed")
    kinds = fused(language)
    if name in WHOLE:
        assert kinds["_Layer"] == 2
    else:
        assert kinds == PARTS[name]
    check_equal(language)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_last_layer_computes_what_is_read(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its product has the nodes with logits, or all where hidden states are returned; the logits are the same."""
    language = LanguageModel(tiny("llama").to(dtype), backend="packed")
    session = language.session()
    work = Work(session.add(None), Tree(list(range(5, 25)), list(range(-1, 19))), 2)
    recorded = session.run([work])[0].logits
    monkeypatch.setattr(fused_layers.kernels, "gated", gated := Mock(wraps=fused_layers.kernels.gated))
    language.ragged.recorded = None
    assert torch.equal(session.run([work])[0].logits, recorded)
    assert torch.equal(session.run([work], hidden=True)[0].logits, recorded)
    assert [call.args[1].shape[1] for call in gated.call_args_list] == [20, 2, 20, 20]


@pytest.mark.parametrize("sizes", [{}, {"d_model": 64, "decoder_ffn_dim": 96}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_over_an_encoder(dtype: torch.dtype, sizes: dict[str, int]) -> None:
    """Each layer of Whisper's decoder is one call, with queries, keys and values joined where they are whole blocks."""
    language = LanguageModel(tiny("whisper", **sizes).to(dtype), backend="packed")
    assert fused(language) == {"_Crossed": language.num_layers}
    check_equal(language)


def test_other_model_types() -> None:
    """They stay as they are: Ministral scales queries from position 16384 on, which no trial saw, and it was fused."""
    ministral = random_model(AutoConfig.for_model("ministral3", **SIZES["mistral"], vocab_size=64, head_dim=8), 0)
    for model in (ministral, tiny("olmo"), tiny("smollm3"), tiny("llama", clip_qkv=8.0)):
        assert not fused(LanguageModel(model, backend="packed"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_strict_models(name: str, dtype: torch.dtype) -> None:
    """Their activations do not depend on the order."""
    language = LanguageModel(tiny(name).to(dtype), exactness="strict")
    assert fused(language)["_Layer"] == 2
    check_equal(language)


@pytest.mark.parametrize("integers", [to_int8, to_int4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_integers(integers: Any, dtype: torch.dtype) -> None:
    """Layers of integers, joined where their outputs are whole blocks."""
    model = tiny("qwen2", **WIDE).to(dtype)
    pack_layers(model, list(packable_layers(model)), lambda _, layer: integers(layer.weight.float()))
    language = LanguageModel(model, backend="packed")
    assert fused(language)["_Layer"] == 2
    check_equal(language)


def test_hooks_of_a_caller() -> None:
    """They are called within layers, which then are not one call."""
    model = tiny("llama")
    seen = list[nn.Module]()
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda module, *_: seen.append(module))
    language = LanguageModel(model, backend="packed")
    assert fused(language) == {"_Layer": 1, "_Attention": 2, "_Gated": 1, "_Norm": 5}
    seen.clear()
    next(passes(language))
    assert len(seen) == 1


def test_an_early_exit() -> None:
    """It has calls of its own over the same weights."""
    language = LanguageModel(tiny("llama", **WIDE), backend="packed")
    exit = language.early_exit(1)
    assert fused(exit)["_Layer"] == 1
    check_equal(exit)
    check_equal(language)


def test_models_stay_as_they_are() -> None:
    """Neither the caller's model nor the copy with attention of our own has calls in place of its layers."""
    model = tiny("llama")
    language = LanguageModel(model, backend="packed")
    assert language.ragged is not None
    for one in (model, language.model, language.ragged.model):
        assert isinstance(one, RaggedModel | nn.Module)
        assert not any("forward" in vars(module) for module in one.modules())


def test_layers_of_another_product_stay_apart() -> None:
    """A module that gives something else keeps its layers apart. (They were joined before it was compared.)"""
    model = tiny("llama", **WIDE)
    odd = model.model.layers[0].mlp
    odd.__class__ = type(
        "Doubled", (type(odd),), {"forward": lambda self, x: 2 * type(odd).__bases__[0].forward(self, x)}
    )
    language = LanguageModel(model, backend="packed")
    assert fused(language) == {"_Layer": 1, "_Attention": 2, "_Gated": 1, "_Norm": 5}
    layers = [layer.mlp for layer in language.model.model.layers]
    places = [{part.packed.untyped_storage().data_ptr() for part in (mlp.gate_proj, mlp.up_proj)} for mlp in layers]
    assert [len(place) for place in places] == [2, 1]
    check_equal(language)


def test_hooks_see_all_nodes() -> None:
    """A hook behind the last layer saw only the nodes with logits."""
    model, widths = tiny("llama"), list[int]()
    model.model.norm.register_forward_hook(lambda module, inputs, output: widths.append(output.shape[1]))
    session = LanguageModel(model, backend="packed").session()
    widths.clear()
    session.run([Work.text(session.add(None), [5, 9, 12, 7])])
    assert widths == [4]


def test_tables_are_no_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only weights of one dimension are tried as norms. (Embeddings and heads were copied to float32, twice.)"""
    monkeypatch.setattr(fused_layers._Norm, "kinds", kinds := Mock(wraps=fused_layers._Norm.kinds))
    LanguageModel(tiny("llama"), backend="packed")
    assert {call.args[0].weight.dim() for call in kinds.call_args_list} == {1}


def test_why_a_module_is_not_fused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The log says it. (A name that transformers changed left all layers apart, in silence.)"""
    caplog.set_level("DEBUG", logger="specdec")
    monkeypatch.setattr(fused_layers, "CACHE", "another_name")
    assert fused(LanguageModel(tiny("llama"), backend="packed")) == {"_Gated": 2, "_Norm": 5}
    assert "model.layers.0.self_attn is not fused: KeyError('another_name')" in caplog.text
