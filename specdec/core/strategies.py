"""What every way of decoding says about itself, and how it is asked for the next step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from specdec.core.drafts import BranchRule, DraftRule
    from specdec.core.rounds import SequenceView
    from specdec.core.tree import Scores, Step


class Strategy(Protocol):
    """What every way of decoding says about itself: its name, and what it needs of the engine and of a draft.

    `is_search`: it has several live branches and is a `Search`, otherwise a `Selector` of one text. `needs_hidden`: it
    reads the target's last hidden states. One that no proposals may help has no `rule` and no `branching`.
    """

    name: ClassVar[str]
    needs_hidden: ClassVar[bool]

    @property
    def rule(self) -> DraftRule | None:
        """How a draft guesses one token after the other; for a search, after its best branch."""

    @property
    def branching(self) -> BranchRule | None:
        """How a draft guesses several continuations at once."""


class Selector(Strategy, Protocol):
    """A strategy of one text: turns genuine target scores into tokens, one ordinary step at a time."""

    is_search: ClassVar[Literal[False]]

    def advance(self, seq: SequenceView, new: list[int], scores: Scores, node: int) -> Step:
        """The next token after `node`, where `new` are the tokens already emitted in this round."""


class Trace(NamedTuple):
    """Per layer, the hidden states `[nodes, width]` and attentions `[heads, nodes, length]` that led to one token.

    Of a search they are `[leaves, nodes, width]` and `[leaves, heads, nodes, length]`.
    """

    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor, ...] | None
    cross_attentions: tuple[Tensor, ...] | None


class NodeOutput(NamedTuple):
    """What the target said at one node: logits `[vocab]`, those of the unconditional sequence, and what led to them.

    They are number `at` of the logits of a `whole` pass, where that is told: a search may then look at all of them at
    once, and leave what it found in the cache there.
    """

    logits: Tensor
    unconditional: Tensor | None
    trace: Trace
    whole: Scores | None = None
    at: int = 0


class SearchStep(NamedTuple):
    """One step of a search: its state afterwards, and its new leaves.

    New leaf i is `tokens[i]` after the old leaf number `parents[i]`. `step` is what the step emitted, None where the
    search only asks for more nodes. `shown` are the numbers of the old leaves whose traces belong to the step, one for
    each row of the outputs, -1 for a row of zeros; all old leaves if None.
    """

    state: Any
    parents: list[int]
    tokens: list[int]
    step: Step | None
    shown: Sequence[int] | None = None


class Search(Strategy, Protocol):
    """A strategy with several live branches; its states are values, with `finish`, `length` and `leaf_scores`."""

    is_search: ClassVar[Literal[True]]

    @property
    def num_beams(self) -> int: ...

    def begin(self) -> Any:
        """The state before the first token."""

    def advance(self, seq: SequenceView, state: Any, outputs: Sequence[NodeOutput]) -> SearchStep:
        """The next state, from what the target said at every leaf."""
