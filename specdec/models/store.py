"""Preallocated keys and values behind the library's cache protocol, written in place and rolled back by forgetting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specdec.models.layout import Layout

_FIRST_CAPACITY = 128  # tokens


class KvLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's buffers `[row capacity, heads, capacity, head width]`; keys and values may differ in width."""

    is_sliding = False
    is_compileable = False  # True would make the library build its static-cache masks
    is_croppable = True

    def __init__(self, store: KvStore) -> None:
        super().__init__()
        self.store = store
        self.buffers: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates zeros: whatever lay in a masked slot before could be NaN, and 0 * NaN is NaN."""
        rows, capacity = self.store.row_capacity, self.store.capacity
        self.buffers = tuple(  # type: ignore[assignment]
            t.new_zeros(rows, t.shape[1], capacity, t.shape[3]) for t in (key_states, value_states)
        )
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes this pass's columns and returns everything up to them, `[rows, heads, end, head width]`."""
        if self.buffers is None:
            self.lazy_initialization(key_states, value_states)
        store, rows = self.store, key_states.shape[0]
        # `narrow` costs half of what a slice does, and this runs twice per layer and pass.
        keys, values = (
            (buffer if buffer.shape[0] == rows else buffer[:rows]).narrow(2, 0, store.end)
            for buffer in self.buffers  # type: ignore[union-attr]
        )
        if store.slots is None:
            keys.narrow(2, store.start, store.end - store.start).copy_(key_states)
            values.narrow(2, store.start, store.end - store.start).copy_(value_states)
        else:
            row, slots = store.row_index(keys.device)
            keys[row, :, slots] = key_states.transpose(1, 2)
            values[row, :, slots] = value_states.transpose(1, 2)
        return keys, values

    def get_seq_length(self) -> int:
        """Tokens before this pass (the longest row's)."""
        return self.store.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Width and offset of a mask over the whole past; windows are expressed in the mask, never in the store."""
        return self.store.start + int(query_length), 0

    def get_max_length(self) -> int:
        """No limit: the store grows."""
        return -1

    def resize(self, rows: int, capacity: int) -> None:
        """Moves to larger buffers."""
        if self.buffers is None:
            return
        grown = []
        for old in self.buffers:
            new = old.new_zeros(rows, old.shape[1], capacity, old.shape[3])
            new[: old.shape[0], :, : old.shape[2]] = old
            grown.append(new)
        self.buffers = (grown[0], grown[1])


class KvStore(Cache):  # type: ignore[misc]
    """All layers of one session; `prepare` says where the next pass writes, everything else is O(1) or a gather."""

    def __init__(self, layers: int) -> None:
        self.row_capacity, self.capacity = 0, _FIRST_CAPACITY
        self.start = self.end = 0
        self.slots: Tensor | None = None
        self._row_index: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._flat: dict[tuple[int, int, int], list[Tensor]] = {}
        super().__init__(layers=[KvLayer(self) for _ in range(layers)])

    @classmethod
    def around(cls, buffers: Sequence[Tensor], slots: Tensor, end: int) -> KvStore:
        """A store of borrowed buffers (keys, values, keys, ...) for one pass that writes at `slots` `[rows, nodes]`."""
        store = cls(len(buffers) // 2)
        store.start, store.end, store.slots = end - slots.shape[1], end, slots
        for index, layer in enumerate(store.layers):
            layer.buffers, layer.is_initialized = (buffers[2 * index], buffers[2 * index + 1]), True
        return store

    def flat(self, rows: int, prepared: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """The first `rows` rows of all buffers (keys, values, keys, ...), `prepared` once until the buffers change."""
        key = (rows, self.row_capacity, self.capacity)
        if key not in self._flat:
            self._flat = {key: [prepared(buffer[:rows]) for layer in self.layers for buffer in layer.buffers or ()]}
        return self._flat[key]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hands one layer's new keys and values to its buffers."""
        return self.layers[layer_idx].update(key_states, value_states)

    def row_index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row `[rows, 1]` and slot `[rows, nodes]` of every node, on the device of a layer's buffers."""
        if device not in self._row_index:
            if self.slots is None:
                raise ValueError("every row starts at the same slot")
            rows = torch.arange(self.slots.shape[0], device=device)[:, None]
            self._row_index[device] = (rows, self.slots.to(device))
        return self._row_index[device]

    def prepare(self, layout: Layout) -> None:
        """Points the next pass at its slots; grows here, so that buffers never change inside a forward."""
        self.start, self.end, self.slots = layout.start, layout.end, layout.slots
        self._row_index = {}
        # Strictly larger: `end == capacity` is a special case that compiled code would specialise on.
        if self.end >= self.capacity:
            self._resize(self.row_capacity, max(2 * self.capacity, self.end + _FIRST_CAPACITY))

    def reserve_rows(self, rows: int, fresh_from: int) -> None:
        """Makes room for `rows` rows; those from `fresh_from` on start clean."""
        if rows > self.row_capacity:
            self._resize(rows, self.capacity)
        for layer in self.layers:
            for buffer in layer.buffers or ():
                buffer[fresh_from:rows].zero_()

    def move_columns(self, rows: list[int], sources: list[int], targets: list[int]) -> None:
        """Copies column `sources[i]` of `rows[i]` to column `targets[i]`, all reads before all writes."""
        self._each_buffer(_move_columns, rows, sources, targets)

    def copy_rows(self, sources: list[int], targets: list[int], columns: int) -> None:
        """Copies the first `columns` of row `sources[i]` to row `targets[i]`, all reads before all writes."""
        for layer in self.layers:
            for buffer in layer.buffers or ():
                buffer[targets, :, :columns] = buffer[sources, :, :columns]

    def _each_buffer(self, change: Any, *indices: Sequence[int]) -> None:
        placed: dict[torch.device, list[Tensor]] = {}
        for layer in self.layers:
            for buffer in layer.buffers or ():
                if buffer.device not in placed:
                    placed[buffer.device] = [torch.tensor(i, device=buffer.device) for i in indices]
                change(buffer, *placed[buffer.device])

    def _resize(self, rows: int, capacity: int) -> None:
        self.row_capacity, self.capacity = rows, capacity
        for layer in self.layers:
            layer.resize(rows, capacity)


def _move_columns(buffer: Tensor, rows: Tensor, sources: Tensor, targets: Tensor) -> None:
    buffer[rows, :, targets] = buffer[rows, :, sources]
