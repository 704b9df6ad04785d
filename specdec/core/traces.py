"""Hidden states and attentions of a step, cut from those of a whole pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.strategies import Trace
from specdec.core.work import Logits


def trace_of(out: Logits, path: Sequence[int]) -> Trace:
    """The trace of the last node of `path` (numbered as in `Work`); of the text of the pass where the path is empty.

    Attentions cover the cached text and the path.
    """
    hidden, attentions, cross = out.hidden_states, out.attentions, out.cross_attentions
    if hidden is None and attentions is None:
        return Trace()
    columns, size = out.work.path(path), len(out.tree)
    own = [node - out.work.num_cached for node in (columns[-1:] if path else columns)]
    return Trace(
        None if hidden is None else tuple(h[own] for h in hidden),
        None if attentions is None else tuple(_attended(a, own, columns, size) for a in attentions),
        None if cross is None else tuple(a[:, own] for a in cross),
    )


def stacked(traces: list[Trace], void: list[bool]) -> Trace:
    """One trace of all leaves, which have the same depth; zeros for those that are `void`."""

    def layer(leaves: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([torch.zeros_like(t) if gone else t for t, gone in zip(leaves, void, strict=True)])

    parts = zip(*traces, strict=True)
    return Trace(*(None if p[0] is None else tuple(map(layer, zip(*p, strict=True))) for p in parts))


def _attended(attention: Tensor, nodes: Sequence[int], columns: Sequence[int], tree: int) -> Tensor:
    """Rows `nodes` of `[heads, nodes, text + tree]`, over the cached text and the tree's `columns`."""
    text = attention.shape[-1] - tree
    return attention[:, nodes][:, :, [*range(text), *(text + column for column in columns)]]
