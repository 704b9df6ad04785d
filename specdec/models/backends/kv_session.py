"""Sessions over plain keys and values: rows share passes, ragged or padded.

Everything but `run` and `draft_chain` is in `KvCache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.core.drafts import Chained, ChainRule
from specdec.core.tree import EMPTY, Tree
from specdec.core.work import Logits, Work
from specdec.errors import UnsupportedError
from specdec.models.backends.padded import PaddedPasses
from specdec.models.backends.ragged import RaggedForward
from specdec.models.backends.ragged_inputs import PassInputs, RowNodes, StepInputs
from specdec.models.cache.kv_cache import KvCache
from specdec.models.hf.private_api import hidden_states_of
from specdec.models.protocols import ModelSpec


class KvSession(KvCache):
    """A `KvCache` and its passes: the new nodes of all rows share one, ragged if the model has ragged passes."""

    def __init__(self, language: ModelSpec, over: KvCache | None = None) -> None:
        super().__init__(language, over)
        self._padded = PaddedPasses(language, self)
        self._like = torch.empty(0, dtype=language.dtype, device=language.device)
        # Whether the library's own positions and causal mask are right for a chain after a text.
        self._is_simple = (
            self.cross is None
            and language.ragged is None
            and language.capability.boundary is None
            and language.capability.padding is None
            and not language.forgets_order
        )

    def run(
        self, works: Sequence[Work], *, hidden: bool | Sequence[int] = False, attentions: bool = False
    ) -> list[Logits]:
        """One pass; several if passes are padded and rows lie far apart."""
        if self._is_simple and len(works) == 1 and not (hidden or attentions):
            [work] = works
            row = self.row(work.row)
            is_text = not (row.columns.scattered or work.num_cached or work.embeds is not None or work.pictures)
            if is_text and work.tree.tokens and work.tree.is_chain:
                return [self._padded.chain(row, work)]
        with torch.no_grad():
            return self._general(works, hidden, attentions)

    def _general(self, works: Sequence[Work], hidden: bool | Sequence[int], attentions: bool) -> list[Logits]:
        rows = [self.row(work.row) for work in works]
        states = hidden_states_of(hidden)
        extras: dict[str, Any] = {"output_hidden_states": states} if states else {}
        if attentions:
            self._language.check_attentions()
            extras["output_attentions"] = True
        nodes, outputs = dict[int, RowNodes](), dict[int, Logits]()
        for row, work in zip(rows, works, strict=True):
            row.tree = work.tree
            if work.pictures is not None:
                outputs[work.row] = self._padded.run_with_pictures(row, work, extras)
            elif work.num_new:
                row.columns.begin(work)
                nodes[row.index] = RowNodes(row.index, row.columns, work)
        if self.cross is not None:
            self.cross.project(nodes)
        ragged, inputs = self._language.ragged, {row.work.embeds is not None for row in nodes.values()}
        if ragged is not None and not attentions and inputs == {ragged.model.reads_embeds}:
            outputs |= self._run_ragged(ragged, list(nodes.values()), hidden)
        elif nodes:
            if self._language.is_strict:
                raise UnsupportedError(
                    "`exactness`='strict' takes no embeddings and returns no attentions: leave them out"
                )
            outputs |= self._padded.run(nodes, extras)
        no_logits = self._like.new_empty(0, self._language.vocab_size)
        return [outputs.get(work.row) or Logits(work, no_logits) for work in works]

    def _run_ragged(
        self, ragged: RaggedForward, rows: Sequence[RowNodes], hidden: bool | Sequence[int]
    ) -> dict[int, Logits]:
        for row in rows:
            self.buffers.extend(row.row_index, row.columns.top + row.work.num_new)
        logits, states = ragged(self._inputs(ragged, rows), hidden)
        self.passes += 1
        outputs, begin, place = dict[int, Logits](), 0, 0
        for work in (row.work for row in rows):
            end, row_logits = begin + work.num_new, logits[place : place + work.num_logits]
            hidden_states = tuple(None if layer is None else layer[begin:end] for layer in states) or None
            outputs[work.row] = Logits(work, row_logits, hidden_states=hidden_states, passes=(self.passes,))
            begin, place = end, place + work.num_logits
        return outputs

    def _inputs(self, ragged: RaggedForward, rows: Sequence[RowNodes]) -> PassInputs:
        cross, language = self.cross, self._language
        encoders = None if cross is None else [cross.visible_frames(row.row_index) for row in rows]
        inputs = PassInputs.of(rows, language.capability.kinds, language.device, encoders)
        if ragged.model.reads_embeds:
            embeds = [row.work.embeds for row in rows if row.work.embeds is not None]
            inputs = inputs._replace(ids=torch.cat(embeds)[None])
        widths, frames = ragged.model.widths, [] if cross is None else cross.buffers.pairs()
        buffers = self.buffers.pairs(widths, self._like)  # more layers, if the session runs the rows of a deeper model
        return inputs._replace(buffers=buffers[: len(widths)], frames=frames[: len(widths)])

    @property
    def draft_chains(self) -> bool:  # type: ignore[override]
        ragged = self._language.ragged
        return ragged is not None and ragged.draft_chains

    @torch.no_grad()
    def draft_chain(
        self,
        rows: Sequence[int],
        texts: Sequence[list[int]],
        rules: Sequence[ChainRule],
        embeds: Sequence[Tensor] | None = None,
    ) -> Chained | None:
        """Needs recorded passes, and rows that hold text alone."""
        ragged, cache_rows = self._language.ragged, [self.row(row) for row in rows]
        if ragged is None or not ragged.draft_chains or any(row.columns.scattered for row in cache_rows):
            return None
        vectors: Sequence[Tensor | None] = embeds or [None] * len(rows)
        parts = zip(rows, texts, vectors, strict=True)
        works = [Work(row, Tree.chain(text), embeds=vector) for row, text, vector in parts]
        nodes = [RowNodes(row.index, row.columns, work) for row, work in zip(cache_rows, works, strict=True)]
        begins = [row.columns.top + len(text) for row, text in zip(cache_rows, texts, strict=True)]
        for row, work, begin, rule in zip(cache_rows, works, begins, rules, strict=True):
            row.columns.begin(work)
            self.buffers.extend(row.index, begin + rule.most - 1)
        if self.cross is not None:
            self.cross.project(row.index for row in cache_rows)
        most = max(rule.most for rule in rules) - 1
        steps = StepInputs.of(nodes, begins, most, self._language.capability.kinds)
        chained = ragged.draft_chain(self._inputs(ragged, nodes), steps, rules)
        self.passes += max(map(len, chained.guesses))
        for row, begin, guesses in zip(cache_rows, begins, chained.guesses, strict=True):
            row.columns.base = row.columns.top = begin + len(guesses) - 1
            row.tree = EMPTY
        return chained
