"""From the output of one pass to the logits of each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.core.work import Logits, Work
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


def padded_logits(
    output: Any,
    works: Sequence[Work],
    layout: Layout,
    kept: LogitNodes,
    number: int,
    *,
    sliced: bool,
    extras: bool = False,
    frames: Sequence[int] = (),
) -> list[Logits]:
    """The output of padded pass `number` for every row; `sliced`: logits are those of the kept nodes only.

    `extras`: the output has hidden states or attentions. `frames`: how many positions of its encoder each row sees.
    """
    logits: Tensor = output.logits
    index = {node: i for i, node in enumerate(kept.nodes)} if sliced else None
    found = []
    for row, work in enumerate(works):
        first, size = kept.first[row], layout.sizes[row]
        begin = first if index is None or first == size else index[first]
        more = _extras(output, layout, row, frames) if extras else {}
        own = logits[row, begin : begin + size - first]
        found.append(Logits(work, own, passes=(number,) if size else (), **more))
    return found


def ragged_logits(
    logits: Tensor, hidden: tuple[Tensor | None, ...] | None, works: Sequence[Work], number: int
) -> list[Logits]:
    """The output of ragged pass `number` for every row, from logits `[kept, vocab]` and hidden states `[nodes,
    width]`.
    """
    found, begin, kept = [], 0, 0
    for work in works:
        end = begin + work.num_new
        own = logits[kept : kept + work.num_logits]
        states = hidden and tuple(None if layer is None else layer[begin:end] for layer in hidden)
        found.append(Logits(work, own, hidden_states=states, passes=(number,)))
        begin, kept = end, kept + work.num_logits
    return found


def _extras(output: Any, layout: Layout, row: int, frames: Sequence[int]) -> dict[str, Any]:
    size, columns = layout.sizes[row], layout.row_columns(row)
    extras: dict[str, Any] = {}
    hidden = output.get("hidden_states") or output.get("decoder_hidden_states")
    attentions = output.get("attentions") or output.get("decoder_attentions")
    if hidden:
        extras["hidden_states"] = tuple(None if layer is None else layer[row, :size] for layer in hidden)
    if attentions:
        extras["attentions"] = tuple(layer[row, :, :size, columns] for layer in attentions)
    if output.get("cross_attentions"):
        extras["cross_attentions"] = tuple(layer[row, :, :size, : frames[row]] for layer in output["cross_attentions"])
    return extras
