"""Padded passes over rows of the buffers, from the first to the last that takes part: a view of them costs nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.core.tree import EMPTY
from specdec.core.work import Logits, Work
from specdec.errors import UnsupportedError
from specdec.models.backends.ragged_inputs import RowNodes
from specdec.models.cache.kv_cache import CacheRow, KvCache
from specdec.models.cache.layout import Layout
from specdec.models.hf.private_api import CACHE, TAKES_MASKS, attention_of, per_layer
from specdec.models.protocols import ModelSpec

_OPTIONS = {"use_cache": True, "return_dict": True}
_NODES = 64  # nodes whose computation takes as long as reading the weights


class PaddedPasses:
    """Passes of the model's own code over a `KvCache`."""

    def __init__(self, language: ModelSpec, cache: KvCache) -> None:
        self._language, self._cache = language, cache
        self._logits_argument = language.logits_argument

    def chain(self, row: CacheRow, work: Work) -> Logits:
        """The pass of one row over a chain after its text, which needs no layout."""
        row.tree = work.tree
        row.columns.begin(work)
        self._cache.buffers.point(row.index, row.columns.base, len(work.tree.tokens))
        # numpy reads a list in a third of torch's time
        ids = torch.from_numpy(np.array([work.tree.tokens])).to(self._language.device)
        inputs: dict[str, Any] = {"input_ids": ids, CACHE: self._cache.buffers} | _OPTIONS
        if self._language.reads_media:
            begin = row.columns.base + row.columns.shift
            inputs["position_ids"] = torch.arange(begin, begin + len(work.tree), device=self._language.device)[None]
        if self._logits_argument:
            inputs[self._logits_argument] = work.num_logits or 1
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            logits = self._language.model(**inputs).logits[0]
        self._cache.passes += 1
        surplus = logits.shape[0] - work.num_logits
        return Logits(work, logits[surplus:] if surplus else logits, passes=(self._cache.passes,))

    def run_with_pictures(self, row: CacheRow, work: Work, extras: dict[str, Any]) -> Logits:
        """The pass over the beginning of one row's text with its pictures, by the model's own masks and positions."""
        pictures = work.pictures
        assert pictures is not None
        assert pictures.length == work.num_new
        row.columns.shift = pictures.shift
        self._cache.buffers.point(row.index, 0, pictures.length)
        last = {self._logits_argument: 1} if self._logits_argument else {}
        output = self._language.model(**pictures.inputs, **{CACHE: self._cache.buffers}, **_OPTIONS, **extras, **last)
        self._cache.passes += 1
        states = tuple(None if layer is None else layer[0] for layer in per_layer(output, "hidden_states")) or None
        attentions = tuple(layer[0, :, :, : pictures.length] for layer in per_layer(output, "attentions")) or None
        logits = output.logits[0, len(output.logits[0]) - work.num_logits :]
        return Logits(work, logits, hidden_states=states, attentions=attentions, passes=(self._cache.passes,))

    def run(self, rows: dict[int, RowNodes], extras: dict[str, Any]) -> dict[int, Logits]:
        """The outputs by row of one pass, or several where rows lie far apart; `extras`: arguments of the model."""
        outputs: dict[int, Logits] = {}
        for first, last in self._spans(rows):
            outputs |= self._padded(rows, first, last, extras)
        return outputs

    def _spans(self, rows: dict[int, RowNodes]) -> list[tuple[int, int]]:
        order = sorted(rows)
        if len(order) == 1:
            return [(order[0], order[0])]
        if self._cache.cross is None:
            return self._cheapest(order, rows)
        kinds = [(self._cache.cross.kind(index), index - i) for i, index in enumerate(order)]  # equal for neighbours
        groups = groupby(zip(order, kinds, strict=True), key=lambda pair: pair[1])
        return [span for _, group in groups for span in self._cheapest([index for index, _ in group], rows)]

    def _cheapest(self, order: list[int], rows: dict[int, RowNodes]) -> list[tuple[int, int]]:
        """Spans that cover these rows: each row joins the span before it where that costs fewer bytes to read.

        A pass reads the weights, and for each row of its span the keys and values of the longest, and computes the
        nodes of the widest. No span writes padding beyond the bounds of the buffers.
        """
        room = math.inf if self._cache.buffers.bounds is None else self._cache.buffers.bounds[1]
        weights, column = self._language.weight_bytes, self._language.kv_bytes

        def cost(first: int, last: int) -> float:
            """What a pass over these rows costs beside the weights; infinite beyond the bounds."""
            works = [rows[index].work.num_new if index in rows else 0 for index in range(first, last + 1)]
            tops, widest = [row.columns.top for row in self._cache.rows[first : last + 1]], max(works)
            if first < last and max(tops) + widest > room:
                return math.inf
            return len(works) * (max(map(sum, zip(tops, works, strict=True))) * column + widest * weights / _NODES)

        if cost(order[0], order[-1]) <= weights + sum(cost(index, index) for index in order):
            return [(order[0], order[-1])]
        spans: list[tuple[int, int]] = []
        for index in order:
            if spans and cost(spans[-1][0], index) <= weights + cost(*spans[-1]) + cost(index, index):
                spans[-1] = spans[-1][0], index
            else:
                spans.append((index, index))
        return spans

    def _padded(self, rows: dict[int, RowNodes], first: int, last: int, extras: dict[str, Any]) -> dict[int, Logits]:
        """One padded pass over the rows `first` to `last` of the buffers; rows without a work are padding."""
        span = []
        for index, row in enumerate(self._cache.rows[first : last + 1], first):
            span.append(rows.get(index) or RowNodes(index, row.columns, Work(row.number, EMPTY, 0)))
        works = [nodes.work for nodes in span]
        layout = Layout.of([work.tree for work in works], [nodes.columns for nodes in span], self._language.device)
        if layout.view is None and layout.nodes > 1 and self._language.forgets_order:
            layout = replace(layout, view=layout.causal())
        self._cache.buffers.prepare(layout, first)
        inputs, cross = self._inputs(works, layout) | extras, self._cache.cross
        if cross is not None:
            inputs |= cross.inputs(first, first + len(works), self._cache.buffers)
        nodes = list(range(layout.nodes))
        if self._logits_argument:
            sizes = {(work.num_new - work.num_logits, work.num_new) for work in works}
            # nodes with logits of any row; at least one, as transformers takes 0 for all
            nodes = sorted({node for begin, end in sizes for node in range(begin, end)}) or [layout.nodes - 1]
            is_end = nodes[0] == layout.nodes - len(nodes)
            inputs[self._logits_argument] = len(nodes) if is_end else torch.tensor(nodes, device=self._language.device)
        output = self._run(inputs, layout)
        self._cache.passes += 1
        outputs: dict[int, Logits] = {}
        for place, work in enumerate(works):
            begin = nodes.index(work.num_new - work.num_logits) if work.num_logits else 0
            logits, states = output.logits[place, begin : begin + work.num_logits], {}
            if extras:
                states = _extras(output, layout, place, None if cross is None else cross.frames(first + place))
            outputs[work.row] = Logits(work, logits, passes=(self._cache.passes,), **states)
        return outputs

    def _inputs(self, works: Sequence[Work], layout: Layout) -> dict[str, Any]:
        inputs: dict[str, Any] = {CACHE: self._cache.buffers} | _OPTIONS
        padded = [work.new_tokens + [0] * (layout.nodes - work.num_new) for work in works]
        ids = torch.tensor(padded, device=self._language.device)
        prefix = self._language.prefix
        if any(work.embeds is not None for work in works):
            inputs["inputs_embeds"] = self._embed(ids, works)
        else:
            inputs[prefix + "input_ids"] = ids
        capability = self._language.capability
        needs_positions = layout.view is not None or self._language.reads_media or capability.padding is not None
        if capability.positions == "ids" and needs_positions:
            inputs[prefix + "position_ids"] = capability.places(ids, layout.shifted())
        if layout.view is None:
            return inputs
        if (attention := attention_of(self._language.config)) not in TAKES_MASKS:
            raise UnsupportedError(
                f"attention {attention!r} takes no mask, which trees and rows of different lengths need: "
                'load the model with attn_implementation="sdpa"'
            )
        masks = {kind.name: layout.view.mask(kind, self._language.dtype) for kind in capability.kinds}
        inputs[prefix + "attention_mask"] = masks if capability.masks == "dict" else next(iter(masks.values()))
        return inputs

    def _embed(self, ids: Tensor, works: Sequence[Work]) -> Tensor:
        if self._cache.cross is not None:
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
            context = language.scaling(layout.spans())
        elif view is not None:
            context = language.lookup(view.positions, view.key_positions)
        with context:
            return language.model(**inputs)


def _extras(output: Any, layout: Layout, row: int, frames: int | None) -> dict[str, Any]:
    """Hidden states and attentions of a row, which sees `frames` positions of its encoder."""
    size, row_map = layout.sizes[row], layout.maps[row]
    columns = [*range(row_map.base), *row_map.scattered, *range(row_map.top, row_map.top + size)]
    extras = {
        "hidden_states": [None if layer is None else layer[row, :size] for layer in per_layer(output, "hidden_states")],
        "attentions": [layer[row, :, :size, columns] for layer in per_layer(output, "attentions")],
        "cross_attentions": [layer[row, :, :size, :frames] for layer in per_layer(output, "cross_attentions")],
    }
    return {name: tuple(layers) for name, layers in extras.items() if layers}
