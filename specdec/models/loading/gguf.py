"""GGUF files in folders and hub repositories, and the defaults of calls that they set."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from specdec.errors import OptionError
from specdec.models.gguf import GgufReader, read_config, read_model
from specdec.models.gguf.end_tokens import special_ids
from specdec.models.gguf.reader import open_gguf, part_names
from specdec.models.hf.private_api import cached
from specdec.options.load import is_gguf

_log = logging.getLogger(__name__)
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # names of GGUF
# Names of llama.cpp's sampling -> fields of a generation config.
_SAMPLING = {
    **{"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"},
    "penalty_repeat": "repetition_penalty",
}
_WITHOUT_SAMPLING = {"do_sample", "repetition_penalty"}


class GgufFile:
    """A GGUF file in a folder or hub repository; `dtype` is its matrices' dtype, float32 if some are quantized.

    Raises UnsupportedError for other architectures and for keys that are not known, OptionError for a missing file or
    another kind of file, LoadError for a broken file.
    """

    def __init__(self, folder: str, name: str, revision: str | None = None) -> None:
        self._folder, self._revision = folder, revision
        self._reader = open_gguf(gguf_path(folder, name, revision))
        # The matrices' types: vectors are always float32.
        halves = {tensor.tensor_type.name for tensor in self._reader.tensors.values()} - {"F32"}
        self.dtype = _FLOATS.get(halves.pop(), torch.float32) if len(halves) == 1 else torch.float32
        self.config = read_config(self._reader)
        self.config.dtype, self.config.name_or_path = self.dtype, folder

    def read(self, dtype: torch.dtype, *, packs: bool, rounds: bool) -> Any:
        """The model in host memory, its blocks in packed layers if it `packs`."""
        self.config.dtype = dtype
        model = read_model(self._reader, self.config, dtype, packs=packs, rounds=rounds)
        with suppress(OSError):  # the folder may hold none
            model.generation_config = GenerationConfig.from_pretrained(self._folder, revision=self._revision)
        _complete_generation(model.generation_config, self._reader)
        return model


def _complete_generation(config: Any, reader: GgufReader) -> None:
    """Lets every end token of a file end a text, forbids the tokens that the file forbids, and sets its sampling.

    The settings of a generation config beside the file count before the file's sampling.
    """
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
    """The fields of a generation config for the keys `general.sampling.…` of a file; logs the keys without a field."""
    prefix = "general.sampling."
    values = {key.removeprefix(prefix): value for key, value in reader.keys.items() if key.startswith(prefix)}
    if names := sorted(values.keys() - _SAMPLING.keys()):
        _log.info("%s has %s%s, which is not followed", reader.path, prefix, f", {prefix}".join(names))
    fields = {field: round(values[name], 6) for name, field in _SAMPLING.items() if name in values}  # float32
    if fields.keys() - {"repetition_penalty"}:
        fields["do_sample"] = fields.get("temperature", 1.0) > 0  # llama.cpp's greedy text has temperature 0
    return fields if fields.get("do_sample") else {name: fields[name] for name in _WITHOUT_SAMPLING & fields.keys()}


def gguf_path(folder: str, name: str, revision: str | None) -> Path:
    """The path of a GGUF file in a folder or hub repository; OptionError if there is no file, or another kind."""
    path = Path(folder, name)
    if Path(folder).is_dir() and not path.is_file():
        files = ", ".join(sorted(str(file.relative_to(folder)) for file in Path(folder).rglob("*.gguf")))
        way_out = f"there are {files}" if files else "no GGUF file is there"
        raise OptionError.of("gguf_file", f"the name of a file in {folder}", name, way_out)
    if not path.is_file():
        path, *_ = [Path(cached(folder, part, revision)) for part in part_names(name)]
    if not is_gguf(path):
        raise OptionError.of("gguf_file", "a GGUF file", str(path), "its first bytes are no GGUF file's")
    return path
