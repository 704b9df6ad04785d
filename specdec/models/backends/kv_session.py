"""Sessions over plain keys and values: rows share passes, ragged or padded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.core.drafts import Chained, ChainRule
from specdec.core.tree import EMPTY, Tree
from specdec.core.work import Logits, Work
from specdec.errors import UnsupportedError
from specdec.models.backends.padded import OPTIONS, PaddedPasses
from specdec.models.backends.ragged import RaggedForward
from specdec.models.backends.ragged_inputs import RaggedInputs, RowNodes, StepInputs
from specdec.models.backends.ragged_model import Buffers
from specdec.models.cache.kv_cache import KvCache, Row
from specdec.models.cache.session import Session, check_works
from specdec.models.capability import ModelSpec
from specdec.models.hf.private_api import hidden_states_of


class KvSession(KvCache, Session):
    """A `KvCache` and its passes: with a `backend` the new nodes of all rows share a ragged one, else a padded one."""

    def __init__(self, language: ModelSpec, backend: RaggedForward | None) -> None:
        super().__init__(language)
        self._language, self._ragged = language, backend
        self._padded = PaddedPasses(language, self)
        self._can_keep = "logits_to_keep" in language.input_names
        self._like = torch.empty(0, dtype=language.dtype, device=language.device)
        # Whether the library's own positions and causal mask are right for a chain after a text.
        self._is_simple = (
            self.cross is None
            and backend is None
            and language.capability.boundary is None
            and not language.forgets_order
        )

    def run(
        self, works: Sequence[Work], *, hidden: bool | Sequence[int] = False, attentions: bool = False
    ) -> list[Logits]:
        """One pass; several if passes are padded and rows lie far apart."""
        if self._is_simple and len(works) == 1 and not (hidden or attentions):
            [work] = works
            row, nodes = self.row(work.row), len(work.tree.tokens)
            is_text = not (row.columns.scattered or work.num_cached or work.embeds is not None or work.pictures)
            if is_text and nodes and 0 <= work.num_logits <= nodes and work.tree.is_chain:
                return [self._chain(row, work, nodes)]
        with torch.no_grad():
            return self._general(works, hidden, attentions)

    def _chain(self, row: Row, work: Work, nodes: int) -> Logits:
        """The padded pass of one row over a chain after its text, which needs no layout."""
        language, columns = self._language, row.columns
        row.tree = work.tree
        if not columns.top:
            columns.begin(work.tree, nodes - work.num_logits, work.text_length)
        self.buffers.point(row.index, columns.base, nodes)
        # numpy reads a list in a third of torch's time
        ids = torch.from_numpy(np.array([work.tree.tokens])).to(language.device)
        inputs: dict[str, Any] = {"input_ids": ids, "past_key_values": self.buffers} | OPTIONS
        if language.sees:
            begin = columns.base + columns.shift
            inputs["position_ids"] = torch.arange(begin, begin + nodes, device=language.device)[None]
        if self._can_keep:
            inputs["logits_to_keep"] = work.num_logits or 1
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            logits = language.model(**inputs).logits[0]
        self.passes += 1
        more = logits.shape[0] - work.num_logits
        return Logits(work, logits[more:] if more else logits, passes=(self.passes,))

    def _general(self, works: Sequence[Work], hidden: bool | Sequence[int], attentions: bool) -> list[Logits]:
        rows = [self.row(work.row) for work in works]
        check_works(works, [row.columns.pending for row in rows])
        if attentions:
            self._language.check_attentions()
        parts, seen = dict[int, RowNodes](), dict[int, Logits]()
        states = hidden_states_of(hidden)
        extras = {"output_hidden_states": states} if states else {}
        for row, work in zip(rows, works, strict=True):
            row.tree = work.tree
            if work.pictures is not None:
                more = {"output_attentions": True} if attentions else {}
                seen[work.row] = self._padded.see(row, work, extras | more)
            elif work.num_new:
                row.columns.begin(work.tree, work.first, work.text_length)
                parts[row.index] = RowNodes(row.index, row.columns, work)
        if self.cross is not None and parts:
            self.cross.project()
        ragged, found = self._ragged, dict[int, Logits]()
        given = [part.work.embeds is not None for part in parts.values()]
        if ragged is not None and parts and not attentions and all(one == ragged.model.reads_embeds for one in given):
            found = self._run_ragged(ragged, list(parts.values()), hidden)
        elif parts:
            if self._language.is_strict:
                raise UnsupportedError(
                    "`exactness`='strict' takes no embeddings and returns no attentions: leave them out"
                )
            extras |= {"output_attentions": True} if attentions else {}
            found = self._padded.run(parts, extras)
        found |= seen
        return [found.get(work.row) or self._no_logits(work) for work in works]

    def _no_logits(self, work: Work) -> Logits:
        return Logits(work, self._like.new_empty(0, self._language.vocab_size))

    def _run_ragged(
        self, ragged: RaggedForward, rows: Sequence[RowNodes], hidden: bool | Sequence[int]
    ) -> dict[int, Logits]:
        works, row_indices = [row.work for row in rows], [row.row_index for row in rows]
        for row in rows:
            self.buffers.extend(row.row_index, row.columns.top + row.work.num_new)
        kinds, encoders = self._language.capability.kinds, self._encoders(row_indices)
        if all(len(row.work.tree) == row.work.num_logits == 1 and row.columns.top for row in rows):
            tokens, columns = [work.tree.tokens[0] for work in works], [row.columns.top for row in rows]
            shifts = [row.columns.shift for row in rows]
            inputs = RaggedInputs.next(row_indices, columns, shifts, tokens, kinds, self._language.device, encoders)
        else:
            inputs = RaggedInputs.of(rows, kinds, self._language.device, encoders)
        if ragged.model.reads_embeds:
            inputs = replace(inputs, ids=torch.cat([work.embeds for work in works if work.embeds is not None])[None])
        logits, states = ragged(inputs, *self._pairs(ragged), hidden)
        self.passes += 1
        found, begin, kept = dict[int, Logits](), 0, 0
        for work in works:
            end, own = begin + work.num_new, logits[kept : kept + work.num_logits]
            hidden_states = tuple(None if layer is None else layer[begin:end] for layer in states) or None
            found[work.row] = Logits(work, own, hidden_states=hidden_states, passes=(self.passes,))
            begin, kept = end, kept + work.num_logits
        return found

    def _encoders(self, row_indices: Iterable[int]) -> list[list[int]] | None:
        return None if self.cross is None else [self.cross.seen(row_index) for row_index in row_indices]

    def _pairs(self, ragged: RaggedForward) -> tuple[Buffers, Buffers]:
        """Buffers of the text, and of the encoders' projections."""
        return self.buffers.pairs(
            ragged.model.widths, self._like
        ), () if self.cross is None else self.cross.buffers.pairs()

    @property
    def draft_chains(self) -> bool:  # type: ignore[override]
        return self._ragged is not None and self._ragged.draft_chains

    @torch.no_grad()
    def draft_chain(
        self,
        rows: Sequence[int],
        texts: Sequence[list[int]],
        rules: Sequence[ChainRule],
        embeds: Sequence[Tensor] | None = None,
    ) -> Chained | None:
        """Needs compiled passes, and rows that hold text alone."""
        ragged, named, trees = self._ragged, [self.row(row) for row in rows], [*map(Tree.chain, texts)]
        if ragged is None or not self.draft_chains or any(row.columns.scattered for row in named):
            return None
        for row, tree in zip(named, trees, strict=True):
            row.columns.begin(tree, len(tree) - 1, 0)
        if self.cross is not None:
            self.cross.project()
        row_indices, kinds = [row.index for row in named], self._language.capability.kinds
        begins = [row.columns.top + len(text) for row, text in zip(named, texts, strict=True)]
        for row_index, begin, rule in zip(row_indices, begins, rules, strict=True):
            self.buffers.extend(row_index, begin + rule.most - 1)
        nodes = [
            RowNodes(row_index, row.columns, Work(row.number, tree))
            for row_index, row, tree in zip(row_indices, named, trees, strict=True)
        ]
        inputs = RaggedInputs.of(nodes, kinds, self._language.device, self._encoders(row_indices))
        if embeds is not None:
            inputs = replace(inputs, ids=torch.cat(list(embeds))[None])
        shifts, most = [row.columns.shift for row in named], max(rule.most for rule in rules) - 1
        steps = StepInputs.of(row_indices, begins, shifts, most, kinds)
        chained = ragged.draft_chain(inputs, steps, rules, *self._pairs(ragged))
        self.passes += max(map(len, chained.guesses))
        for row, begin, guesses in zip(named, begins, chained.guesses, strict=True):
            row.columns.base = row.columns.top = begin + len(guesses) - 1
            row.tree = EMPTY
        return chained
