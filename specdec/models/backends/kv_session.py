"""Sessions over plain keys and values: rows share passes, ragged or padded, and rollback is free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from specdec.core.drafts import Chained, ChainRule
from specdec.core.rounds import VOID_COLUMNS
from specdec.core.tree import EMPTY, Tree
from specdec.core.work import Logits, Work
from specdec.errors import OptionError, UnsupportedError
from specdec.models.backends.cross_attention import CrossAttention
from specdec.models.backends.outputs import LogitNodes, padded_logits, ragged_logits
from specdec.models.backends.ragged import RaggedForward
from specdec.models.backends.ragged_inputs import RaggedInputs, RowNodes, StepInputs
from specdec.models.backends.ragged_model import Buffers
from specdec.models.cache.buffers import KvBuffers, Prefix
from specdec.models.cache.layout import AttentionView, ColumnMap, Layout
from specdec.models.cache.session import Session, check_paths, check_works
from specdec.models.encoding import Encoding
from specdec.models.hf.private_api import TAKES_MASKS, attention_of, hidden_states_of
from specdec.models.hf.spec import ModelSpec

_OPTIONS = {"use_cache": True, "return_dict": True}
_NODES = 64  # nodes whose computation takes as long as reading the weights


@dataclass(eq=False, slots=True)
class _Row:
    """A row: its number, the columns of its nodes, and the tree of its last pass."""

    number: int
    columns: ColumnMap = field(default_factory=ColumnMap)
    tree: Tree = EMPTY


class KvSession(Session):
    """Rows of one model over `KvBuffers`; branches of a row share the columns of its text.

    Dead branches leave void columns behind, which are compacted now and then. With a `backend` the new nodes of all
    rows share a ragged pass. A padded pass covers the rows of the buffers from the first to the last that take part, as
    a narrow view of a buffer costs nothing.
    """

    keeps_prefixes = True

    def __init__(self, language: ModelSpec, backend: RaggedForward | None) -> None:
        self.passes = 0
        self.cache_reset_length = language.capability.cache_reset_length
        self.buffers = KvBuffers(
            language.num_layers,
            column_bytes=language.kv_bytes,
            lazy=language.device.type == "cpu",
            held=lambda: max((row.columns.top for row in self._rows), default=0),
        )
        self._rows: list[_Row] = []  # by their index in the buffers
        self._index: dict[int, int] = {}  # number of a row -> its index
        self._numbers = 0
        self._language, self._backend = language, backend
        self._device, self._dtype = language.device, language.dtype
        self._like = torch.empty(0, dtype=language.dtype, device=language.device)
        self._cross = CrossAttention(language) if language.is_encoder_decoder else None
        self._can_keep = "logits_to_keep" in language.input_names
        # Whether the library's own positions and causal mask are right for a chain after a text.
        self._is_simple = (
            self._cross is None
            and backend is None
            and language.capability.boundary is None
            and not language.forgets_order
        )

    def add(self, rows: int, encoding: Encoding | None = None) -> list[int]:
        if (self._cross is None) != (encoding is None) or (encoding is not None and len(encoding) != rows):
            need = "None, the model has no encoder" if self._cross is None else f"the encoding of {rows} rows"
            raise OptionError.of("encoding", need, None if encoding is None else f"{len(encoding)} rows")
        self.buffers.reserve(len(self._rows) + rows)
        if self._cross is not None and encoding is not None:
            self._cross.add(encoding)
        return [self._new(ColumnMap()) for _ in range(rows)]

    @torch.no_grad()
    def fork(self, row: int, length: int | None = None) -> int:
        source = self._row(row)
        if length is not None and source.columns.base < length <= source.columns.length:
            self._move([(self._index[row], *move) for move in source.columns.compact(-1)])
        columns = source.columns.copy() if length is None else ColumnMap(base=length, top=length)
        if length is not None and length > source.columns.base:
            raise OptionError.of("length", f"at most the {source.columns.base} tokens that the row holds", length)
        index = len(self._rows)
        self.buffers.reserve(index + 1)
        self.buffers.copy_row(self._index[row], index, columns.top)
        if self._cross is not None:
            self._cross.fork(self._index[row])
        columns.initial_length = source.columns.initial_length
        number = self._new(columns)
        self._rows[-1].tree = source.tree if length is None else EMPTY
        return number

    @torch.no_grad()
    def read_from(self, prefix: Prefix, length: int) -> int:
        index = len(self._rows)
        self.buffers.reserve(index + 1)
        self.buffers.write_prefix(index, prefix, length)
        return self._new(ColumnMap(base=length, top=length))

    @torch.no_grad()
    def keep_prefix(self, row: int, length: int) -> Prefix:
        source = self._row(row)
        if length > source.columns.base:
            self._move([(self._index[row], *move) for move in source.columns.compact(-1)])
        return self.buffers.read_prefix(self._index[row], length)

    @torch.no_grad()
    def remove(self, rows: Sequence[int]) -> None:
        """Moves the last row of the buffers into each gap."""
        for row in rows:
            index, last = self._index.pop(self._row(row).number), self._rows.pop()
            if last.number != row:
                self.buffers.copy_row(len(self._rows), index, last.columns.top)
                self._rows[index], self._index[last.number] = last, index
            if self._cross is not None:
                self._cross.remove(index)
            self.buffers.clear_row(len(self._rows))
        self.buffers.shrink(len(self._rows))

    def length(self, row: int) -> int:
        return self._row(row).columns.length

    def pending(self, row: int) -> int:
        return self._row(row).columns.pending

    def run(
        self, works: Sequence[Work], *, hidden: bool | Sequence[int] = False, attentions: bool = False
    ) -> list[Logits]:
        """One pass; several if passes are padded and rows lie far apart."""
        if self._is_simple and len(works) == 1 and works[0].embeds is None and not (hidden or attentions):
            row, work = self._row(works[0].row), works[0]
            if (
                not (row.columns.scattered or work.num_cached)
                and work.tree.is_chain
                and 0 <= work.num_logits <= len(work.tree) > 0
            ):
                return [self._chain_pass(row, work)]
        with torch.no_grad():
            return self._general(works, hidden, attentions)

    def _chain_pass(self, row: _Row, work: Work) -> Logits:
        """The pass of one row over a chain after its text, which needs no layout."""
        row.tree = work.tree
        row.columns.begin(work.tree, work.first, work.text_length)
        self.buffers.point(self._index[row.number], row.columns.base, len(work.tree))
        ids = torch.tensor([work.tree.tokens], device=self._device)
        inputs: dict[str, Any] = {"input_ids": ids, "past_key_values": self.buffers} | _OPTIONS
        if self._can_keep:
            inputs["logits_to_keep"] = work.num_logits or 1
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            logits = self._language.model(**inputs).logits[0]
        self.passes += 1
        kept = logits if len(logits) == work.num_logits else logits[len(logits) - work.num_logits :]
        return Logits(work, kept, passes=(self.passes,))

    def _general(self, works: Sequence[Work], hidden: bool | Sequence[int], attentions: bool) -> list[Logits]:
        """A pass over rows and trees of any shape."""
        rows = [self._row(work.row) for work in works]
        check_works(works, [row.columns.pending for row in rows])
        if attentions:
            self._language.check_attentions()
        parts: dict[int, RowNodes] = {}
        for row, work in zip(rows, works, strict=True):
            row.tree = work.tree
            if work.num_new:
                row.columns.begin(work.tree, work.first, work.text_length)
                row_index = self._index[row.number]
                parts[row_index] = RowNodes(row_index, row.columns, work)
        if self._cross is not None and parts:
            self._cross.project()
        ragged, found = self._backend, dict[int, Logits]()
        takes = ragged is not None and all(
            (part.work.embeds is None) != ragged.model.reads_embeds for part in parts.values()
        )
        if ragged is not None and takes and parts and not attentions:
            found = self._ragged(ragged, list(parts.values()), hidden)
        elif parts:
            if self._language.is_strict:
                raise UnsupportedError(
                    "`exactness`='strict' takes no embeddings and returns no attentions: leave them out"
                )
            states = hidden_states_of(hidden)
            extras = {"output_hidden_states": states} if states else {}
            extras |= {"output_attentions": True} if attentions else {}
            for first, last in self._spans(parts):
                found |= self._padded(parts, first, last, extras)
        return [found.get(work.row) or self._no_logits(work) for work in works]

    def _no_logits(self, work: Work) -> Logits:
        return Logits(work, self._like.new_empty(0, self._language.vocab_size))

    def commit(
        self, rows: Sequence[int], paths: Sequence[list[int]], *, texts: Sequence[int] | None = None, final: bool = True
    ) -> None:
        """O(1) where the kept nodes begin a chain; otherwise moves columns, now or later."""
        check_paths(rows, paths, texts)
        moves = []
        for i, (number, path) in enumerate(zip(rows, paths, strict=True)):
            row = self._row(number)
            text = len(path) if texts is None else texts[i]
            row.columns.keep(row.tree, path, text)
            row.tree = EMPTY if text == len(path) else row.tree.part(path, text)
            if row.columns.scattered:
                moves += [(self._index[number], *move) for move in row.columns.compact(VOID_COLUMNS)]
        self._move(moves)

    @property
    def draft_chains(self) -> bool:  # type: ignore[override]
        return self._backend is not None and self._backend.draft_chains

    @torch.no_grad()
    def draft_chain(
        self,
        rows: Sequence[int],
        texts: Sequence[list[int]],
        rules: Sequence[ChainRule],
        embeds: Sequence[Tensor] | None = None,
    ) -> Chained | None:
        """Needs compiled passes, and rows that hold text alone."""
        ragged, named, trees = self._backend, [self._row(row) for row in rows], [*map(Tree.chain, texts)]
        if ragged is None or not self.draft_chains or any(row.columns.scattered for row in named):
            return None
        for row, tree in zip(named, trees, strict=True):
            row.columns.begin(tree, len(tree) - 1, 0)
        if self._cross is not None:
            self._cross.project()
        row_indices, kinds = [self._index[row] for row in rows], self._language.capability.kinds
        begins = [row.columns.top + len(text) for row, text in zip(named, texts, strict=True)]
        for row_index, begin, rule in zip(row_indices, begins, rules, strict=True):
            self.buffers.extend(row_index, begin + rule.most - 1)
        nodes = [
            RowNodes(row_index, row.columns, Work(row.number, tree))
            for row_index, row, tree in zip(row_indices, named, trees, strict=True)
        ]
        inputs = RaggedInputs.of(nodes, kinds, self._device, self._encoders(row_indices))
        if embeds is not None:
            inputs = replace(inputs, ids=torch.cat(list(embeds))[None])
        steps = StepInputs.of(row_indices, begins, max(rule.most for rule in rules) - 1, kinds)
        chained = ragged.draft_chain(inputs, steps, rules, *self._pairs(ragged))
        self.passes += max(map(len, chained.guesses))
        for row, begin, guesses in zip(named, begins, chained.guesses, strict=True):
            row.columns.base = row.columns.top = begin + len(guesses) - 1
            row.tree = EMPTY
        return chained

    def refresh(self, rows: Sequence[int]) -> None:
        if self.cache_reset_length is None:
            return
        for row in map(self._row, rows):
            if row.columns.initial_length <= self.cache_reset_length <= row.columns.extent:
                row.columns, row.tree = ColumnMap(), EMPTY

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        moves = []
        for number, length in zip(rows, lengths, strict=True):
            row = self._row(number)
            if length < row.columns.length:
                row.tree = EMPTY
                moves += [(self._index[number], *move) for move in row.columns.cut(length)]
        self._move(moves)

    @property
    def bytes(self) -> int:
        return self.buffers.bytes + (0 if self._cross is None else self._cross.buffers.bytes)

    def bound(self, rows: int, columns: int) -> None:
        self.buffers.bound(rows, columns)

    def _new(self, columns: ColumnMap) -> int:
        self._numbers += 1
        self._index[self._numbers] = len(self._rows)
        self._rows.append(_Row(self._numbers, columns))
        return self._numbers

    def _row(self, number: int) -> _Row:
        if number not in self._index:
            raise OptionError.of("rows", f"rows of this session, {sorted(self._index)}", number)
        return self._rows[self._index[number]]

    def _spans(self, parts: dict[int, RowNodes]) -> list[tuple[int, int]]:
        """Spans `(first, last)` of rows in the buffers; each is one padded pass."""
        order = sorted(parts)
        if len(order) == 1:
            return [(order[0], order[0])]
        if self._cross is None:
            return self._cheapest(order, parts)
        kinds = [(self._cross.kind(index), index - i) for i, index in enumerate(order)]  # equal for neighbours
        groups = groupby(zip(order, kinds, strict=True), key=lambda pair: pair[1])
        return [span for _, group in groups for span in self._cheapest([index for index, _ in group], parts)]

    def _cheapest(self, order: list[int], parts: dict[int, RowNodes]) -> list[tuple[int, int]]:
        """The spans that cover these rows at the least cost, in bytes read (dynamic programming over their ends).

        A pass reads the weights, and for each row of its span the keys and values of the longest, and computes the
        nodes of the widest. No span writes padding beyond the bounds of the buffers.
        """
        room = math.inf if self.buffers.bounds is None else self.buffers.bounds[1]
        weights, column = self._language.weight_bytes, self._language.kv_bytes
        tops, nodes = [parts[index].columns.top for index in order], [parts[index].work.num_new for index in order]
        reach = [top + size for top, size in zip(tops, nodes, strict=True)]
        idle = [max((row.columns.top for row in self._rows[i + 1 : j]), default=0) for i, j in pairwise(order)]

        def padded(rows: int, longest: int, widest: int) -> float:
            return rows * (longest * column + widest * weights / _NODES)

        needed = sum(padded(1, *own) for own in zip(reach, nodes, strict=True))
        if not order:
            return []
        in_one = padded(order[-1] - order[0] + 1, max(reach + idle), max(nodes))
        if in_one - needed <= weights and max(tops + idle) + max(nodes) <= room:
            return [(order[0], order[-1])]
        best: list[tuple[float, int]] = [(0.0, 0)]  # cost of the first rows, and where their last span begins
        for end in range(1, len(order) + 1):
            top = longest = widest = 0
            options: list[tuple[float, int]] = []
            for begin in reversed(range(end)):
                between = idle[begin] if begin < end - 1 else 0
                longest, widest = max(longest, reach[begin], between), max(widest, nodes[begin])
                top = max(top, tops[begin], between)
                if options and top + widest > room:
                    break
                cost = weights + padded(order[end - 1] - order[begin] + 1, longest, widest)
                options.append((best[begin][0] + cost, begin))
            best.append(min(options))
        spans = []
        end = len(order)
        while end:
            begin = best[end][1]
            spans.append((order[begin], order[end - 1]))
            end = begin
        return spans[::-1]

    def _ragged(
        self, ragged: RaggedForward, rows: Sequence[RowNodes], hidden: bool | Sequence[int]
    ) -> dict[int, Logits]:
        """One ragged pass over the new nodes of all rows."""
        works, row_indices = [row.work for row in rows], [row.row_index for row in rows]
        for row in rows:
            self.buffers.extend(row.row_index, row.columns.top + row.work.num_new)
        kinds, encoders = self._language.capability.kinds, self._encoders(row_indices)
        if all(len(row.work.tree) == row.work.num_logits == 1 and row.columns.top for row in rows):
            tokens, columns = [work.tree.tokens[0] for work in works], [row.columns.top for row in rows]
            inputs = RaggedInputs.next(row_indices, columns, tokens, kinds, self._device, encoders)
        else:
            inputs = RaggedInputs.of(rows, kinds, self._device, encoders)
        if ragged.model.reads_embeds:
            inputs = replace(inputs, ids=torch.cat([work.embeds for work in works if work.embeds is not None])[None])
        logits, states = ragged(inputs, *self._pairs(ragged), hidden)
        self.passes += 1
        return {out.work.row: out for out in ragged_logits(logits, states or None, works, self.passes)}

    def _encoders(self, row_indices: Iterable[int]) -> list[list[int]] | None:
        """What these rows of the buffers see of their encoders."""
        return None if self._cross is None else [self._cross.seen(row_index) for row_index in row_indices]

    def _pairs(self, ragged: RaggedForward) -> tuple[Buffers, Buffers]:
        """Buffers of the text, and of the encoders' projections."""
        return self.buffers.pairs(ragged.widths, self._like), () if self._cross is None else self._cross.buffers.pairs()

    def _padded(self, parts: dict[int, RowNodes], first: int, last: int, extras: dict[str, Any]) -> dict[int, Logits]:
        """One padded pass over the rows `first` to `last` of the buffers; those without a part are padding."""
        here = [parts.get(index) or self._idle(index) for index in range(first, last + 1)]
        works = [part.work for part in here]
        layout = Layout.of([work.tree for work in works], [part.columns for part in here], self._device)
        if layout.view is None and layout.nodes > 1 and self._language.forgets_order:
            layout = replace(layout, view=layout.causal())
        kept = LogitNodes.of(layout, [work.num_logits for work in works])
        self.buffers.prepare(layout, first)
        inputs = self._inputs(works, layout) | extras
        if self._cross is not None:
            inputs |= self._cross.inputs(first, first + len(works), self.buffers)
        if self._can_keep:
            inputs["logits_to_keep"] = kept.argument(self._device)
        output = self._run(inputs, layout)
        self.passes += 1
        found = padded_logits(output, works, layout, kept, self.passes, sliced=self._can_keep, extras=bool(extras))
        return {out.work.row: out for out in found}

    def _idle(self, row_index: int) -> RowNodes:
        """A row within a span that has nothing to do."""
        row = self._rows[row_index]
        pending = row.columns.pending
        tree = row.tree.part(range(pending)) if pending else EMPTY
        return RowNodes(row_index, row.columns, Work(row.number, tree, 0, num_cached=pending))

    def _move(self, moves: list[tuple[int, int, int]]) -> None:
        if moves:
            self.buffers.move_columns(*(list(part) for part in zip(*moves, strict=True)))

    def _inputs(self, works: Sequence[Work], layout: Layout) -> dict[str, Any]:
        inputs: dict[str, Any] = {"past_key_values": self.buffers} | _OPTIONS
        padded = [work.new_tokens + [0] * (layout.nodes - work.num_new) for work in works]
        ids = torch.tensor(padded, device=self._device)
        prefix = "" if self._cross is None else "decoder_"
        if any(work.embeds is not None for work in works):
            inputs["inputs_embeds"] = self._embed(ids, works)
        else:
            inputs[prefix + "input_ids"] = ids
        if layout.view is not None:
            self._add_view(inputs, layout.view, prefix)
        return inputs

    def _add_view(self, inputs: dict[str, Any], view: AttentionView, prefix: str) -> None:
        language, capability = self._language, self._language.capability
        if (attention := attention_of(language.model.config)) not in TAKES_MASKS:
            raise UnsupportedError(
                f"attention {attention!r} takes no mask, which trees and rows of different lengths need: "
                'load the model with attn_implementation="sdpa"'
            )
        masks = {kind.name: view.mask(kind, self._dtype) for kind in capability.kinds}
        inputs[prefix + "attention_mask"] = masks if capability.masks == "dict" else next(iter(masks.values()))
        name = {"ids": "position_ids", "decoder_ids": "decoder_position_ids"}.get(capability.positions)
        if name is not None:
            inputs[name] = view.positions

    def _embed(self, ids: Tensor, works: Sequence[Work]) -> Tensor:
        if self._cross is not None:
            raise UnsupportedError(
                "an encoder-decoder takes embeddings in its encoder, not in its decoder: leave `embeds` out"
            )
        hidden = self._language.model.get_input_embeddings()(ids).clone()
        for row, work in enumerate(works):
            if work.embeds is not None:
                hidden[row, : work.embeds.shape[0]] = work.embeds.to(hidden)
        return hidden

    def _run(self, inputs: dict[str, Any], layout: Layout) -> Any:
        language, view = self._language, layout.view
        context: AbstractContextManager[None] = nullcontext()
        if language.capability.boundary is not None:
            context = language.scaled(layout.spans())
        elif view is not None:
            context = language.looked_up(view.positions, view.key_positions)
        with context:
            return language.model(**inputs)
