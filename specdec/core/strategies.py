"""The interface of a strategy, and what it gets of the target's output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specdec.core.drafts import Sampler, SequenceView
    from specdec.core.tree import Step
    from specdec.core.work import Logits


class Trace(NamedTuple):
    """The hidden states `[nodes, width]` and attentions `[heads, nodes, length]` of one step, per layer.

    Of a search: `[leaves, nodes, width]` and `[leaves, heads, nodes, length]`.
    """

    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None


NO_TRACE = Trace()


def trace_of(out: Logits, path: Sequence[int]) -> Trace:
    """The trace of the last node of `path` (numbered as in `Work`); of the text of the pass where the path is empty.

    Attentions cover the cached text and the path.
    """
    hidden, attentions, cross = out.hidden_states, out.attentions, out.cross_attentions
    columns, size = out.work.path(path), len(out.work.tree)
    rows = [node - out.work.num_cached for node in (columns[-1:] if path else columns)]
    return Trace(
        None if hidden is None else tuple(h[rows] for h in hidden),
        None if attentions is None else tuple(_attended(a, rows, columns, size) for a in attentions),
        None if cross is None else tuple(a[:, rows] for a in cross),
    )


def stacked(traces: list[Trace], void: list[bool]) -> Trace:
    """One trace of all leaves, which have the same depth; zeros for leaves that are `void`."""

    def layer(leaves: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([torch.zeros_like(t) if is_void else t for t, is_void in zip(leaves, void, strict=True)])

    parts = zip(*traces, strict=True)
    return Trace(*(None if p[0] is None else tuple(map(layer, zip(*p, strict=True))) for p in parts))


def _attended(attention: Tensor, nodes: Sequence[int], columns: Sequence[int], tree: int) -> Tensor:
    """Rows `nodes` of `[heads, nodes, text + tree]`, over the cached text and the tree's `columns`."""
    text = attention.shape[-1] - tree
    return attention[:, nodes][:, :, [*range(text), *(text + column for column in columns)]]


class View(NamedTuple):
    """The target's output at one leaf: row `at` of `out.logits`, and what else the request keeps."""

    out: Logits
    at: int
    trace: Trace = NO_TRACE

    @property
    def logits(self) -> Tensor:
        """The target's logits `[vocab]`."""
        return self.out.logits[self.at]

    @property
    def unconditional(self) -> Tensor | None:
        """The unconditional sequence's logits `[vocab]`, under guidance."""
        return None if self.out.unconditional is None else self.out.unconditional[self.at]


class Advance(NamedTuple):
    """One step of a strategy: the state after it, and the new leaves.

    New leaf i is `tokens[i]` after old leaf `parents[i]`. `step`: the emitted token, None if a search only needs
    further nodes. `finish`: why the sequence ended, or None. `shown`: the old leaves whose traces belong to the step,
    one per row of the outputs, -1 for a row of zeros; None: all.
    """

    state: Any
    parents: list[int]
    tokens: list[int]
    step: Step | None
    finish: str | None = None
    shown: Sequence[int] | None = None


class Strategy(Protocol):
    """Turns the target's logits into tokens, step by step.

    A text has one leaf, its end; a search (`is_search`) has several, in `num_beams` rows of the outputs. A state is a
    value; a search's has `length`, `leaf_scores` and `finished` hypotheses. `needs_hidden`: it reads the target's last
    hidden states. Without a `sampler` it takes no proposals.
    """

    name: ClassVar[str]
    is_search: ClassVar[bool]
    needs_hidden: ClassVar[bool]

    @property
    def num_beams(self) -> int: ...

    @property
    def sampler(self) -> Sampler | None:
        """How a draft guesses."""

    def begin(self) -> Any:
        """The state before the first token."""

    def advance(self, seq: SequenceView, state: Any, views: Sequence[View], steps: Sequence[Step]) -> Advance:
        """The next step, from the target's output at every leaf; `steps`: the steps that this round has taken."""
