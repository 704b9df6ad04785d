"""The interface of a strategy, and what it gets of the target's output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from specdec.core.drafts import BranchRule, DraftRule, SequenceView
    from specdec.core.tree import Step
    from specdec.core.work import Logits


class Strategy(Protocol):
    """What every strategy has: a name, and its needs.

    A strategy with several live branches (`is_search`) is a `Search`, any other a `Selector`. `needs_hidden`: it reads
    the target's last hidden states. Without `rule` and `branching` it takes no proposals.
    """

    name: ClassVar[str]
    needs_hidden: ClassVar[bool]

    @property
    def rule(self) -> DraftRule | None:
        """How a draft guesses token by token; for a search, after its best branch."""

    @property
    def branching(self) -> BranchRule | None:
        """How a draft guesses several continuations at once."""


class Selector(Strategy, Protocol):
    """A strategy of one text: turns the target's logits into tokens, one at a time."""

    is_search: ClassVar[Literal[False]]

    def advance(self, seq: SequenceView, new: list[int], out: Logits, node: int) -> Step:
        """The next token, after `node`; `new` are the tokens that this round has emitted so far."""


class Trace(NamedTuple):
    """The hidden states `[nodes, width]` and attentions `[heads, nodes, length]` of one step, per layer.

    Of a search: `[leaves, nodes, width]` and `[leaves, heads, nodes, length]`.
    """

    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor, ...] | None
    cross_attentions: tuple[Tensor, ...] | None


class NodeOutput(NamedTuple):
    """The target's output at one node: logits `[vocab]`, and those of the unconditional sequence.

    They are row `at` of `whole.logits`, the pass's output for the whole tree, whose `cache` keeps what a search
    computes for all nodes at once.
    """

    logits: Tensor
    unconditional: Tensor | None
    trace: Trace
    whole: Logits | None = None
    at: int = 0


class SearchStep(NamedTuple):
    """One step of a search: the state after it, and the new leaves.

    New leaf i is `tokens[i]` after old leaf `parents[i]`. `step`: the emitted token, None if the search only needs
    further nodes. `shown`: the old leaves whose traces belong to the step, one per row of the outputs, -1 for a row of
    zeros; None: all.
    """

    state: Any
    parents: list[int]
    tokens: list[int]
    step: Step | None
    shown: Sequence[int] | None = None


class Search(Strategy, Protocol):
    """A strategy with several live branches; a state is a value with `finish`, `length` and `leaf_scores`."""

    is_search: ClassVar[Literal[True]]

    @property
    def num_beams(self) -> int: ...

    def begin(self) -> Any:
        """The state before the first token."""

    def advance(self, seq: SequenceView, state: Any, outputs: Sequence[NodeOutput]) -> SearchStep:
        """The next step, from the target's output at every leaf."""
