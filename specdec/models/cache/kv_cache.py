"""Rows over buffers of keys and values: rollback is free, and branches of a row share the columns of its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specdec.core.tree import EMPTY, Tree
from specdec.core.work import VOID_COLUMNS
from specdec.errors import DraftError, OptionError
from specdec.models.cache.buffers import KvBuffers
from specdec.models.cache.cross_attention import CrossAttention
from specdec.models.cache.layout import ColumnMap
from specdec.models.capability import kv_width
from specdec.models.encoding import Encoding
from specdec.models.protocols import ModelSpec, Prefix, Session


@dataclass(eq=False, slots=True)
class CacheRow:
    """A row: its number, its index in the buffers, the columns of its nodes, and the tree of its last pass."""

    number: int
    index: int
    columns: ColumnMap = field(default_factory=ColumnMap)
    tree: Tree = EMPTY


class KvCache(Session):
    """The rows of a session over `KvBuffers`, which `KvSession` runs; `passes` counts its passes.

    `over`: the session of a model whose first layers have the same keys and values, and whose rows this session runs.
    Dead branches leave void columns behind, which are compacted now and then.
    """

    keeps_prefixes = True
    buffers: KvBuffers
    cross: CrossAttention | None
    rows: list[CacheRow]  # by their index in the buffers
    _by_number: dict[int, CacheRow]

    def __init__(self, language: ModelSpec, over: KvCache | None = None) -> None:
        self.passes, self._language = 0, language
        self.cache_reset_length = language.capability.cache_reset_length
        if over is not None:
            layers = language.num_layers
            form, draft_form = (
                (spec.capability.cache_kind, spec.is_encoder_decoder, kv_width(spec.config, layers), spec.dtype)
                for spec in (over._language, language)
            )
            if form != draft_form or layers > over._language.num_layers:
                raise DraftError(
                    f"keys and values of the draft's model have another form than the target's ({draft_form}, {form}): "
                    "make the draft of this target"
                )
            self.buffers, self.cross, self.rows, self._by_number = over.buffers, over.cross, over.rows, over._by_number
            return
        self.buffers = KvBuffers(
            language.num_layers,
            language.kv_bytes,
            language.device,
            lambda: max((row.columns.top for row in self.rows), default=0),
        )
        self.cross = CrossAttention(language) if language.is_encoder_decoder else None
        self.rows, self._by_number, self._last_number = [], {}, 0

    def add(self, encoding: Encoding | None = None) -> int:
        self.buffers.reserve(len(self.rows) + 1)
        if self.cross is not None and encoding is not None:
            self.cross.add(encoding)
        return self._add_row(ColumnMap())

    @torch.no_grad()
    def fork(self, row: int, length: int) -> int:
        source, index = self._settled(row, length), len(self.rows)
        if length > source.columns.base:
            raise OptionError.of("length", f"at most the {source.columns.base} tokens that the row holds", length)
        self.buffers.reserve(index + 1)
        self.buffers.copy_row(source.index, index, length)
        if self.cross is not None:
            self.cross.fork(source.index)
        shift, initial_length = source.columns.shift, source.columns.initial_length
        return self._add_row(ColumnMap(base=length, top=length, initial_length=initial_length, shift=shift))

    @torch.no_grad()
    def read_from(self, prefix: Prefix, length: int, shift: int = 0) -> int:
        index = len(self.rows)
        self.buffers.reserve(index + 1)
        self.buffers.write_prefix(index, prefix, length)
        return self._add_row(ColumnMap(base=length, top=length, shift=shift))

    @torch.no_grad()
    def keep_prefix(self, row: int, length: int) -> Prefix:
        return self.buffers.read_prefix(self._settled(row, length).index, length)

    @torch.no_grad()
    def remove(self, rows: Sequence[int]) -> None:
        """Moves the last row of the buffers into each gap."""
        for row in map(self.row, rows):
            del self._by_number[row.number]
            last = self.rows.pop()
            if last is not row:
                self.buffers.copy_row(last.index, row.index, last.columns.top)
                self.rows[row.index], last.index = last, row.index
            if self.cross is not None:
                self.cross.remove(row.index)
            self.buffers.clear_row(len(self.rows))
        self.buffers.shrink(len(self.rows))

    def length(self, row: int) -> int:
        return self.row(row).columns.length

    def commit(
        self,
        rows: Sequence[int],
        paths: Sequence[list[int]],
        *,
        num_texts: Sequence[int] | None = None,
        final: bool = True,
    ) -> None:
        """O(1) where the kept nodes begin a chain; otherwise moves columns, now or later."""
        moves = []
        for i, (number, path) in enumerate(zip(rows, paths, strict=True)):
            row = self.row(number)
            num_text = len(path) if num_texts is None else num_texts[i]
            row.columns.keep(row.tree, path, num_text)
            row.tree = EMPTY if num_text == len(path) else row.tree.part(path, num_text)
            if row.columns.scattered:
                moves += [(row.index, *move) for move in row.columns.compact(VOID_COLUMNS)]
        self._move(moves)

    def refresh(self, rows: Sequence[int]) -> None:
        if self.cache_reset_length is None:
            return
        for row in map(self.row, rows):
            if row.columns.initial_length <= self.cache_reset_length <= row.columns.extent:
                row.columns, row.tree = ColumnMap(), EMPTY

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        moves = []
        for number, length in zip(rows, lengths, strict=True):
            row = self.row(number)
            if length < row.columns.length:
                row.tree = EMPTY
                moves += [(row.index, *move) for move in row.columns.cut(length)]
        self._move(moves)

    def bound(self, rows: int, columns: int) -> None:
        self.buffers.bound(rows, columns)
        if self.cross is not None and not rows:
            self.cross.buffers.bound(0, 0)

    def _add_row(self, columns: ColumnMap) -> int:
        self._last_number += 1
        row = self._by_number[self._last_number] = CacheRow(self._last_number, len(self.rows), columns)
        self.rows.append(row)
        return row.number

    def row(self, number: int) -> CacheRow:
        """The row of this number; OptionError if there is none."""
        if (row := self._by_number.get(number)) is None:
            raise OptionError.of("rows", f"rows of this session, {sorted(self._by_number)}", number)
        return row

    def _settled(self, number: int, length: int) -> CacheRow:
        """A row, with the first `length` tokens of its text in the columns of the same numbers."""
        row = self.row(number)
        if length > row.columns.base:
            self._move([(row.index, *move) for move in row.columns.compact(-1)])
        return row

    def _move(self, moves: list[tuple[int, int, int]]) -> None:
        if moves:
            self.buffers.move_columns(*(list(part) for part in zip(*moves, strict=True)))
