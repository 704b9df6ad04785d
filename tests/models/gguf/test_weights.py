"""Weights of GGUF files: the original model's logits, and the numbers that the package gguf unpacks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import LoadError, UnsupportedError, kernels
from specdec.models.gguf import GgufReader, converted, floats, read_config, read_model, tensor_map
from tests.folders import saved_gguf
from tests.models.gguf.files import written
from tests.models.gguf.models import KINDS, keys_of, model_of, saved, tensors_of

pytest.importorskip("gguf")
IDS = torch.randint(3, 64, (2, 40), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS).logits


def read(path: str, dtype: torch.dtype = torch.float32) -> Any:
    reader = GgufReader(path)
    return read_model(reader, read_config(reader), dtype)


@pytest.mark.parametrize("name", KINDS)
def test_the_models_own_logits(name: str, tmp_path: Path) -> None:
    """Bit for bit: windows, scales, caps, norms, experts and heads are those of the model in the file."""
    model = model_of(KINDS[name])
    mine = read(saved(tmp_path / "a.gguf", KINDS[name], model))
    assert type(mine) is type(model)
    assert torch.equal(logits(mine), logits(model))
    assert not [parameter for parameter in mine.parameters() if parameter.is_meta]
    assert mine.config.tie_word_embeddings == model.config.tie_word_embeddings
    assert mine.generation_config.eos_token_id == [2]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "MXFP4"])
def test_the_packages_floats(kind: str, tmp_path: Path) -> None:
    """Of every type, rows of queries and keys in the model's order."""
    reader = GgufReader(saved_gguf(tmp_path / "a.gguf", types=[kind], num_attention_heads=4, num_key_value_heads=2))
    config = read_config(reader)
    state, order = read_model(reader, config, torch.float32).state_dict(), torch.arange(8).view(4, 2).T.flatten()
    for layer in range(config.num_hidden_layers):
        expected = torch.tensor(floats(reader.tensors[f"blk.{layer}.attn_k.weight"]))
        expected = torch.cat([expected[:8][order], expected[8:][order]])
        assert torch.equal(state[f"model.layers.{layer}.self_attn.k_proj.weight"], expected)
        expected = torch.tensor(floats(reader.tensors[f"blk.{layer}.ffn_down.weight"]))
        assert torch.equal(state[f"model.layers.{layer}.mlp.down_proj.weight"], expected)
    for name, parts in tensor_map(reader, config).items():
        for part in parts:
            assert torch.equal(converted(reader.tensors[name], part), state[part.parameter])


def test_queries_keys_and_values_in_one_tensor(tmp_path: Path) -> None:
    """As newer converters write them on request."""
    kind = KINDS["llama"]
    model = model_of(kind)
    tensors = dict(tensors_of(kind, model))
    for layer in range(2):
        three = [tensors.pop(f"blk.{layer}.attn_{name}.weight") for name in "qkv"]
        tensors[f"blk.{layer}.attn_qkv.weight"] = torch.cat(three)
    arrays = {name: tensor.detach().numpy() for name, tensor in tensors.items()}
    mine = read(written(tmp_path / "a.gguf", "llama", keys_of(kind, model.config), arrays))
    assert torch.equal(logits(mine), logits(model))


def test_other_dtypes(tmp_path: Path) -> None:
    """Weights are rounded once."""
    model = model_of(KINDS["gemma3"])
    mine = read(saved(tmp_path / "a.gguf", KINDS["gemma3"], model), torch.bfloat16)
    assert {parameter.dtype for parameter in mine.parameters()} == {torch.bfloat16}
    for name, weight in model.state_dict().items():
        rounded = ((weight + 1) - 1 if "norm" in name else weight).bfloat16()
        assert torch.equal(mine.state_dict()[name], rounded)


def without(path: Path, kind: str, name: str, **options: Any) -> str:
    """A file that lacks one tensor."""
    model = model_of(KINDS[kind], **options)
    arrays = {tensor: value.detach().numpy() for tensor, value in tensors_of(KINDS[kind], model) if tensor != name}
    return written(path, KINDS[kind].architecture, keys_of(KINDS[kind], model.config), arrays)


def test_tensors_that_are_missing(tmp_path: Path) -> None:
    """Weights are an error that names them; a bias is zero."""
    with pytest.raises(LoadError, match=r"lacks weights of model.layers.1.mlp.up_proj.weight: it is incomplete"):
        read(without(tmp_path / "a.gguf", "llama", "blk.1.ffn_up.weight"))
    mine = read(without(tmp_path / "b.gguf", "qwen2", "blk.1.attn_k.bias"))
    assert not mine.model.layers[1].self_attn.k_proj.bias.any()
    assert mine.model.layers[0].self_attn.k_proj.bias.any()


def test_tensors_that_are_not_known(tmp_path: Path) -> None:
    """One that would be left out may change what the model computes."""
    kind = KINDS["llama"]
    model = model_of(kind)
    for name in ("blk.0.attn_sinks.weight", "blk.0.ffn_up.scale", "blk.7.ffn_up.weight", "dense.weight"):
        with pytest.raises(
            UnsupportedError, match=rf"has the tensor {name}, and where it belongs .* llama is not known"
        ):
            read(saved(tmp_path / "a.gguf", kind, model, tensors={name: torch.zeros(32).numpy()}))
    with pytest.raises(LoadError, match=r"has the tensor blk.0.attn_q_norm.weight, and the model has no "):
        read(saved(tmp_path / "a.gguf", kind, model, tensors={"blk.0.attn_q_norm.weight": torch.zeros(8).numpy()}))


def test_tensors_of_another_shape(tmp_path: Path) -> None:
    kind = KINDS["llama"]
    model = model_of(kind)
    with pytest.raises(LoadError, match=r"blk.0.ffn_up.weight of \(24, 32\), and \(48, 32\) belong there"):
        read(saved(tmp_path / "a.gguf", kind, model, tensors={"blk.0.ffn_up.weight": torch.zeros(24, 32).numpy()}))


@pytest.mark.skipif(not kernels.available(), reason="no kernels here")
@pytest.mark.parametrize("packs", [False, True])
def test_blocks_of_another_shape(packs: bool, tmp_path: Path) -> None:
    """Packed layers took the shape of the file's tensor for their own."""
    reader = GgufReader(saved_gguf(tmp_path / "a.gguf", types=["Q8_0"]))
    reader.keys["llama.feed_forward_length"] //= 2
    with pytest.raises(LoadError, match=r"blk.0.ffn_\w+.weight of \(\d+, \d+\), and \(\d+, \d+\) belong there"):
        read_model(reader, read_config(reader), torch.float32, packs=packs)
