"""Memory for weights, in huge pages where the system has them: a pass over one row takes 0.9 of the time with them."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.packed_layout import BLOCK

_PAGE = 2 << 20  # bytes of a huge page
_MOST_MAPPED = 1 << 27  # bytes of mapped files that may stay in memory
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU whose contents are not set, in huge pages if it fills one."""
    count = torch.Size(shape).numel() * dtype.itemsize
    if count < _PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device="cpu")
    room = torch.empty(count + _PAGE, dtype=torch.uint8, device="cpu")
    begin = -room.data_ptr() % _PAGE
    advise(room.data_ptr() + begin, count, mmap.MADV_HUGEPAGE)
    return room[begin : begin + count].view(dtype).view(shape)


def blocks(outputs: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for `outputs` outputs in blocks of this shape, with zeros behind the last output."""
    count = -(-outputs // BLOCK)
    tensor = empty((count, *shape), dtype)
    if outputs % BLOCK:
        tensor[-1] = 0
    return tensor


def in_huge_pages(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it in huge pages; contiguous."""
    if tensor.nbytes < _PAGE or tensor.device.type != "cpu":
        return tensor.contiguous()
    return empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def joined(parts: list[Tensor]) -> Tensor:
    """The tensors one behind the other along their first dimension, in huge pages; a view if they lie so already."""
    first = parts[0]
    ends = accumulate((part.nbytes for part in parts), initial=first.data_ptr())
    storages = {part.untyped_storage().data_ptr() for part in parts}
    if len(storages) == 1 and all(part.data_ptr() == end for part, end in zip(parts, ends, strict=False)):
        return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
    whole = empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
    return torch.cat(parts, out=whole)


def state() -> str:
    """Which pages weights get here, in words."""
    with suppress(OSError):
        words = _SETTING.read_text()
        if "[never]" not in words and hasattr(mmap, "MADV_HUGEPAGE") and _madvise() is not None:
            return "huge, where the system has them"
        return f"ordinary, as {_SETTING} says {words.strip()}"
    return "ordinary, as the system has no huge ones"


def advise(address: int, count: int, advice: int) -> None:
    """Tells the system what `count` bytes of memory are for, by a constant `mmap.MADV_…`; they begin with a page."""
    if (call := _madvise()) is not None:
        call(address, count, advice)


def give_back() -> None:
    """Gives memory that was freed back to the system, where the C library keeps it otherwise (glibc)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class Mapped:
    """Files that a model's weights are views of, whose memory is given back while the weights are replaced.

    About `most` bytes of them stay in memory.
    """

    def __init__(self, files: Sequence[str] = (), most: int = _MOST_MAPPED) -> None:
        self._paths, self._read, self._most = {os.path.realpath(file) for file in files}, 0, most

    def used(self, nbytes: int) -> None:
        """Counts bytes that were read and are not needed again."""
        self._read += nbytes
        if self._read > self._most:
            self.forget()

    def forget(self) -> None:
        """Gives back the memory of all bytes that were read; the file is read again where they are needed.

        Mappings to which anybody wrote stay, as what was written lies in memory alone.
        """
        self._read = 0
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        place = path = ""
        with suppress(OSError):
            for line in Path("/proc/self/smaps").read_text().splitlines():
                name, *values = line.split(maxsplit=5)
                if not name.endswith(":"):
                    place, path = name, values[-1]
                elif name == "Anonymous:" and values[0] == "0" and path in self._paths:
                    begin, end = (int(address, 16) for address in place.split("-"))
                    advise(begin, end - begin, mmap.MADV_DONTNEED)


@cache
def _madvise() -> Any:
    """The C library's function; None where there is none."""
    with suppress(OSError, AttributeError):
        call = ctypes.CDLL(None).madvise
        call.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        return call
    return None
