"""Packed folders: the same numbers and texts as the models that they were made of, and what they cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import LoadError, Loading, OptionError, SpecGenerator, UnsupportedError, kernels
from specdec.generator.pack import pack_model
from specdec.models import LanguageModel, load_model
from specdec.models.backends.packed_layers import weight_of
from specdec.models.loading.load import save_loaded
from tests.folders import saved, saved_gguf, saved_model
from tests.matrix import endless, slow
from tests.quantized import AWQ, GPTQ, saved_quantized
from tests.test_exact import prompt_for, reference

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.skipif(not kernels.available(), reason="needs kernels")]
OPTIONS = endless(8)


def packed(source: str, folder: Path, **how: Any) -> str:
    save_loaded(source, folder, Loading(**how))
    return str(folder)


def numbers(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


def check_same(got: LanguageModel, expected: LanguageModel, name: str) -> None:
    """The same weights in the same places, and the same text."""
    state, other = numbers(got.model), numbers(expected.model)
    assert state.keys() == other.keys()
    assert all(torch.equal(state[key], other[key]) and state[key].dtype == other[key].dtype for key in other)
    texts = [SpecGenerator(model, None).generate(**prompt_for(name), **OPTIONS).sequences for model in (got, expected)]
    assert texts[0].tolist() == texts[1].tolist()


FOUR, SOME = {"quantization": "int4-weight"}, ("llama", "gpt2", "gemma2", "t5")
EIGHT, MORE = {"quantization": "int8-weight"}, ("qwen2", "opt", "lfm2", "bart", "marian")
TEXTS = [
    *((name, EIGHT) for name in (*SOME, "whisper", "qwen3_moe", "gpt_oss")),
    *(slow(name, EIGHT) for name in MORE),
    *((name, {**FOUR, **dtype}) for name in SOME for dtype in ({}, {"dtype": "bfloat16"})),
]


@pytest.mark.parametrize(("name", "how"), TEXTS)
def test_texts(name: str, how: dict[str, Any], tmp_path: Path) -> None:
    """Architectures keep integers, scales, biases, ties and what stays in floats."""
    source = saved(name, tmp_path / "source")
    check_same(load_model(packed(source, tmp_path / "packed", **how)), load_model(source, Loading(**how)), name)


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_files(tied: bool, tmp_path: Path) -> None:
    """Blocks of five and six bits, with steps and levels, and embeddings with blocks of their own."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 4, "tie_word_embeddings": tied}
    source = saved_gguf(tmp_path / "a.gguf", types=("Q6_K", "Q5_0", "Q4_1", "Q8_0"), **sizes)
    check_same(load_model(packed(source, tmp_path / "packed")), load_model(source), "llama")


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "t5"])
def test_floats(name: str, tmp_path: Path) -> None:
    """Without packed passes the layers are floats: the numbers that the integers stand for."""
    folder = packed(saved(name, tmp_path / "source"), tmp_path / "packed", quantization="int8-weight")
    floats, layers = load_model(folder, Loading(backend="eager")).model, load_model(folder).model
    for place, layer in layers.named_modules():
        if isinstance(layer, kernels.PackedLinear) and not place.endswith(".head"):
            assert torch.equal(layer.weight(), weight_of(floats.get_submodule(place)))
    inputs = prompt_for(name)
    out = SpecGenerator(LanguageModel(floats), "suffix").generate(**inputs, **OPTIONS)
    assert out.sequences.tolist() == reference(floats, inputs, max_new_tokens=8).tolist()


def test_another_dtype(tmp_path: Path) -> None:
    """Norms and passes get the dtype of the call, integers stay; a folder of floats is an ordinary checkpoint."""
    floats = packed(saved("llama", tmp_path / "a"), tmp_path / "floats", dtype="bfloat16")
    assert "quantization_config" not in json.loads((tmp_path / "floats" / "config.json").read_text())
    assert load_model(floats).dtype == torch.bfloat16
    folder = packed(saved("llama", tmp_path / "a"), tmp_path / "b", quantization="int4-weight", dtype="bfloat16")
    assert load_model(folder).dtype == torch.bfloat16
    model = load_model(folder, Loading(dtype="float32"))
    assert (model.dtype, model.model.model.norm.weight.dtype) == (torch.float32, torch.float32)


def test_a_folder_with_all_that_commands_need(tmp_path: Path) -> None:
    """Tokenizer, chat template and generation defaults come along; as a draft, the folder keeps its weights."""
    source, folder = saved_model(tmp_path / "source"), tmp_path / "packed"
    for file, change in (
        ("tokenizer_config.json", {"chat_template": "{{ 1 }}"}),
        ("generation_config.json", {"top_k": 7}),
    ):
        path = Path(source) / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    pack_model(source, folder, quantization="int8-weight")
    how = {"quantization": "int8-weight"}
    plain, again = (SpecGenerator.from_pretrained(*one) for one in ((source,), (str(folder), str(folder))))
    assert again.tokenizer.chat_template == "{{ 1 }}"
    assert again.target.model.generation_config.top_k == 7
    expected = SpecGenerator.from_pretrained(source, **how).generate("ab", max_new_tokens=8).texts
    assert again.generate("ab", max_new_tokens=8).texts == expected
    assert plain.tokenizer.get_vocab() == again.tokenizer.get_vocab()


def test_checkpoints_that_are_quantized_already(tmp_path: Path) -> None:
    """They keep their integers; layers whose inputs lie in another order are told."""
    saved_quantized(tmp_path / "awq", AWQ)
    check_same(load_model(packed(str(tmp_path / "awq"), tmp_path / "b")), load_model(str(tmp_path / "awq")), "llama")
    saved_quantized(tmp_path / "gptq", GPTQ)
    with pytest.raises(UnsupportedError, match="has layers of the kind Reordered"):
        packed(str(tmp_path / "gptq"), tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_what_cannot_be_packed(tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "source")
    with pytest.raises(UnsupportedError, match="MambaForCausalLM reads no text alone"):
        packed(saved("mamba", tmp_path / "mamba"), tmp_path / "a", quantization="int8-weight")
    with pytest.raises(OptionError, match=r"`quantization` must be one of int8-weight, int4-weight, got 'nf4'"):
        packed(source, tmp_path / "a", quantization="nf4")
    with pytest.raises(OptionError, match=r"`folder` must be a folder that is new or empty"):
        packed(source, tmp_path / "source", quantization="int8-weight")
    with pytest.raises(OptionError, match=r"`options` must be options of loading, got 'top_k'"):
        pack_model(source, tmp_path / "a", top_k=3)
    folder = packed(source, tmp_path / "a", quantization="int8-weight")
    with pytest.raises(OptionError, match=r"`quantization`='int4-weight' needs plain weights"):
        load_model(folder, Loading(quantization="int4-weight"))


def spoil(folder: Path, **change: torch.Tensor | None) -> None:
    file = folder / "model.safetensors"
    state = {**load_file(file), **{key.replace("__", "."): value for key, value in change.items()}}
    save_file({key: value for key, value in state.items() if value is not None}, file, metadata={"format": "pt"})


def test_broken_folders(tmp_path: Path) -> None:
    """The error says what is wrong, in one line."""
    folder, layer = tmp_path / "b", "model__layers__0__mlp__up_proj"
    packed(saved("llama", tmp_path / "a"), folder, quantization="int8-weight")
    spoil(folder, **{f"{layer}__packed": torch.zeros(1, 4, 32, 4, dtype=torch.int8)})
    with pytest.raises(LoadError, match=r"layer model.layers.0.mlp.up_proj of .* is broken"):
        load_model(str(folder))
    spoil(folder, **{f"{layer}__packed": None})
    with pytest.raises(LoadError, match=r"lacks model.layers.0.mlp.up_proj.weight and 0 others"):
        load_model(str(folder))
    weights = (folder / "model.safetensors").read_bytes()
    for length, words in ((len(weights) - 7, r"was cut: it has \d+ bytes"), (30, "was cut in its header")):
        (folder / "model.safetensors").write_bytes(weights[:length])
        with pytest.raises(LoadError, match=rf"model.safetensors .*{words}"):
            load_model(str(folder))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["version"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="was packed in version 2 of the layout, and 1 is read"):
        load_model(str(folder))


def test_layers_that_are_joined_lie_side_by_side(tmp_path: Path) -> None:
    """Joining the layers of a packed folder copied all of them once more, in every load."""
    folder = packed(saved("llama", tmp_path / "a", intermediate_size=64), tmp_path / "b", quantization="int8-weight")
    mlp = load_model(folder, Loading(backend="packed")).model.model.layers[0].mlp
    layers, x = [mlp.gate_proj, mlp.up_proj], torch.ones(3, mlp.gate_proj.inputs)
    expected = torch.cat([layer(x) for layer in layers], -1)
    address = layers[0].packed.data_ptr()
    joined = kernels.PackedLinear.join(layers)
    assert joined.packed.data_ptr() == layers[0].packed.data_ptr() == address
    assert torch.equal(joined(x), expected)
