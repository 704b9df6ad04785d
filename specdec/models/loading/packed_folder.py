"""A folder whose linear layers lie as the kernels read them, so that loading packs and rounds nothing.

Its config says `"quantization_config": {"quant_method": "specdec"}`. The tensors of a packed layer bear the names of
`PackedLinear`'s buffers; of a head and embeddings that share a weight, the embedding has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.pytorch_utils import Conv1D

from specdec import kernels
from specdec.errors import LoadError, OptionError, UnsupportedError
from specdec.models.backends.packed_layers import PackedEmbedding, is_packed, weight_of
from specdec.models.gguf import empty_model
from specdec.models.gguf.weights import put_packed, sharing
from specdec.models.hf.private_api import cached
from specdec.models.loading.weight_files import read_tensors

_METHOD, _VERSION = "specdec", 1  # of the layout
_FILE = "model.safetensors"
_KINDS = (kernels.PackedLinear, PackedEmbedding)


def save_packed(model: Any, folder: Path) -> None:
    """Writes a loaded model into an empty or new folder: configs, and weights, of which packed ones stay packed.

    A model without packed layers becomes an ordinary checkpoint. Raises OptionError for a folder that has files or
    cannot be written to, UnsupportedError for models and layers that `read_packed` cannot make.
    """
    kind, config = type(model).__name__, copy(model.config)
    odd = [type(part).__name__ for part in model.modules() if type(part).__module__.startswith("specdec.")]
    odd = [one for one in odd if one not in {known.__name__ for known in _KINDS}]
    if odd or not hasattr(transformers, kind) or hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        reason = f"has layers of the kind {odd[0]}" if odd else "has parts beside its text, or code of its own"
        raise UnsupportedError(f"{kind} {reason}, which packed folders do not hold: load the checkpoint as it is")
    with _written(folder):
        if not is_packed(model):
            model.save_pretrained(folder)
            return
        save_file(_tensors(model), folder / _FILE, metadata={"format": "pt"})
        if model.generation_config is not None:
            model.generation_config.to_json_file(folder / "generation_config.json")
        config.architectures, config.quantization_config = [kind], {"quant_method": _METHOD, "version": _VERSION}
        config.to_json_file(folder / "config.json")  # last: a folder without it is none


@contextmanager
def _written(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise OptionError.of("folder", "a folder that is new or empty", str(folder), "name another one")
        yield
    except (OSError, SafetensorError) as error:
        raise OptionError.of("folder", "a folder with room for the model", str(folder), str(error)) from error


def _tensors(model: Any) -> dict[str, Tensor]:
    """The tensors of a model by name, tied ones once."""
    heads = {f"{place}.head": place for place, part in model.named_modules() if isinstance(part, PackedEmbedding)}
    tensors, addresses = dict[str, Tensor](), set[int]()
    for full, tensor in model.state_dict().items():
        module, _, leaf = full.rpartition(".")
        if tensor.data_ptr() not in addresses:
            tensors[f"{heads.get(module, module)}.{leaf}"] = tensor.contiguous()
            addresses.add(tensor.data_ptr())
    return tensors


def is_packed_folder(config: Any) -> bool:
    """Whether this is the config of a packed folder; raises UnsupportedError for one of another version."""
    scheme = getattr(config, "quantization_config", None) or {}
    if not isinstance(scheme, dict) or scheme.get("quant_method") != _METHOD:
        return False
    if scheme.get("version") != _VERSION:
        raise UnsupportedError(
            f"the folder was packed in version {scheme.get('version')!r} of the layout, and {_VERSION} is read: pack "
            "the model again"
        )
    return True


@torch.no_grad()
def read_packed(
    name: str, config: Any, dtype: torch.dtype | None, *, revision: str | None, packs: bool, rounds: bool
) -> Any:
    """The model of a packed folder in host memory; its layers are packed, or floats unless it `packs`.

    `dtype` replaces the stored one. Raises LoadError for tensors that are missing or of another size.
    """
    del config.quantization_config
    stored, config.dtype = config.dtype, dtype or config.dtype
    model, tensors = empty_model(config, config.dtype), read_tensors(cached(name, _FILE, revision))
    state = {key: tensor.to(config.dtype) if tensor.dtype == stored else tensor for key, tensor in tensors.items()}
    model.tie_weights()
    packed, names = dict[str, kernels.PackedLinear](), sharing(model)
    for module in [key.removesuffix(".packed") for key in tensors if key.endswith(".packed")]:
        owner: Any = model.get_submodule(module)
        held = {leaf: state.pop(f"{module}.{leaf}", None) for leaf in kernels.HELD}
        try:
            layer = kernels.restored_layer(held, *weight_of(owner).shape, rounds=rounds)
        except ValueError as error:
            raise LoadError(f"the layer {module} of {name!r} is broken ({error}): pack the model again") from error
        if packs:
            kernels.measure_ways(layer.kind, layer.scales is not None, layer.rounds)
            packed[f"{module}.weight"] = layer
        else:
            weight = layer.weight().to(config.dtype)
            state |= dict.fromkeys(
                names[id(owner.weight)], weight.T.contiguous() if isinstance(owner, Conv1D) else weight
            )
            if layer.bias is not None:
                owner.bias = nn.Parameter(layer.bias.to(config.dtype), requires_grad=False)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    put_packed(model, packed)
    if missing := [key for key, tensor in model.state_dict().items() if tensor.is_meta]:
        raise LoadError(f"{name!r} lacks {missing[0]} and {len(missing) - 1} others: pack the model again")
    model.generation_config = GenerationConfig.from_pretrained(name, revision=revision)
    return model
