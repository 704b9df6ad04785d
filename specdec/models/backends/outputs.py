"""From the output of one pass to the scores of each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.core.tree import Scores, Tree
from specdec.models.backends.ragged_inputs import RowNodes
from specdec.models.cache.layout import Layout


@dataclass(frozen=True, slots=True)
class LogitNodes:
    """The padded nodes whose logits are needed: the sorted union over rows; those of row r start at `first[r]`."""

    nodes: list[int]
    first: list[int]
    last: bool

    @classmethod
    def of(cls, layout: Layout, keep: Sequence[int]) -> LogitNodes:
        """The union of the last `keep` nodes of every row, never empty, as transformers takes 0 for all."""
        first = [size - kept for size, kept in zip(layout.sizes, keep, strict=True)]
        if len(first) == 1 and keep[0]:
            return cls(list(range(first[0], layout.nodes)), first, True)
        union: set[int] = set()
        for begin, size in set(zip(first, layout.sizes, strict=True)):
            union.update(range(begin, size))
        nodes = sorted(union) or [layout.nodes - 1]
        return cls(nodes, first, nodes[0] == layout.nodes - len(nodes))

    def argument(self, device: torch.device) -> int | Tensor:
        """`logits_to_keep`: a count if the nodes are the last ones, otherwise their indices."""
        return len(self.nodes) if self.last else torch.tensor(self.nodes, device=device)


def row_scores(
    output: Any,
    trees: Sequence[Tree],
    layout: Layout,
    kept: LogitNodes,
    number: int,
    *,
    sliced: bool,
    extras: bool = False,
) -> list[Scores]:
    """The scores of every row of padded pass `number`; `sliced`: logits are those of the kept nodes only.

    `extras`: the output has hidden states or attentions.
    """
    logits: Tensor = output.logits
    index = {node: i for i, node in enumerate(kept.nodes)} if sliced else None
    found = []
    for row, tree in enumerate(trees):
        first, size = kept.first[row], layout.sizes[row]
        begin = first if index is None or first == size else index[first]
        more = _extras(output, layout, row) if extras else {}
        num_cached = len(tree) - size
        own = logits[row, begin : begin + size - first]
        found.append(
            Scores(tree, num_cached + first, own, num_cached=num_cached, passes=(number,) if size else (), **more)
        )
    return found


def ragged_scores(
    logits: Tensor, hidden: tuple[Tensor | None, ...] | None, rows: Sequence[RowNodes], number: int
) -> list[Scores]:
    """The scores of every row of ragged pass `number`, from logits `[kept, vocab]` and hidden states `[nodes,
    width]`.
    """
    found, begin, kept = [], 0, 0
    for row in rows:
        end = begin + row.size
        own = logits[kept : kept + row.keep]
        states = hidden and tuple(None if layer is None else layer[begin:end] for layer in hidden)
        first = len(row.tree) - row.keep
        found.append(
            Scores(row.tree, first, own, num_cached=row.columns.pending, passes=(number,), hidden_states=states)
        )
        begin, kept = end, kept + row.keep
    return found


def _extras(output: Any, layout: Layout, row: int) -> dict[str, Any]:
    size, columns = layout.sizes[row], layout.row_columns(row)
    extras: dict[str, Any] = {}
    hidden = output.get("hidden_states") or output.get("decoder_hidden_states")
    attentions = output.get("attentions") or output.get("decoder_attentions")
    if hidden:
        extras["hidden_states"] = tuple(None if layer is None else layer[row, :size] for layer in hidden)
    if attentions:
        extras["attentions"] = tuple(layer[row, :, :size, columns] for layer in attentions)
    if output.get("cross_attentions"):
        extras["cross_attentions"] = tuple(layer[row, :, :size] for layer in output["cross_attentions"])
    return extras
