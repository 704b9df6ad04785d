"""The new nodes of one ragged pass: their ids, positions, and the columns that each node sees.

A node sees a range of its row's columns, and single columns after it. An int32 table `[1, 1, nodes, 4 + words]` lists,
as `specdec.kernels.attend` takes it: the row of the buffers, the node's own column, the first column of the range and
the one after its last, then a bit for each later column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.core.work import Work
from specdec.models.cache.layout import WORD, ColumnMap, NodePlaces
from specdec.models.protocols import AttentionKind

Buffers = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of each layer, `[rows, heads, columns, head width]`."""


class RowNodes(NamedTuple):
    """The work of one row: its row of the buffers, and its column map."""

    row_index: int
    columns: ColumnMap
    work: Work


class PassInputs(NamedTuple):
    """The inputs of a ragged pass: `ids` and `positions` `[1, nodes]`, and a table for each kind of layer.

    For models that read embeddings, `ids` are embeddings `[1, nodes, width]`. `last`: numbers of the nodes that the
    last layer computes to its end; `logit_nodes`: places in `last` of the nodes with logits, at least one. `encoders`:
    one table of visible encoder positions, or nothing. `buffers` hold the text, `frames` the encoders' projections.
    `state_nodes[i]`: numbers of the nodes whose hidden state i is returned, all or none.
    """

    ids: Tensor
    positions: Tensor
    logit_nodes: Tensor
    tables: Sequence[Tensor]
    encoders: Sequence[Tensor]
    last: Tensor
    buffers: Buffers = ()
    frames: Buffers = ()
    state_nodes: Sequence[Tensor] = ()

    @classmethod
    def of(
        cls,
        rows: Sequence[RowNodes],
        kinds: Sequence[AttentionKind],
        device: torch.device,
        encoders: Sequence[list[int]] | None = None,
    ) -> PassInputs:
        """All nodes of these rows, one row after the other; `encoders[i]` is what row i sees of its encoder."""
        sizes, with_logits = [row.work.num_new for row in rows], list[int]()
        if all(len(row.work.tree) == row.work.num_logits == 1 and row.columns.top for row in rows):
            steps = StepInputs.of(rows, [row.columns.top for row in rows], 1, kinds)
            positions, tables = steps.positions[0], [table[0] for table in steps.tables]
        else:
            parts = [NodePlaces.of(row.columns, row.work.tree) for row in rows]
            shifted = [part.positions + row.columns.shift for part, row in zip(parts, rows, strict=True)]
            width = max(part.ancestors.shape[1] for part in parts)
            pairs = [(row.row_index, part) for row, part in zip(rows, parts, strict=True)]
            arrays = [np.concatenate([_table(*pair, kind, width) for pair in pairs]) for kind in kinds]
            positions = torch.from_numpy(np.concatenate(shifted)[None])
            tables = [torch.from_numpy(table[None, None]) for table in arrays]
        for row, end in zip(rows, accumulate(sizes), strict=True):
            with_logits += range(end - row.work.num_logits, end)
        return cls(
            torch.tensor([[token for row in rows for token in row.work.new_tokens]], device=device),
            positions.to(device),
            torch.tensor(with_logits or [sum(sizes) - 1], device=device),
            [table.to(device) for table in tables],
            [] if encoders is None else [_cross(sizes, encoders).to(device)],
            torch.arange(sum(sizes), device=device),
        )

    @property
    def tensors(self) -> list[Tensor]:
        pairs = (side for pair in (*self.buffers, *self.frames) for side in pair)
        first = self.ids, self.positions, self.logit_nodes
        return [*first, *self.tables, *self.encoders, *pairs, *self.state_nodes, self.last]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Passes over one more token per row: `positions` `[passes, 1, rows]`, tables `[passes, 1, 1, rows, 4]`."""

    positions: Tensor
    tables: list[Tensor]

    @classmethod
    def of(
        cls, rows: Sequence[RowNodes], columns: Sequence[int], passes: int, kinds: Sequence[AttentionKind]
    ) -> StepInputs:
        """The first tokens of these rows go to these columns."""
        at = np.arange(passes)[:, None] + np.array(columns)
        row_numbers = np.broadcast_to(np.array([row.row_index for row in rows]), at.shape)
        tables = [np.stack([row_numbers, at, np.minimum(kind.first_seen(at), at + 1), at + 1], 2) for kind in kinds]
        stacked = [torch.from_numpy(table.astype(np.int32)[:, None, None]) for table in tables]
        return cls(torch.from_numpy((at + np.array([row.columns.shift for row in rows]))[:, None]), stacked)


def _table(row_index: int, nodes: NodePlaces, kind: AttentionKind, width: int) -> np.ndarray:
    """The table `[nodes, 4 + words]` of a row's nodes, with bits for `width` columns."""
    words = -(-width // WORD)
    table = np.zeros((len(nodes.columns), 4 + words), dtype=np.int32)
    first = kind.first_seen(nodes.positions)
    table[:, 0], table[:, 1] = row_index, nodes.columns
    table[:, 2], table[:, 3] = np.minimum(first, nodes.base), nodes.base
    if count := nodes.ancestors.shape[1]:
        bits = np.zeros((len(table), words * WORD), dtype=bool)
        bits[:, :count] = nodes.ancestors & (nodes.depth >= first[:, None])
        table[:, 4:] = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return table


def _cross(sizes: Sequence[int], encoders: Sequence[list[int]]) -> Tensor:
    """What every node sees of its row's encoder: `[1, 1, nodes, 4 + words]`."""
    width = max(map(len, encoders))
    lines = torch.tensor([columns + [0] * (width - len(columns)) for columns in encoders], dtype=torch.int32)
    return lines.repeat_interleave(torch.tensor(sizes), dim=0)[None, None]
