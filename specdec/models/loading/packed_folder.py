"""A folder whose linear layers lie as the kernels read them, so that loading packs and rounds nothing.

Its config says `"quantization_config": {"quant_method": "specdec"}`. The tensors of a packed layer bear the names of
`PackedLinear`'s buffers; where a head and embeddings share a weight, they stand under the embeddings' name.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.pytorch_utils import Conv1D

from specdec import kernels
from specdec.errors import LoadError, OptionError, UnsupportedError
from specdec.models.backends.experts import expert_stacks, router_stacks
from specdec.models.backends.packed_layers import PackedEmbedding, is_packed, sharing, weight_of
from specdec.models.gguf import empty_model
from specdec.models.gguf.weights import put_packed
from specdec.models.hf.private_api import cached
from specdec.models.loading.weight_files import read_tensors, write_tensors

METHOD = "specdec"
_VERSION = 1  # the layout's
_FILE = "model.safetensors"
_KINDS = (kernels.PackedLinear, PackedEmbedding)
_PLAIN, _QUANTIZED = ("torch.", "transformers."), ".integrations."  # Python modules of layers: read, and not read


class PackedFolder:
    """What a packed folder holds of a model; its layers may be joined to larger ones before it is written.

    Raises UnsupportedError for models and layers that `read_packed` cannot make.
    """

    def __init__(self, model: Any) -> None:
        kind, config = type(model), copy(model.config)
        kinds = [type(part) for part in model.modules() if type(part) not in _KINDS]
        modules = {part.__name__: part.__module__ for part in kinds}
        odd = [name for name, module in modules.items() if not module.startswith(_PLAIN) or _QUANTIZED in module]
        is_known = getattr(transformers, kind.__name__, None) is kind
        has_more = hasattr(config, "vision_config") or hasattr(config, "audio_config")
        if odd or has_more or not is_known or getattr(model, "_hf_peft_config_loaded", False):
            reason = f"has layers of the kind {odd[0]}" if odd else "has parts beside its text, or code of its own"
            raise UnsupportedError(
                f"{kind.__name__} {reason}, which packed folders do not hold: load the checkpoint as it is"
            )
        config.architectures, config.dtype = [kind.__name__], model.dtype  # speech changes it after loading
        likely = getattr(model.get_output_embeddings(), "likely", 0)
        config.quantization_config = {"quant_method": METHOD, "version": _VERSION, "likely": likely}
        self._texts, defaults = {"config.json": config.to_json_string()}, model.generation_config
        if defaults is not None:
            self._texts["generation_config.json"] = defaults.to_json_string()
        self._tensors = _tensors(model)
        self.nbytes = sum(tensor().nbytes for tensor in self._tensors.values())

    def write(self, folder: Path, check: Callable[[], object] = bool) -> None:
        """Writes all files into a folder, and calls `check` before each tensor.

        Raises OSError, LoadError if a weight was changed meanwhile, and what `check` raises.
        """
        write_tensors(folder / _FILE, self._tensors, check)
        for name, text in self._texts.items():
            (folder / name).write_text(text, "utf-8")


def save_packed(model: Any, folder: Path) -> None:
    """Writes a loaded model into an empty or new folder: configs, and weights, of which packed ones stay packed.

    A model without packed layers becomes an ordinary checkpoint. Raises OptionError for a folder that has files or
    cannot be written to, and UnsupportedError as `PackedFolder` does.
    """
    packed = PackedFolder(model)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise OptionError.of("folder", "a folder that is new or empty", str(folder), "name another one")
        (packed.write if is_packed(model) else model.save_pretrained)(folder)
    except OSError as error:
        raise OptionError.of("folder", "a folder with room for the model", str(folder), str(error)) from error


def _tensors(model: Any) -> dict[str, Callable[[], Tensor]]:
    """Functions that return a model's tensors, by name, a tied tensor once; joined layers get other tensors."""
    heads = {f"{place}.head": place for place, part in model.named_modules() if isinstance(part, PackedEmbedding)}
    tensors, addresses = dict[str, Callable[[], Tensor]](), set[int]()
    for full, tensor in model.state_dict().items():
        module, _, leaf = full.rpartition(".")
        if tensor.data_ptr() not in addresses:
            layer, name = model.get_submodule(module), f"{heads.get(module, module)}.{leaf}"
            tensors[name] = partial(_unchanged, tensor, _version(tensor))
            if isinstance(layer, kernels.PackedLinear):
                tensors[name] = partial(layer.get_buffer, leaf)
            addresses.add(tensor.data_ptr())
    return tensors


def _unchanged(tensor: Tensor, version: int) -> Tensor:
    if _version(tensor) != version:
        raise LoadError("a weight was changed while it was written")
    return tensor


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def is_packed_folder(config: Any) -> bool:
    """Whether this is the config of a packed folder; raises UnsupportedError for another version."""
    scheme = getattr(config, "quantization_config", None) or {}
    if not isinstance(scheme, dict) or scheme.get("quant_method") != METHOD:
        return False
    if scheme.get("version") != _VERSION:
        raise UnsupportedError(
            f"the folder was packed in version {scheme.get('version')!r} of the layout, and {_VERSION} is read: pack "
            "the model again"
        )
    return True


@torch.no_grad()
def read_packed(name: str, config: Any, dtype: torch.dtype, *, revision: str | None, packs: bool, rounds: bool) -> Any:
    """The model of a packed folder in host memory; its layers are packed, or floats unless it `packs`.

    `dtype` replaces the stored dtype. Raises LoadError for tensors that are missing or of another size.
    """
    likely = config.quantization_config.get("likely", 0)
    del config.quantization_config
    stored, config.dtype = config.dtype, dtype
    model = empty_model(config, config.dtype)
    model.tie_weights()
    packed, names = dict[str, kernels.PackedLinear](), sharing(model)
    untied = {group[0] for group in names.values() if len(group) == 1}
    tables = {f"{place}.weight" for place, part in model.named_modules() if isinstance(part, nn.Embedding)}
    tensors = read_tensors(cached(name, _FILE, revision), tables & untied)  # a pass reads a few rows of these tables
    state = {key: tensor.to(config.dtype) if tensor.dtype == stored else tensor for key, tensor in tensors.items()}
    stacks = expert_stacks(model) | router_stacks(model)
    for module in [key.removesuffix(".packed") for key in tensors if key.endswith(".packed")]:
        stack = stacks.get(module)
        owner: Any = stack or model.get_submodule(module)
        buffers = {leaf: state.pop(f"{module}.{leaf}", None) for leaf in kernels.LAYER_TENSORS}
        try:
            layer = kernels.restored_layer(buffers, *weight_of(owner).shape, rounds=rounds)
        except ValueError as error:
            raise LoadError(f"the layer {module} of {name!r} is broken ({error}): pack the model again") from error
        if packs:
            kernels.measure_ways(layer.kind, layer.scales is not None, layer.rounds)
            packed[module if stack else f"{module}.weight"] = layer
        elif stack:
            parent = module.rpartition(".")[0]
            state |= {f"{parent}.{leaf}": tensor for leaf, tensor in stack.unpacked(layer).items()}
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
    if isinstance(head := model.get_output_embeddings(), kernels.PackedLinear):
        head.likely = likely
    if absent := [key for key, tensor in model.state_dict().items() if tensor.is_meta]:
        raise LoadError(f"{name!r} lacks {absent[0]} and {len(absent) - 1} others: pack the model again")
    model.generation_config = GenerationConfig.from_pretrained(name, revision=revision)
    return model
