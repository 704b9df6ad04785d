"""The container of a GGUF file: its keys as Python values, and its tensors as views into the mapped file.

The package gguf has a reader too, which takes eight seconds for the vocabulary of a usual file, as it keeps every
string's parts; this one takes a tenth of a second. The blocks' types and sizes come from that package.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from specdec.errors import LoadError, OptionError, UnsupportedError

_NUMBERS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8", 12: "f8"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q").unpack_from
_MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in the file, with the attributes of the package gguf's `ReaderTensor`.

    `tensor_type`: a `gguf.GGMLQuantizationType`. `shape`: as the file has it, the length of a row first.
    `data`: a view of the mapped file, [..., rows, values] of numbers, or [..., rows, bytes] of blocks.
    """

    name: str
    tensor_type: Any
    shape: tuple[int, ...]
    data: Any


class GgufReader:
    """A GGUF file: `keys`, and `tensors` by name; where it has several parts, `path` is the first, whose keys count.

    Lists of numbers are numpy arrays, lists of strings are lists. Raises LoadError, which says what is wrong, for a
    broken or cut file and for parts that are missing; UnsupportedError for versions and types that nobody writes;
    OptionError for another part than `part`, which counts from 0.
    """

    def __init__(self, path: str | PathLike[str], part: int = 0) -> None:
        self.path, self._part = str(path), part
        if not Path(path).stat().st_size:
            raise self._broken("it is empty")
        self._bytes = np.memmap(path, mode="c")  # torch takes no memory that is read-only
        self._raw, self._at = memoryview(self._bytes.data), 0
        try:
            self._read()
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise self._broken(f"its header ends or breaks at byte {self._at} ({error})") from error

    def _read(self) -> None:
        magic, version, count, keys = self._unpack("<4sIQQ")
        if magic != b"GGUF":
            raise self._broken("its first bytes are no GGUF file's")
        if version not in (2, 3):
            raise UnsupportedError(f"{self.path} has version {version} of GGUF, and 2 and 3 are read: convert it anew")
        self.keys: dict[str, Any] = {}
        for _ in range(keys):
            name = self._string()
            self.keys[name] = self._value(self._unpack("<I")[0])
        if (number := self.keys.get("split.no", 0)) != self._part:
            raise OptionError(
                f"{self.path} is part {number + 1}, and part {self._part + 1} is expected: name that file"
            )
        descriptions = [self._description() for _ in range(count)]
        alignment = int(self.keys.get("general.alignment", 32))
        start = -(-self._at // alignment) * alignment
        self.tensors: dict[str, StoredTensor] = {}
        for description in descriptions:
            self.tensors[description[0]] = self._tensor(*description, start)
        if self._part == 0 and self.keys.get("split.count", 1) > 1:
            self._read_other_parts()

    def _read_other_parts(self) -> None:
        """Reads the other parts, which lie beside the first under the names that llama.cpp gives them."""
        names = part_names(self.path)
        absent = [name for name in names if not Path(name).exists()]
        if absent or len(names) != self.keys["split.count"]:
            lack = f"{', '.join(absent)} is missing" if absent else f"its name does not say so ({_PARTS.pattern})"
            raise LoadError(
                f"{self.path} is the first of {self.keys['split.count']} parts, and {lack}: put all parts into one "
                "folder, under the names with which they were written"
            )
        for part, name in enumerate(names[1:], 1):
            self.tensors |= GgufReader(name, part).tensors
        if (count := self.keys.get("split.tensors.count", len(self.tensors))) != len(self.tensors):
            raise self._broken(f"its {len(names)} parts have {len(self.tensors)} tensors, and not {count}")

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._raw, self._at)
        self._at += struct.calcsize(form)
        return values

    def _string(self) -> str:
        (length,) = _LENGTH(self._raw, self._at)
        start = self._at + 8
        self._at = start + length
        if self._at > len(self._raw):
            raise IndexError("a string is longer than the file")
        return str(self._raw[start : self._at], "utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, length = self._unpack("<IQ")
            if inner in _NUMBERS:
                return self._numbers(inner, length)
            if length > len(self._raw):
                raise IndexError("a list is longer than the file")
            item = self._string if inner == _STRING else partial(self._value, inner)
            return [item() for _ in range(length)]
        if kind not in _NUMBERS:
            raise IndexError(f"a value has the unknown type {kind}")
        return self._numbers(kind, 1)[0].item()

    def _numbers(self, kind: int, length: int) -> Any:
        dtype = np.dtype(_NUMBERS[kind]).newbyteorder("<")
        end = self._at + length * dtype.itemsize
        if end > len(self._raw):
            raise IndexError("a list is longer than the file")
        start, self._at = self._at, end
        return np.frombuffer(self._raw[start:end], dtype)

    def _description(self) -> tuple[str, tuple[int, ...], int, int]:
        name, (dimensions,) = self._string(), self._unpack("<I")
        if dimensions > _MOST_DIMENSIONS:
            raise IndexError(f"tensor {name} has {dimensions} dimensions")
        return name, self._unpack(f"<{dimensions}Q"), *self._unpack("<IQ")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int) -> StoredTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        if kind not in {member.value for member in GGMLQuantizationType}:
            raise UnsupportedError(
                f"tensor {name} of {self.path} has type {kind}, which the package gguf does not know"
            )
        tensor_type = GGMLQuantizationType(kind)
        values, size = GGML_QUANT_SIZES[tensor_type]
        row = shape[0] if shape else 1
        if row % values:
            raise self._broken(f"the rows of tensor {name} have {row} values, which {tensor_type.name} cannot hold")
        begin, length = start + offset, prod(shape) // values * size
        if begin + length > len(self._bytes):
            raise self._broken(
                f"tensor {name} ends at byte {begin + length}, and the file has {len(self._bytes)}: it was cut"
            )
        raw = self._bytes[begin : begin + length]
        numbers = _PLAIN.get(tensor_type.name)
        data = raw.view(numbers) if numbers is not None else raw
        last = row if numbers is not None else row // values * size
        return StoredTensor(name, tensor_type, shape, data.reshape(*reversed(shape[1:]), last))

    def _broken(self, reason: str) -> LoadError:
        return LoadError(f"{self.path} is no readable GGUF file: {reason}; download or make it again")


_open: WeakValueDictionary[tuple[str, int, int], GgufReader] = WeakValueDictionary()


def open_gguf(path: Path) -> GgufReader:
    """The reader of a file, the same one while anybody holds it: a header with a vocabulary takes long to read."""
    state = path.stat()
    key = str(path), state.st_size, state.st_mtime_ns
    return _open.get(key) or _open.setdefault(key, GgufReader(path))


def part_names(path: str) -> list[str]:
    """The names of all parts of a file whose first part is `path`; `path` alone for a file in one part."""
    first = _PARTS.fullmatch(path)
    return [f"{first[1]}-{part:05}-of-{first[2]}.gguf" for part in range(1, int(first[2]) + 1)] if first else [path]


_PARTS = re.compile(r"(.*)-00001-of-(\d{5})\.gguf")
_PLAIN = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
"""Types that numpy has."""


def floats(tensor: StoredTensor) -> Any:
    """The numbers of a tensor in float32, as the package gguf unpacks them; shape reversed, rows last but one."""
    from gguf.quants import dequantize

    if tensor.tensor_type.name == "F32":
        return np.array(tensor.data, np.float32)  # not the file itself
    unpack: Callable[..., Any] = dequantize
    return np.asarray(unpack(np.asarray(tensor.data), tensor.tensor_type), np.float32)
