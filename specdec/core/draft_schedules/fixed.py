"""The interface of schedules, and the simple ones: a constant length, the +2/−1 heuristic, a confidence threshold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

from specdec.core.budget import Budget
from specdec.errors import OptionError

if TYPE_CHECKING:  # names of schedules are read where torch is not loaded
    from specdec.core.drafts import SequenceView
    from specdec.core.outcome import Round

MOST_NODES = 1024
"""The most nodes of one sequence's tree in a pass; beyond it, the work per node outweighs the pass over the weights."""


class Schedule(Protocol):
    """Decides how much every sequence may draft; a value: `after` returns the next one.

    `max_tokens`: the largest `Budget.limit`. `max_branches`: the largest `Budget.branches`, 1 where all are None.
    """

    @property
    def max_tokens(self) -> int: ...

    @property
    def max_branches(self) -> int: ...

    def budgets(self, seqs: Sequence[SequenceView]) -> Sequence[Budget]:
        """One budget per sequence for the coming round."""

    def after(self, round: Round) -> Schedule:
        """The schedule after this round."""


class NamedSchedule(Schedule, Protocol):
    """A schedule that callers choose by its name in `SCHEDULES`.

    `takes_threshold`: it uses `assistant_confidence_threshold`. `learns`: what it learned goes to the next request of
    the same family.
    """

    takes_threshold: ClassVar[bool]
    learns: ClassVar[bool]

    @classmethod
    def of(cls, setup: ScheduleSetup) -> NamedSchedule:
        """The schedule of a request; raises OptionError for trees of more than `MOST_NODES` nodes."""


@dataclass(frozen=True)
class ScheduleSetup:
    """What a schedule is made from; None: not given.

    `tokens` on a path, `branches` that one draft pass continues, `threshold` of the draft's confidence. `offloaded`: a
    target pass reads weights that are not in memory. `trees`: trees may pay: the draft guesses them, the target
    verifies one in a single pass, and the strategy neither draws nodes nor has branches of its own. `learned`: the last
    schedule of the same family.
    """

    tokens: int | None = None
    branches: int | None = None
    threshold: float | None = None
    offloaded: bool = False
    trees: bool = True
    learned: Schedule | None = None

    def tokens_or(self, usual: int) -> int:
        """`tokens`, or by default `usual`, at most as many as `MOST_NODES` allows with these branches."""
        return self.tokens or max(min(usual, MOST_NODES // (self.branches or 1)), 1)


def check_nodes(tokens: int, branches: int) -> None:
    """Raises OptionError for trees of more than `MOST_NODES` nodes."""
    if branches > 1 and tokens * branches > MOST_NODES:
        raise OptionError(
            f"{branches} branches (`num_assistant_branches`) of {tokens} tokens (`num_assistant_tokens`) are "
            f"{branches * tokens} nodes for every sequence, and a pass checks at most {MOST_NODES}: lower one of them"
        )


@dataclass(frozen=True)
class Constant:
    """`k` tokens in every round; a path ends after a token of lower confidence than `threshold`.

    With `branches`, a draft model guesses as many nodes as that many chains have, where they are likeliest. Raises
    OptionError for more than `MOST_NODES` nodes.
    """

    k: int = 5
    threshold: float = 0.0
    branches: int | None = None
    takes_threshold: ClassVar[bool] = True
    learns: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_nodes(self.k, self.max_branches)

    @classmethod
    def of(cls, setup: ScheduleSetup) -> Constant:
        threshold = cls.threshold if setup.threshold is None else setup.threshold
        return cls(setup.tokens_or(cls.k), threshold, setup.branches)

    @property
    def max_tokens(self) -> int:
        return self.k

    @property
    def max_branches(self) -> int:
        return self.branches or 1

    def budgets(self, seqs: Sequence[SequenceView]) -> list[Budget]:
        return [Budget.sure(self.k, self.threshold, self.branches)] * len(seqs)

    def after(self, round: Round) -> Constant:
        return self


@dataclass(frozen=True)
class Confidence(Constant):
    """Up to `k` tokens, until the draft's own probability of one falls below `threshold` (DISCO, arXiv 2405.04304)."""

    k: int = 20
    threshold: float = 0.4


@dataclass(frozen=True)
class Heuristic(Constant):
    """The dynamic rule of the original report, per sequence: +2 tokens if all were accepted, else −1, at least 1.

    A sequence begins with `k` tokens; `lengths`: its next number, by its id. A tree never exceeds `MOST_NODES`.
    """

    lengths: Mapping[int, int] = field(default_factory=dict)

    @property
    def max_tokens(self) -> int:
        return max(MOST_NODES // self.max_branches, self.k)

    def budgets(self, seqs: Sequence[SequenceView]) -> list[Budget]:
        return [Budget.sure(self.lengths.get(seq.id, self.k), self.threshold, self.branches) for seq in seqs]

    def after(self, round: Round) -> Heuristic:
        """With the lengths after this round; sequences without a proposal keep theirs."""
        lengths = dict(self.lengths)
        for seq in round.seqs:
            if seq.finish is not None:
                lengths.pop(seq.id, None)
            elif seq.drafted:
                k = lengths.get(seq.id, self.k)
                lengths[seq.id] = min(k + 2, self.max_tokens) if seq.accepted >= seq.depth else max(1, k - 1)
        return replace(self, lengths=lengths)
