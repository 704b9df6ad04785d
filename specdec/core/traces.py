"""Hidden states and attentions of a step, cut from those of a whole pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.strategies import Trace
from specdec.core.tree import Step
from specdec.core.work import Logits


def trace_of(out: Logits, nodes: Sequence[int], columns: Sequence[int]) -> Trace:
    """The trace of `nodes` of a pass; their attentions cover the cached text and the tree's `columns`."""
    hidden, attentions, cross = out.hidden_states, out.attentions, out.cross_attentions
    own, size = [node - out.work.num_cached for node in nodes], len(out.tree)
    return Trace(
        None if hidden is None else tuple(h[own] for h in hidden),
        None if attentions is None else tuple(_attended(a, own, columns, size) for a in attentions),
        None if cross is None else tuple(a[:, own] for a in cross),
    )


def traces_of(out: Logits, steps: list[Step], path: list[int]) -> list[Trace]:
    """One trace per step: the first covers all text of the pass, each other one node."""
    if out.hidden_states is None and out.attentions is None:
        return []
    text = out.work.path()
    return [trace_of(out, text if i == 0 else [step.node], out.work.path(path[:i])) for i, step in enumerate(steps)]


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
