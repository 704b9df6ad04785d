"""The places of weights on disk, and reading them."""

from __future__ import annotations

import json
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from transformers.modeling_utils import str_to_torch_dtype

from specdec import kernels
from specdec.errors import LoadError
from specdec.models.hf.device_hooks import weight_source
from specdec.models.hf.load_errors import what_is_wrong
from specdec.models.hf.load_hook import with_bar
from specdec.models.hf.private_api import module_names

ALIGNED = 64  # bytes; kernels round differently at other addresses


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: its first byte, dtype and shape."""

    path: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def of(self, data: Tensor) -> Tensor:
        """The tensor over its bytes `[nbytes]`, uncopied."""
        return data.view(self.dtype).view(self.shape)


def aligned(nbytes: int) -> int:
    """Bytes up to the next address at which a weight may begin."""
    return -(-nbytes // ALIGNED) * ALIGNED


class Files:
    """Open files, read by position by one thread at a time; closed with the last reference."""

    def __init__(self) -> None:
        self._open: dict[str, BinaryIO] = {}
        weakref.finalize(self, _close, self._open)

    def read(self, path: str, offset: int, into: memoryview) -> None:
        """Fills `into` from `offset` on; raises LoadError if that fails."""
        try:
            file = self._open.get(path) or self._open.setdefault(path, open(path, "rb", buffering=0))  # noqa: SIM115
            file.seek(offset)
            done = 0
            while done < len(into):
                count = file.readinto(into[done:])  # type: ignore[attr-defined]
                if not count:
                    raise LoadError(f"{path} ends after {offset + done} bytes, in a weight: download or save it again")
                done += count
        except OSError as error:
            raise LoadError(f"weights cannot be read from {path} ({error}): is the disk still there?") from error


def read_tensors(path: str, mapped: Set[str] = frozenset()) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name, read into new memory, in huge pages where the system has them.

    Tensors of one name in neighbouring modules lie side by side; tensors in `mapped` are views of the file.
    """
    places, groups = _header(path), defaultdict[tuple[str, str], list[str]](list)
    for name in places.keys() - mapped:
        module, _, leaf = name.rpartition(".")
        groups[module.rpartition(".")[0], leaf].append(name)

    def read(names: list[str]) -> dict[str, Tensor]:
        names = sorted(names, key=lambda name: places[name].offset)
        *begins, size = accumulate((aligned(places[name].nbytes) for name in names), initial=0)
        room, files = kernels.empty_pages((size,), torch.uint8), Files()
        tensors = dict[str, Tensor]()
        for name, begin in zip(names, begins, strict=True):
            data = room[begin : begin + places[name].nbytes]
            files.read(path, places[name].offset, data.numpy().data)
            tensors[name] = places[name].of(data)
        return tensors

    whole = torch.from_file(path, shared=False, size=os.path.getsize(path), dtype=torch.uint8)
    mapped_places = {name: places[name] for name in mapped & places.keys()}
    tensors = {name: stored.of(whole[stored.offset :][: stored.nbytes]) for name, stored in mapped_places.items()}
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # most of the time goes into new pages
        read_groups = pool.map(read, groups.values())
        for _ in with_bar(groups.keys(), "Loading weights"):
            tensors |= next(read_groups)
    return tensors


def write_tensors(path: Path, tensors: Mapping[str, Callable[[], Tensor]], check: Callable[[], object]) -> None:
    """Writes a safetensors file, one tensor after the other, without a copy of them all; calls `check` before each.

    Every function of `tensors` is called twice, and its tensor may lie elsewhere the second time; raises LoadError if
    the tensor has another dtype or shape then.
    """
    words = {dtype: word for word, dtype in str_to_torch_dtype.items()}
    ordered = sorted(tensors.items(), key=lambda item: -item[1]().element_size())  # so that all of them are aligned
    header, end = dict[str, Any](__metadata__={"format": "pt"}), 0
    for name, get in ordered:
        tensor, start = get(), end
        end += tensor.nbytes
        header[name] = {"dtype": words[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, get in ordered:
            check()
            tensor = get().contiguous()
            if (words[tensor.dtype], list(tensor.shape)) != (header[name]["dtype"], header[name]["shape"]):
                raise LoadError(f"the weight {name} was changed while it was written")
            file.write(tensor.view(-1).view(torch.uint8).numpy().data)
            get()  # raises if it was changed meanwhile
        file.flush()
        os.fsync(file.fileno())


def _close(files: dict[str, BinaryIO]) -> None:
    for file in files.values():
        file.close()


def by_module(model: Any, files: Sequence[str]) -> dict[str, dict[str, Stored]]:
    """The tensors of a checkpoint's files by the names of the model's modules, then by the tensors' last names."""
    stored = defaultdict[str, dict[str, Stored]](dict)
    for file in files:
        for name, tensor in _header(file).items():
            module, _, leaf = name.rpartition(".")
            stored[module][leaf] = tensor
    return {place: stored[name] for name, place in module_names(model, stored).items()}


def find(model: nn.Module) -> dict[str, Stored]:
    """The places on disk of parameters and buffers that accelerate will load from there, by name.

    Raises LoadError if accelerate lacks the weight, or a file holds it in another shape.
    """
    header, places = cache(_header), dict[str, Stored]()
    keys: dict[int, set[str]] = {}  # a loader's id -> its keys
    tensors = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors:
        if not tensor.is_meta or (place := weight_source(model, name)) is None:
            continue  # in memory, or not managed by accelerate
        loader, key = place
        if (entry := getattr(loader, "index", {}).get(key)) is not None:
            places[name] = _stored(key, entry, header, tensor)
        elif key not in keys.setdefault(id(loader), set(loader)):
            raise LoadError(
                f"weight {name!r} should lie on disk, and no file has it, as it is no part of the checkpoint: give its "
                "module a place in memory in `device_map`, or pass `offload`='disk' instead"
            )
    return places


def _stored(
    key: str, entry: Mapping[str, Any], header: Callable[[str], Mapping[str, Stored]], tensor: Tensor
) -> Stored:
    """The place of `tensor` in a checkpoint's file, checked against the model's shape."""
    path, name = entry["safetensors_file"], entry.get("weight_name", key)
    stored = header(path).get(name)
    if stored is None:
        raise LoadError(f"{path} has no weight {name!r} of a known type: download or save it again")
    if stored.shape != tuple(tensor.shape):
        raise LoadError(
            f"weight {key!r} has shape {list(stored.shape)} in {path}, the model expects {list(tensor.shape)}: "
            "the checkpoint's files do not belong together; download or save it again"
        )
    return stored


def _header(path: str) -> Mapping[str, Stored]:
    """The tensors of a safetensors file: https://huggingface.co/docs/safetensors."""
    if (fault := what_is_wrong(Path(path))) is not None:
        raise LoadError(f"{path} {fault}: download or save it again")
    with open(path, "rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        entries: dict[str, Any] = json.loads(file.read(start - 8))
    entries.pop("__metadata__", None)
    return {
        name: Stored(path, start + entry["data_offsets"][0], str_to_torch_dtype[entry["dtype"]], tuple(entry["shape"]))
        for name, entry in entries.items()
        if entry["dtype"] in str_to_torch_dtype
    }
