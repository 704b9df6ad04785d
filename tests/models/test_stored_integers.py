"""Checkpoints that are quantized already: their numbers, their texts, and what is not read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from specdec import LoadError, Loading, OptionError, SpecGenerator, UnsupportedError, kernels
from specdec.models import load_model
from specdec.models.loading.stored_integers import READERS, Eights, Reordered
from tests.golden import __file__ as golden
from tests.matrix import endless
from tests.quantized import AWQ, FP8, GPTQ, SCHEMES, compressed, saved_quantized
from tests.test_exact import prompt_for, reference

pytestmark = pytest.mark.filterwarnings("ignore")
WRITTEN = Path(golden).with_name("quantized.safetensors")
OPTIONS = endless(8)
schemes = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
needs_kernels = pytest.mark.skipif(not kernels.available(), reason="needs kernels")


def written() -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:
    """Schemes and tensors of a layer by case, as compressed-tensors 0.20.1 and gptqmodel 7.7.0 wrote them."""
    with safe_open(WRITTEN, "pt") as file:
        schemes = {name: json.loads(scheme) for name, scheme in file.metadata().items()}
        keys = list(file.keys())
        return {
            name: (scheme, {key.partition("/")[2]: file.get_tensor(key) for key in keys if key.startswith(f"{name}/")})
            for name, scheme in schemes.items()
        }


@needs_kernels
@pytest.mark.parametrize("case", sorted(written()))
def test_numbers_of_the_packages(case: str) -> None:
    """Layers that the formats' packages wrote dequantize to the packages' own floats, in the floats' dtype; packed
    layers hold the same numbers, and numbers in FP8 to half of the unit of their group."""
    scheme, tensors = written()[case]
    floats = tensors.pop("floats")
    stored = READERS[scheme["quant_method"]](scheme)(tensors, floats.shape[1])
    weight, packed = stored.weight(), kernels.pack(stored.quantized()).weight()
    assert torch.equal(weight.to(floats.dtype), floats)
    if isinstance(stored, Eights):
        groups = weight.unflatten(1, (-1, 32))
        errors = (packed - weight).unflatten(1, (-1, 32)).abs().amax(2) / groups.abs().amax(2)
        assert 0 < errors.max() <= 1 / 128
        large = groups.abs() >= groups.abs().amax(2, keepdim=True) / 7.5
        assert torch.equal(packed.unflatten(1, (-1, 32))[large], groups[large])
    else:
        assert torch.equal(packed, weight if stored.order is None else weight[:, stored.order])


@needs_kernels
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@schemes
def test_texts(scheme: dict[str, Any], name: str, tmp_path: Path) -> None:
    """A target's texts are those of a float model with the weights that the checkpoint stands for, in floats too; in
    FP8 with those of its packed layers. (GPT-2 initialises layers' weights by name, which these layers lack.)"""
    floats, inputs = saved_quantized(tmp_path, scheme, name), prompt_for(name)
    for backend in ("eager", "packed"):
        target = load_model(str(tmp_path), Loading(backend=backend, activations="float"))
        plain = AutoModelForCausalLM.from_config(target.config, dtype=torch.float32).eval()
        layers = {key: target.model.get_submodule(key.removesuffix(".weight")) for key in floats}
        if scheme["quant_method"] == "fp8" and backend == "packed":
            floats = {key: layer.weight().T if name == "gpt2" else layer.weight() for key, layer in layers.items()}
        plain.load_state_dict({**load_file(tmp_path / "model.safetensors"), **floats}, strict=False)
        kinds = {"eager": (torch.nn.Linear,), "packed": (kernels.PackedLinear, Reordered)}[backend]
        assert all(type(layer) in kinds for layer in layers.values())
        out = SpecGenerator(target, "suffix").generate(**inputs, **OPTIONS)
        assert out.sequences.tolist() == reference(plain, inputs, **OPTIONS).tolist()


@needs_kernels
def test_inputs_in_another_order(tmp_path: Path) -> None:
    """Groups of GPTQ's act-order are gathered, also where rows are rounded."""
    saved_quantized(tmp_path, GPTQ)
    target = load_model(str(tmp_path))
    assert type(target.model.get_submodule("model.layers.0.mlp.down_proj")) is Reordered
    inputs = prompt_for("llama")
    plain = SpecGenerator(target).generate(**inputs, **OPTIONS)
    assert plain.stats.settings["backend"] == "packed"
    drafted = SpecGenerator(target, "early_exit:1").generate(**inputs, **OPTIONS)
    assert drafted.sequences.tolist() == plain.sequences.tolist()


def test_biases(tmp_path: Path) -> None:
    """A bias beside a layer's integers is the layer's, also where the architecture has none, as AutoGPTQ wrote it."""
    saved_quantized(tmp_path, AWQ)
    state, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.down_proj"
    plain = load_model(str(tmp_path), Loading(backend="eager")).model.get_submodule(name)
    bias = torch.randn(64, generator=torch.Generator().manual_seed(0)).half()
    save({**state, f"{name}.bias": bias}, tmp_path)
    x = torch.randn(3, plain.in_features, generator=torch.Generator().manual_seed(1))
    for backend in ("eager", "auto"):
        layer = load_model(str(tmp_path), Loading(backend=backend, activations="float")).model.get_submodule(name)
        assert torch.allclose(layer(x), plain(x) + bias.float(), atol=1e-5)


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ({**GPTQ, "bits": 3}, r"bits=3, and specdec reads 4 or 8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, r"checkpoint_format='marlin', and specdec reads gptq or gptq_v2"),
        ({**AWQ, "version": "gemv"}, r"version='gemv'"),
        ({**AWQ, "zero_point": False}, r"zero_point=False"),
        ({**compressed("pack-quantized"), "kv_cache_scheme": {"num_bits": 8}}, r"kv_cache_scheme=.*reads none"),
        (
            {**compressed("pack-quantized"), "sparsity_config": {"format": "sparse-24-bitmask"}},
            r"sparsity_config.format",
        ),
        ({**compressed("pack-quantized"), "transform_config": {"config_groups": {}}}, r"transform_config"),
        (compressed("nvfp4-pack-quantized", type="float"), r"format='nvfp4-pack-quantized'"),
        (compressed("pack-quantized", num_bits=2), r"weights.num_bits=2, and specdec reads 4 or 8"),
        (compressed("float-quantized", type="float", num_bits=4), r"weights.num_bits=4"),
        ({**FP8, "fmt": "e5m2"}, r"fmt='e5m2'"),
    ],
)
def test_schemes_that_are_not_read(scheme: dict[str, Any], words: str, tmp_path: Path) -> None:
    """The error names the field of the scheme, before any weight is read."""
    saved_quantized(tmp_path, SCHEMES["fp8"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))
    (tmp_path / "model.safetensors").write_text("no weights")
    with pytest.raises(UnsupportedError, match=words):
        load_model(str(tmp_path))


def test_options_for_plain_weights(tmp_path: Path) -> None:
    saved_quantized(tmp_path, AWQ)
    for option, value in (("quantization", "int8-weight"), ("offload", "disk")):
        with pytest.raises(
            OptionError, match=rf"`{option}`='{value}' needs plain weights, .* quantized already \(awq\)"
        ):
            load_model(str(tmp_path), Loading(**{option: value}))


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    """The error names the layer, and says why its tensors make no weight."""
    saved_quantized(tmp_path, GPTQ)
    state, name = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.up_proj"
    changes = {
        "qweight": (
            state[f"{name}.qweight"][:, :-8].contiguous(),
            r"they are \[120, 64\], and the layer is \[128, 64\]",
        ),
        "scales": (None, r"there is no 'scales'"),
        "g_idx": (torch.zeros(64, dtype=torch.int32), r"their groups of inputs are not 2 of equal size"),
    }
    for leaf, (tensor, words) in changes.items():
        changed = {key: one for key, one in state.items() if key != f"{name}.{leaf}"}
        save(changed if tensor is None else {**changed, f"{name}.{leaf}": tensor}, tmp_path)
        with pytest.raises(LoadError, match=rf"the tensors of {name} in .* do not fit together \(({words})"):
            load_model(str(tmp_path))


@pytest.mark.parametrize("leaf", ["mlp.act.scales", "self_attn.k_scale", "mlp.experts.0.down_proj.qweight"])
def test_tensors_of_other_modules(leaf: str, tmp_path: Path) -> None:
    """Scales of activations and caches, and experts that are quantized one by one, are not left out silently."""
    saved_quantized(tmp_path, AWQ)
    state = load_file(tmp_path / "model.safetensors")
    save({**state, f"model.layers.0.{leaf}": torch.ones(4)}, tmp_path)
    with pytest.raises(UnsupportedError, match=rf"has the tensor model.layers.0.{leaf}, and only linear layers"):
        load_model(str(tmp_path))


def save(state: dict[str, Tensor], folder: Path) -> None:
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
