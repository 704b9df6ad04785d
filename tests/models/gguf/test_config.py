"""The header: what each key changes, and an error for a key that is not known."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec import LoadError, OptionError, SpecGenerator, UnsupportedError
from specdec.models import load_model
from specdec.models.gguf import GgufReader, read_config
from specdec.models.gguf.config import ARCHITECTURES
from tests.folders import saved_gguf
from tests.matrix import endless
from tests.models.gguf.files import reader, written
from tests.models.gguf.models import KINDS, keys_of, model_of, saved

pytest.importorskip("gguf")


@cache
def config_of(name: str) -> Any:
    return model_of(KINDS[name]).config


def config(path: Path, name: str, **keys: Any) -> Any:
    """The config of a file with a model's keys, and these; of those that are None, without them."""
    kind = KINDS[name]
    written = keys_of(kind, config_of(name)) | {f".{key.replace('__', '.')}": value for key, value in keys.items()}
    tensors = {"token_embd.weight": np.zeros((64, 32)), "blk.0.ffn_down_exps.weight": np.zeros((4, 32, 24))}
    written = {key: value for key, value in written.items() if value is not None}
    return read_config(reader(path / "a.gguf", kind.architecture, written, tensors))


def test_every_architecture_has_a_model_here() -> None:
    assert ARCHITECTURES.keys() == {kind.architecture for kind in KINDS.values()}


@pytest.mark.parametrize("name", KINDS)
def test_keys_that_are_not_known(name: str, tmp_path: Path) -> None:
    """Each architecture refuses them, with key and value, unless they say that there is nothing."""
    for key, value in {"attention.output_scale": 0.5, "attention.sinks": "many", "hyper_connection.count": 4}.items():
        written = {key.replace(".", "__"): value}
        expected = (
            rf"says {KINDS[name].architecture}.{key} = {value!r}, and what that changes in models of .* not known"
        )
        with pytest.raises(UnsupportedError, match=expected):
            config(tmp_path, name, **written)
    config(tmp_path, name, attention__causal=True, rope__scaling__finetuned=True, nextn_predict_layers=0)
    with pytest.raises(UnsupportedError, match=r"nextn_predict_layers = 1, and"):
        config(tmp_path, name, nextn_predict_layers=1)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3moe", "command-r"])
def test_keys_that_are_missing(name: str, tmp_path: Path) -> None:
    for key in ("block_count", "embedding_length", "attention__head_count", "feed_forward_length", "context_length"):
        with pytest.raises(LoadError, match=rf"lacks the key .*{key.replace('__', '.')}: it is incomplete"):
            config(tmp_path, name, **{key: None})


def test_soft_caps(tmp_path: Path) -> None:
    """Of Gemma 2 also those that no key says."""
    plain = config(tmp_path, "gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (plain.attn_logit_softcapping, plain.final_logit_softcapping) == (50.0, 30.0)
    other = config(tmp_path, "gemma2", attn_logit_softcapping=20.0, final_logit_softcapping=0.0)
    assert (other.attn_logit_softcapping, other.final_logit_softcapping) == (20.0, None)
    assert config(tmp_path, "gemma3").final_logit_softcapping is None
    assert config(tmp_path, "gemma3", final_logit_softcapping=5.0).final_logit_softcapping == 5.0
    with pytest.raises(UnsupportedError, match=r"llama.final_logit_softcapping = 5.0"):
        config(tmp_path, "llama", final_logit_softcapping=5.0)


def slides(found: Any) -> str:
    return "".join("s" if kind == "sliding_attention" else "f" for kind in found.layer_types)


def test_windows(tmp_path: Path) -> None:
    """Their size, and the layers that have one, by a number, a list, or what the architecture does without a key."""
    assert slides(config(tmp_path, "gemma3")) == "sssssfs"
    assert slides(config(tmp_path, "gemma3", attention__sliding_window_pattern=3)) == "ssfssfs"
    listed = [True, False, True, True, False, False, True]
    assert slides(config(tmp_path, "gemma3", attention__sliding_window_pattern=listed)) == "sfssffs"
    none = config(tmp_path, "gemma3", attention__sliding_window=None)
    assert (slides(none), none.sliding_window) == ("fffffff", None)
    assert (slides(config(tmp_path, "gemma2")), config(tmp_path, "gemma2").sliding_window) == ("sf", 12)
    assert config(tmp_path, "gemma2", attention__sliding_window=None).sliding_window == 4096
    assert slides(config(tmp_path, "gpt-oss")) == "sf"
    assert slides(config(tmp_path, "olmo3")) == "sssfs"
    assert config(tmp_path, "phi3", attention__sliding_window=0).sliding_window is None
    with pytest.raises(UnsupportedError, match=r"qwen2.attention.sliding_window = 7"):
        config(tmp_path, "qwen2", attention__sliding_window=7)


def test_scales(tmp_path: Path) -> None:
    """Those that are missing are one, and of attention the usual one."""
    found = config(tmp_path, "granite", attention__scale=None, embedding_scale=None, residual_scale=None)
    assert (found.embedding_multiplier, found.residual_multiplier, found.logits_scaling) == (1.0, 1.0, 2.0)
    assert found.attention_multiplier == pytest.approx(1 / math.sqrt(8))
    with pytest.raises(LoadError, match=r"lacks the key granite.logit_scale"):
        config(tmp_path, "granite", logit_scale=None)
    with pytest.raises(UnsupportedError, match=r"granite.rope.scaling.finetuned = False, and Granite without"):
        config(tmp_path, "granite", rope__scaling__finetuned=False)
    assert config(tmp_path, "command-r", logit_scale=None).logit_scale == 1.0


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_attention_by_their_width(name: str, layers: int, tmp_path: Path) -> None:
    """No key says it: llama.cpp knows these models by the number of layers."""
    wide = {"attention__key_length": 16, "attention__value_length": 16, "rope__dimension_count": 16}
    assert config(tmp_path, name, **wide).query_pre_attn_scalar == 16
    assert config(tmp_path, name, **wide, block_count=layers).query_pre_attn_scalar == 8


def test_experts(tmp_path: Path) -> None:
    """Their count, how many are used, and whether their weights are made to sum to one."""
    found = config(tmp_path, "qwen3moe")
    assert (found.num_experts, found.num_experts_per_tok, found.moe_intermediate_size) == (4, 2, 24)
    assert found.norm_topk_prob is True
    assert config(tmp_path, "qwen3moe", expert_weights_norm=False).norm_topk_prob is False
    assert config(tmp_path, "qwen2moe").norm_topk_prob is False
    with pytest.raises(UnsupportedError, match=r"qwen3moe.expert_gating_func = 2, and only 1, a softmax"):
        config(tmp_path, "qwen3moe", expert_gating_func=2)
    with pytest.raises(UnsupportedError, match=r"qwen3moe.expert_weights_scale = 2.5"):
        config(tmp_path, "qwen3moe", expert_weights_scale=2.5)


def test_heads_and_norms(tmp_path: Path) -> None:
    found = config(tmp_path, "llama", attention__layer_norm_rms_epsilon=0.25, attention__head_count_kv=None)
    assert (found.rms_norm_eps, found.num_key_value_heads) == (0.25, 4)
    assert config(tmp_path, "llama", attention__head_count_kv=[2, 2]).num_key_value_heads == 2
    with pytest.raises(UnsupportedError, match=r"head_count_kv = .*, and layers of different shapes are not read"):
        config(tmp_path, "llama", attention__head_count_kv=[2, 1])
    with pytest.raises(UnsupportedError, match=r"value_length = 4, and keys have 8 values"):
        config(tmp_path, "llama", attention__value_length=4)
    assert config(tmp_path, "llama").tie_word_embeddings is True  # there is no tensor output.weight
    assert config(tmp_path, "llama").vocab_size == 64


def test_what_a_loader_says(tmp_path: Path) -> None:
    """The same of a key that is not known, and which architectures are read, where the file has another one.

    (transformers read them, and left out parts of a header.)
    """
    kind = KINDS["llama"]
    path = saved(tmp_path / "b.gguf", kind, model_of(kind), {".attention.clamp_kqv": 8.0})
    with pytest.raises(UnsupportedError, match=r"says llama.attention.clamp_kqv = 8.0"):
        load_model(path)
    path = written(tmp_path / "a.gguf", "lemma", {})
    with pytest.raises(UnsupportedError, match=r"has the architecture lemma, and command-r, .* stablelm, .* are read"):
        load_model(path)


@pytest.mark.parametrize("name", ["gemma3", "phi3", "qwen3", "gpt-oss", "mixtral"])
def test_texts(name: str, tmp_path: Path) -> None:
    """Greedy texts are the original model's, with a draft that is mostly wrong."""
    kind = KINDS[name]
    model = model_of(kind)
    path, common = saved(tmp_path / "a.gguf", kind, model), endless(14)
    prompt = [[5, 9, 12, 7, 9, 12, 7]]
    expected = SpecGenerator(model).generate(prompt, **common).sequences
    assert SpecGenerator(path, "suffix").generate(prompt, **common).sequences.tolist() == expected.tolist()


@pytest.mark.parametrize("names", [("rope_freqs",), ("rope_factors_short", "rope_factors_long")])
def test_texts_with_factors_of_frequencies(names: tuple[str, ...], tmp_path: Path) -> None:
    """Also beyond the original context, with a draft."""
    kind, keys = KINDS["llama"], {".rope.scaling.original_context_length": 12}
    tensors = {f"{name}.weight": np.array([1.0, 2.0, 3.0, 4.0]) * (1 + number) for number, name in enumerate(names)}
    path = saved(tmp_path / "a.gguf", kind, model_of(kind), keys, tensors)
    plain = SpecGenerator.from_pretrained(path, backend="eager").target.model
    prompt, common = [[5, 9, 12, 7, 9, 12, 7]], endless(14)
    expected = SpecGenerator(plain).generate(prompt, **common).sequences
    assert SpecGenerator(path, "suffix").generate(prompt, **common).sequences.tolist() == expected.tolist()
    assert plain.generate(torch.tensor(prompt), **common).tolist() == expected.tolist()


def test_devices(tmp_path: Path) -> None:
    """As of any checkpoint."""
    path = saved_gguf(tmp_path / "a.gguf", types=["F32"])
    for where in ("auto", "cpu", "sequential", {"": "cpu"}):
        generator = SpecGenerator.from_pretrained(path, device_map=where)
        assert {parameter.device.type for parameter in generator.target.model.parameters()} == {"cpu"}
    with pytest.raises(OptionError, match="`device_map`"):
        SpecGenerator.from_pretrained(path, device_map="nowhere")


def test_nothing_of_transformers_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`AutoConfig`, `AutoModel` and `AutoTokenizer` are for other architectures."""
    from specdec.generator import tokenizers
    from specdec.models.loading import load as module

    for where, name in ((module, "AutoConfig"), (module, "auto_class"), (tokenizers, "AutoTokenizer")):
        monkeypatch.setattr(where, name, None)
    path = saved_gguf(tmp_path / "a.gguf", tokens=True, vocab=260)
    assert SpecGenerator(path).generate("ab", max_new_tokens=4).texts
    assert GgufReader(path).keys["general.architecture"] == "llama"
