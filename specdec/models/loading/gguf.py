"""GGUF files: read as they are written, and layers in formats of our kernels keep the file's blocks.

Architectures that `specdec.models.gguf` does not know are read by transformers, which makes floats of all weights. A
linear layer then takes its blocks from the file, if they equal its weight: so no order of rows has to be assumed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, GgufConfig

from specdec import kernels
from specdec.errors import OptionError, UnsupportedError
from specdec.models.backends.packed_layers import changed, is_plain, pack_layers, weight_of
from specdec.models.gguf import GgufReader, is_known, read_config, read_model
from specdec.models.gguf.end_tokens import special_ids
from specdec.models.gguf.header import architecture_of
from specdec.models.gguf.reader import StoredTensor, part_names
from specdec.models.hf.device_hooks import is_offloaded
from specdec.models.hf.private_api import cached, gguf_bars
from specdec.models.loading.quantizers import Quantizer
from specdec.options.load import is_gguf

_log = logging.getLogger(__name__)
# Names of llama.cpp's sampling -> fields of a generation config.
_SAMPLING = {
    **{"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"},
    "penalty_repeat": "repetition_penalty",
}
_WITHOUT_SAMPLING = {"do_sample", "repetition_penalty"}
_ROUNDINGS = 2  # roundings of the dtype by which equal weights may differ
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # names of GGUF


class GgufFile(Quantizer):
    """A GGUF file in a folder or hub repository; `dtype` is the stored one, float32 if some weights are quantized.

    Raises UnsupportedError without the package gguf, OptionError for a missing file or one of another kind, LoadError
    for a broken one.
    """

    converts = True

    def __init__(self, folder: str, name: str, revision: str | None = None) -> None:
        super().__init__(name)
        if find_spec("gguf") is None:
            raise UnsupportedError("`gguf_file` needs the package gguf: pip install -e '.[gguf]'")
        self._folder, self._revision = folder, revision
        self._reader: GgufReader | None = GgufReader(located(folder, name, revision))
        # of matrices: vectors are always float32
        halves = {tensor.tensor_type.name for tensor in self._reader.tensors.values()} - {"F32"}
        self.dtype = _FLOATS.get(halves.pop(), torch.float32) if len(halves) == 1 else torch.float32

    @property
    def is_known(self) -> bool:
        """Whether this package reads the file, and not transformers; says so once where it does not."""
        if is_known(self.reader):
            return True
        _say_foreign(architecture_of(self.reader))
        return False

    @property
    def reader(self) -> GgufReader:
        """The open file, until `convert`."""
        assert self._reader is not None
        return self._reader

    def read_config(self) -> Any:
        """The config of a known architecture; raises UnsupportedError for keys of it that are not known."""
        config = read_config(self.reader)
        config.dtype, config.name_or_path = self.dtype, self._folder
        return config

    def read(self, config: Any, dtype: torch.dtype) -> Any:
        """The model of a config of `read_config`, in host memory."""
        config.dtype = dtype
        packs = self.packs and dtype in kernels.FLOATS.values() and kernels.available()
        model = read_model(self.reader, config, dtype, packs=packs, rounds=self.rounds)
        with suppress(OSError):  # beside a file there may be one
            model.generation_config = GenerationConfig.from_pretrained(self._folder, revision=self._revision)
        settle_generation(model, self.reader)
        return model

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context that raises transformers' errors for unsupported files as UnsupportedError."""
        try:
            with gguf_bars():
                yield
        except (ValueError, KeyError, NotImplementedError) as error:
            raise UnsupportedError(
                f"transformers cannot read `gguf_file`={self.name!r} ({error}): use another file, or the checkpoint in "
                "safetensors that it was made of"
            ) from error

    def config(self, dtype: torch.dtype) -> Any:
        return GgufConfig(dequantize=True)  # of all weights, whatever kernels are installed

    @torch.no_grad()
    def convert(self, model: Any) -> None:
        """Replaces linear layers whose blocks the kernels know by packed ones, one after the other.

        Changes nothing if passes do not run packed, or the model reads its layers' weights itself.
        """
        settle_generation(model, self.reader)
        on_cpu = not is_offloaded(model) and model.device.type == "cpu"
        if self.packs and on_cpu and kernels.available():
            changed(model, lambda: _pack(model, self.reader, self.rounds))
        self._reader = None


@cache
def _say_foreign(architecture: str) -> None:
    _log.warning(
        "GGUF files of %s are read by transformers, which leaves out parts of a header without a word: the checkpoint "
        "in safetensors is surer",
        architecture,
    )


def settle_generation(model: Any, reader: GgufReader) -> None:
    """Lets every end token of a file end a text, forbids the tokens that the file forbids, and sets its sampling.

    What a generation config beside the file sets counts before the file's sampling.
    """
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    ends = config.eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or ())
    config.eos_token_id = list(dict.fromkeys([*ends, *special_ids(reader).ends])) or None
    forbidden = reader.keys.get("tokenizer.ggml.suppress_tokens")
    if forbidden is not None and len(forbidden):
        config.suppress_tokens = sorted({*(config.suppress_tokens or ()), *forbidden.tolist()})
    for name, value in _sampling(reader).items():
        if getattr(config, name, None) is None:
            setattr(config, name, value)


def _sampling(reader: GgufReader) -> dict[str, Any]:
    """The fields of a generation config for the keys `general.sampling.…` of a file; says which have none."""
    prefix = "general.sampling."
    values = {key.removeprefix(prefix): value for key, value in reader.keys.items() if key.startswith(prefix)}
    if others := sorted(values.keys() - _SAMPLING.keys()):
        _log.info("%s has %s%s, which is not followed", reader.path, prefix, f", {prefix}".join(others))
    fields = {field: round(values[name], 6) for name, field in _SAMPLING.items() if name in values}  # float32
    if fields.keys() - {"repetition_penalty"}:
        fields["do_sample"] = fields.get("temperature", 1.0) > 0  # llama.cpp's greedy text is one of temperature 0
    return fields if fields.get("do_sample") else {name: fields[name] for name in _WITHOUT_SAMPLING & fields.keys()}


def _pack(model: Any, reader: GgufReader, rounds: bool) -> Callable[[], None]:
    known = kernels.BLOCKS.keys() if rounds else kernels.IN_FLOATS
    tensors = {tensor.name: tensor for tensor in reader.tensors.values() if tensor.tensor_type.name in known}
    tensor_name, embeddings = _names(reader), model.get_input_embeddings()
    plain = {name: module for name, module in model.named_modules() if is_plain(module)}
    shares = {name for name, module in plain.items() if module.weight is embeddings.weight}

    def blocks(name: str, layer: Any) -> kernels.PackedLinear | None:
        tensor = tensors.get(f"{tensor_name(name)}.weight")
        if tensor is None and name in shares:
            tensor = tensors.get("token_embd.weight")
        return None if tensor is None else _blocks(layer, tensor, rounds)

    return pack_layers(model, list(plain), blocks)


def located(folder: str, name: str, revision: str | None) -> Path:
    """The path of a GGUF file in a folder or hub repository; OptionError if it is not there, or of another kind."""
    path = Path(folder, name)
    if Path(folder).is_dir() and not path.is_file():
        others = ", ".join(sorted(str(other.relative_to(folder)) for other in Path(folder).rglob("*.gguf")))
        way_out = f"there are {others}" if others else "no GGUF file is there"
        raise OptionError.of("gguf_file", f"the name of a file in {folder}", name, way_out)
    if not path.is_file():
        path, *_ = [Path(cached(folder, part, revision)) for part in part_names(name)]
    if not is_gguf(path):
        raise OptionError.of("gguf_file", "a GGUF file", str(path), "its first bytes are not those of a GGUF file")
    return path


def _names(reader: Any) -> Callable[[str], str | None]:
    """Maps a module's name to that of its tensors in the file; may be wrong for unusual architectures."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = architecture_of(reader)
    known = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    blocks = reader.keys.get(f"{architecture}.block_count")
    if architecture not in known or blocks is None:
        return lambda name: None
    table = get_tensor_name_map(known[architecture], blocks)
    return lambda name: table.get_name(name) or table.get_name(name.partition(".")[2])  # some without their base model


def _blocks(layer: Any, tensor: StoredTensor, rounds: bool) -> kernels.PackedLinear | None:
    """A tensor's blocks with their rows in the order of a layer's weight; None if they are not equal to it.

    llama.cpp stores the rows of some queries and keys in another order, so rows are found by their content.
    """
    weight, raw = weight_of(layer), torch.from_numpy(np.asarray(tensor.data))
    if [*reversed(tensor.shape)] != list(weight.shape):
        return None
    make = partial(kernels.pack_blocks, raw, tensor.tensor_type.name, weight.shape[1], bias=layer.bias, rounds=rounds)
    packed = make()
    mine = packed.weight().to(weight.dtype)
    if (mine - weight).abs().max() <= _ROUNDINGS * torch.finfo(weight.dtype).eps * weight.abs().max():
        return packed
    places = {row: place for place, row in enumerate(_rows(mine))}
    order = [places.get(row) for row in _rows(weight)]
    return None if None in order else make(order=torch.tensor(order))


def _rows(weight: Tensor) -> Iterator[bytes]:
    return (row.tobytes() for row in weight.contiguous().view(torch.uint8).numpy())
