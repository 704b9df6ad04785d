"""Cross-attention of a session's rows: encoder outputs, projected once and shared by forked rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

from specdec.models.cache.buffers import KvBuffers
from specdec.models.cache.layout import visible_columns
from specdec.models.encoding import Encoding
from specdec.models.hf.private_api import CACHE
from specdec.models.protocols import ModelSpec


class Frames(DynamicLayer):  # type: ignore[misc]
    """One layer's projections `[rows, heads, frames, head width]`: as it has a length, layers project nothing anew."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True


class CrossAttention:
    """Encoder outputs and their projections, in buffers with one row per encoding; forked rows share one."""

    def __init__(self, language: ModelSpec) -> None:
        self._language = language
        self._encodings: list[Encoding] = []  # by their row of the buffers
        self.buffers = KvBuffers(
            language.num_layers,
            language.kv_bytes,
            language.device,
            lambda: max((encoding.hidden.shape[1] for encoding in self._encodings), default=0),
        )
        self.buffers.bound(0, 0)  # rows never grow: nothing is reserved for them
        self.encoder_rows: list[int] = []  # by the index of the row
        self._takes_mask = "attention_mask" in language.input_names
        self._pads = self._takes_mask and language.model.main_input_name == "input_ids"
        self._unprojected: set[int] = set()  # rows without projections
        self._selection: tuple[int, ...] = ()
        self._arguments: dict[str, Any] = {}
        self._frames: list[Frames] = []
        self._tables: dict[int, list[int]] = {}

    def add(self, encoding: Encoding) -> None:
        """Adds a row with its encoding."""
        encoder_row = len(self._encodings)
        self.buffers.reserve(encoder_row + 1)
        self._encodings.append(encoding)
        self.encoder_rows.append(encoder_row)
        self._unprojected.add(encoder_row)

    @torch.no_grad()
    def project(self, indices: Iterable[int]) -> None:
        """Projects the new encodings of these rows; encodings of equal length share a pass."""
        unprojected = self._unprojected.intersection(self.encoder_rows[index] for index in indices)
        if not unprojected:
            return
        rows_by_length: dict[int, list[int]] = {}
        for encoder_row in sorted(unprojected):
            rows_by_length.setdefault(self._encodings[encoder_row].hidden.shape[1], []).append(encoder_row)
        for frames, encoder_rows in rows_by_length.items():
            union = Encoding.joined([self._encodings[encoder_row] for encoder_row in encoder_rows])
            layers = self._language.project(union)
            for i, encoder_row in enumerate(encoder_rows):
                self.buffers.write_prefix(encoder_row, [(keys[i], values[i]) for keys, values in layers], frames)
        self._unprojected -= unprojected
        self._forget()  # buffers may have grown

    def fork(self, index: int) -> None:
        self.encoder_rows.append(self.encoder_rows[index])

    def remove(self, index: int) -> None:
        """Removes a row, whose index the last row takes, and its encoding if no other row reads it."""
        encoder_row, last = self.encoder_rows[index], self.encoder_rows.pop()
        if index < len(self.encoder_rows):
            self.encoder_rows[index] = last
        if encoder_row in self.encoder_rows:
            return
        last_row = len(self._encodings) - 1
        encoding = self._encodings.pop()
        self._unprojected.discard(encoder_row)
        if encoder_row != last_row:
            self.buffers.copy_row(last_row, encoder_row, encoding.hidden.shape[1])
            if last_row in self._unprojected:
                self._unprojected.remove(last_row)
                self._unprojected.add(encoder_row)
            self._encodings[encoder_row] = encoding
            self.encoder_rows = [encoder_row if row == last_row else row for row in self.encoder_rows]
        self.buffers.clear_row(last_row)
        self.buffers.shrink(last_row)
        self._forget()

    def frames(self, index: int) -> int:
        """Positions of the encoder's output that a row sees."""
        return self._encodings[self.encoder_rows[index]].hidden.shape[1]

    def kind(self, index: int) -> tuple[Any, ...]:
        """Rows can share a padded pass if their kinds are equal: frames of different lengths need a mask."""
        encoding = self._encodings[self.encoder_rows[index]]
        if self._pads and not encoding.fields:
            return ()
        return encoding.hidden.shape[1], encoding.mask is None, encoding.input_mask is None

    def inputs(self, first: int, last: int, text: KvBuffers) -> dict[str, Any]:
        """Arguments of a padded pass over rows `first` to `last - 1`, which are of one kind."""
        encoder_rows = tuple(self.encoder_rows[first:last])
        if encoder_rows != self._selection:
            encodings = [self._encodings[encoder_row] for encoder_row in encoder_rows]
            union = encodings[0] if len(encoder_rows) == 1 else Encoding.joined(encodings)
            self._selection, frames = encoder_rows, union.hidden.shape[1]
            self._arguments = {"encoder_outputs": union.output}
            if union.input_mask is not None and self._takes_mask:
                self._arguments["attention_mask"] = union.input_mask
            first = encoder_rows[0]
            is_range = encoder_rows == tuple(range(first, first + len(encoder_rows)))  # then a view costs nothing
            rows = slice(first, first + len(encoder_rows)) if is_range else list(encoder_rows)
            self._frames = [Frames(*(side[rows, :, :frames] for side in pair)) for pair in self.buffers.pairs()]
        return {**self._arguments, CACHE: EncoderDecoderCache(text, Cache(layers=self._frames))}

    def visible_frames(self, index: int) -> list[int]:
        """What nodes of this row see, as in the tables of `specdec.models.backends.ragged_inputs`."""
        encoder_row = self.encoder_rows[index]
        encoding = self._encodings[encoder_row]
        if encoding.mask is None:
            return [encoder_row, 0, 0, encoding.hidden.shape[1]]
        if encoder_row not in self._tables:
            self._tables[encoder_row] = visible_columns(encoding.mask[0].bool().cpu().numpy())
        return [encoder_row, 0, *self._tables[encoder_row]]

    def _forget(self) -> None:
        self._selection, self._arguments, self._frames, self._tables = (), {}, [], {}
