"""Preallocated keys and values as a transformers cache: passes write in place, rollback only forgets."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from specdec.models.cache.layout import Layout
from specdec.models.protocols import Pair, Prefix
from specdec.options.versions import system_entries

_FIRST_CAPACITY = 128  # tokens
_LAZY_ROWS, _LAZY_COLUMNS = 16, 4160  # reserved where the system hands out pages on first write
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
_COLUMNS = 64  # kernels read so many at once where columns lie side by side
_PAGES = 2**20  # bytes from which on a buffer is mapped by itself
_SPARE_BYTES = 2**26  # buffers up to this size are kept when no row is left


def prefix_bytes(prefix: Prefix) -> int:
    return sum(side.nbytes for pair in prefix for side in pair)


class KvLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's buffers `[row capacity, heads, capacity, head width]`; keys and values may differ in width.

    As in its base class, masks are over the whole past: they express windows, buffers do not.
    """

    def __init__(self, parent: KvBuffers) -> None:
        super().__init__()
        self.parent = parent
        self.buffers: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates zeros, for states `[rows, heads, nodes, width]`: a masked NaN would still be NaN, as 0 * NaN is."""
        rows, capacity = self.parent.row_capacity, self.parent.capacity
        self.buffers = tuple(  # type: ignore[assignment]
            _zeros(t, rows, t.shape[1], capacity, t.shape[3]) for t in (key_states, value_states)
        )
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes the new columns; returns all columns up to them, `[rows, heads, end, head width]`."""
        if self.buffers is None:
            self.lazy_initialization(key_states.contiguous(), value_states.contiguous())
        parent, rows = self.parent, key_states.shape[0]
        # `narrow` costs half of what a slice does, and this runs twice per layer and pass.
        keys, values = (
            (buffer if buffer.shape[0] == rows else buffer.narrow(0, parent.first, rows)).narrow(2, 0, parent.end)
            for buffer in self.buffers  # type: ignore[union-attr]
        )
        if parent.columns is None:
            keys.narrow(2, parent.start, parent.end - parent.start).copy_(key_states)
            values.narrow(2, parent.start, parent.end - parent.start).copy_(value_states)
        else:
            row, columns = parent.rows.to(keys.device), parent.columns.to(keys.device)
            keys[row, :, columns] = key_states.transpose(1, 2)
            values[row, :, columns] = value_states.transpose(1, 2)
        return keys, values

    def get_seq_length(self) -> int:
        """Tokens of the longest row before this pass."""
        return self.parent.start


class KvBuffers(Cache):  # type: ignore[misc]
    """The buffers of all layers of a session; `prepare` sets where the next pass writes.

    Full buffers double, never beyond `bounds` (rows, columns) unless passes need more, and shrink when most of them is
    unused. On the CPU, buffers without bounds reserve far more than they use, so that they are seldom copied. A column
    takes `column_bytes` in all layers; `extent()` is one past the last column in use.
    """

    def __init__(self, layers: int, column_bytes: int, device: torch.device, extent: Callable[[], int]) -> None:
        self.row_capacity, self.capacity = 0, _FIRST_CAPACITY
        self._extent, self._column_bytes, self._lazy = extent, column_bytes, device.type == "cpu"
        self._allocated: list[int] = []  # per row, one past the last column that the system has handed out
        self.bounds: tuple[int, int] | None = None
        self.spare_bytes = _SPARE_BYTES
        self.first = self.start = self.end = 0
        self.columns: Tensor | None = None  # `[rows, nodes]`, beside `rows` `[rows, 1]`; None: from `start` on
        self._pairs: list[Pair] = []
        self._written: list[int] = []  # per row in use, one past the last column written
        super().__init__(layers=[KvLayer(self) for _ in range(layers)])

    @property
    def is_initialized(self) -> bool:
        """Whether the next pass continues a text: some models read the first tokens in both directions."""
        return self.start > 0

    @property
    def bytes(self) -> int:
        """Bytes of the buffers; on the CPU, of the pages that were written."""
        sizes = [buffer.nbytes for buffer in self._buffers()]
        total, is_lazy = sum(sizes), all(buffer.device.type == "cpu" for buffer in self._buffers())
        if not total or not is_lazy or min(sizes) < _PAGES:
            return total
        self._note_allocated()
        return total * sum(self._allocated) // (self.row_capacity * self.capacity)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """One layer's keys and values, with the states `[rows, heads, nodes, width]` of the new nodes written."""
        return self.layers[layer_idx].update(key_states, value_states)

    def prepare(self, layout: Layout, first: int) -> None:
        """Sets where the next pass writes, from row `first` on; buffers grow here, never inside a forward."""
        self.first, self.start, self.end, self.columns = first, layout.start, layout.end, layout.columns
        if self.columns is not None:
            self.rows = torch.arange(len(self.columns))[:, None]
        if self.end > self.capacity:
            self._widen(self.end)
        for row, columns_of_row in enumerate(layout.maps, first):
            self._written[row] = max(self._written[row], columns_of_row.top + layout.nodes)

    def point(self, row: int, start: int, nodes: int) -> None:
        """`prepare` for one row whose new nodes follow its text."""
        self.first, self.start, self.end, self.columns = row, start, start + nodes, None
        self.extend(row, self.end)

    def extend(self, row: int, end: int) -> None:
        """Makes room for the columns of a row up to `end`, which a pass will write."""
        if end > self.capacity:
            self._widen(end)
        self._written[row] = max(self._written[row], end)

    def pairs(self, widths: Sequence[tuple[int, int, int]] = (), like: Tensor | None = None) -> list[Pair]:
        """Keys and values of each layer; missing buffers are made.

        `widths`: heads of each layer and head widths of its keys and values; `like`: their dtype and device.
        """
        if not self._pairs:
            for layer, (heads, *sides) in zip(self.layers, widths, strict=False):
                if layer.buffers is None and like is not None:
                    layer.lazy_initialization(*(like.new_empty(1, heads, 0, side) for side in sides))
            self._pairs = [layer.buffers for layer in self.layers if layer.buffers is not None]
        return self._pairs

    def reserve(self, rows: int) -> None:
        if rows > self.row_capacity and self.bounds is not None:
            columns = min(self.capacity, max(self.bounds[1], self._extent()))
            self._resize(min(max(rows, 2 * self.row_capacity), max(rows, self.bounds[0])), columns)
        elif rows > self.row_capacity:
            self._resize(*self._ample(max(rows, 2 * self.row_capacity), self.capacity))
        self._written += [0] * (rows - len(self._written))

    def bound(self, rows: int, columns: int) -> None:
        self.bounds = (rows, columns)
        if self.row_capacity * self.capacity > rows * columns:
            capacity = min(self.capacity, max(columns, self._extent()))
            self._resize(min(self.row_capacity, max(rows, len(self._written))), capacity)

    def shrink(self, rows: int) -> None:
        """Shrinks buffers if at most a quarter of them is in use."""
        if not rows:
            if self.bytes > self.spare_bytes:
                for layer in self.layers:
                    layer.buffers, layer.is_initialized = None, False
                self._pairs, self.row_capacity, self.capacity = [], 0, _FIRST_CAPACITY
        elif self.bytes > self.spare_bytes and 4 * sum(self._written) * self._column_bytes <= self.bytes:
            self._resize(*self._ample(2 * rows, max(_FIRST_CAPACITY, self._extent())))

    def clear_row(self, row: int) -> None:
        """Zeros the last row, which a new row will reuse."""
        self._note_allocated()
        for buffer in self._buffers():
            buffer[row, :, : self._written[row]].zero_()
        del self._written[row:]  # a row that was reserved, and then could not be added, has an entry too

    def move_columns(self, rows: list[int], sources: list[int], targets: list[int]) -> None:
        """Copies column `sources[i]` of `rows[i]` to column `targets[i]`; reads all before it writes."""
        row, source, target = map(torch.tensor, (rows, sources, targets))
        for buffer in self._buffers():
            buffer[row, :, target] = buffer[row, :, source]

    def copy_row(self, source: int, target: int, columns: int) -> None:
        """Copies the first `columns` of a row over another one."""
        self._note_allocated()
        stale, self._written[target] = self._written[target], columns
        for buffer in self._buffers():
            buffer[target, :, :columns] = buffer[source, :, :columns]
            if stale > columns:
                buffer[target, :, columns:stale].zero_()

    def read_prefix(self, row: int, length: int) -> Prefix:
        """A copy of the first `length` columns of a row."""
        return [
            (keys[row, :, :length].clone(), values[row, :, :length].clone())
            for keys, values in (layer.buffers for layer in self.layers if layer.buffers is not None)
        ]

    def write_prefix(self, row: int, prefix: Prefix, length: int) -> None:
        """Writes the first `length` columns of a copy into a row."""
        self.extend(row, length)
        for layer, (keys, values) in zip(self.layers, prefix, strict=False):
            if layer.buffers is None:
                layer.lazy_initialization(keys[None], values[None])
            for buffer, source in zip(layer.buffers, (keys, values), strict=True):
                buffer[row, :, :length] = source[:, :length]

    def _buffers(self) -> list[Tensor]:
        return [buffer for layer in self.layers for buffer in layer.buffers or ()]

    def _widen(self, columns: int) -> None:
        rows, capacity = self.row_capacity, max(2 * self.capacity, columns + _FIRST_CAPACITY)
        if self.bounds is not None:
            rows = min(rows, max(len(self._written), self.bounds[0]))
            capacity = min(capacity, max(columns, self.bounds[1]))
        self._resize(*self._ample(rows, capacity))

    def _ample(self, rows: int, columns: int) -> tuple[int, int]:
        """This many rows and columns, or `_LAZY_ROWS` and `_LAZY_COLUMNS` where reserving them costs nothing."""
        lazy_rows, lazy_columns = max(rows, _LAZY_ROWS), max(columns, _LAZY_COLUMNS)
        size = lazy_rows * lazy_columns * self._column_bytes
        if self.bounds is not None or not (self._lazy and size) or 2 * size > free_bytes(torch.device("cpu")):
            return rows, columns
        try:
            mmap.mmap(-1, size, **_PRIVATE).close()
        except OSError:  # the system does not overcommit memory
            return rows, columns
        return lazy_rows, lazy_columns

    def _note_allocated(self) -> None:
        self._allocated += [0] * (self.row_capacity - len(self._allocated))
        for row, written in enumerate(self._written):
            self._allocated[row] = max(self._allocated[row], written)

    def _resize(self, rows: int, capacity: int) -> None:
        written, pairs = [min(columns, capacity) for columns in self._written], list[Any]()
        for layer in self.layers:
            pair = []
            for old in layer.buffers or ():
                pair.append(new := _zeros(old, rows, old.shape[1], capacity, old.shape[3]))
                for row, columns in enumerate(written[: min(rows, old.shape[0])]):
                    columns = min(old.shape[2], columns)
                    new[row, :, :columns] = old[row, :, :columns]
            pairs.append(tuple(pair) or None)
        for layer, buffers in zip(self.layers, pairs, strict=True):  # nothing has changed if memory ran out
            layer.buffers = buffers
        self.row_capacity, self.capacity, self._written, self._allocated, self._pairs = rows, capacity, written, [], []


def _zeros(like: Tensor, *shape: int) -> Tensor:
    """Zeros of this shape, with the dtype and device of `like`, column beside column if `like` lies so.

    On the CPU the system maps pages on first write, so that one long row does not make all wait for zeros.
    """
    if like.stride(2) < like.stride(3):
        *rows, columns, width = shape
        transposed = _zeros(like.transpose(2, 3), *rows, width, -(-columns // _COLUMNS) * _COLUMNS)
        return transposed.transpose(2, 3)[:, :, :columns]
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or size < _PAGES:
        return like.new_zeros(shape)
    return torch.frombuffer(mmap.mmap(-1, size, **_PRIVATE), dtype=like.dtype).view(shape)


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return 1024 * int(system_entries("/proc/meminfo")["MemAvailable"].split()[0])
    except (KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
