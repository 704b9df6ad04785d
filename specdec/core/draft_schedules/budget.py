"""What schedules share: what they decide and learn from, how they are made from options, and the simplest plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from specdec.errors import OptionError

if TYPE_CHECKING:  # names of schedules are read where torch is not loaded
    from specdec.core.drafts import Plan, Until
    from specdec.core.rounds import Round, SequenceView

MOST_NODES = 1024
"""Of one sequence's tree in one pass: beyond it the work around the nodes outweighs whatever a pass over
weights costs.
"""


class Schedule(Protocol):
    """Decides how much every sequence may draft; a value: `after` returns the next one and changes nothing.

    `max_branches` is the most nodes that its plans let one draft pass continue: above 1 a text gets trees of guesses,
    with 1 it gets chains.
    """

    @property
    def max_branches(self) -> int: ...

    def plan(self, seqs: Sequence[SequenceView]) -> Sequence[Plan]:
        """One plan per sequence for the coming round."""

    def after(self, round: Round) -> Schedule:
        """The schedule that has learned from this round."""


class NamedSchedule(Schedule, Protocol):
    """A schedule that callers choose by its name in `SCHEDULES`.

    `takes_threshold`: `assistant_confidence_threshold` means something to it. `grows_trees`: it may take trees where
    nobody asked for branches. `learns`: what it found out is worth handing to the next request of the same family.
    """

    takes_threshold: ClassVar[bool]
    grows_trees: ClassVar[bool]
    learns: ClassVar[bool]

    @classmethod
    def of(cls, setup: ScheduleSetup) -> NamedSchedule:
        """The schedule of a request; raises OptionError for trees of more than `MOST_NODES` nodes."""


@dataclass(frozen=True)
class ScheduleSetup:
    """What a schedule is made from; None stands for what was not asked for.

    `tokens` on a path, `branches` that one draft pass continues, `threshold` of the draft's confidence. `offloaded`: a
    target pass reads weights that are not in memory. `trees`: trees of guesses may pay, as the target keeps them in
    one cache and the strategy neither draws them node by node nor has branches of its own. `learned` is the schedule
    with which the last request of the same family ended.
    """

    tokens: int | None = None
    branches: int | None = None
    threshold: float | None = None
    offloaded: bool = False
    trees: bool = True
    learned: Schedule | None = None

    def tokens_or(self, usual: int) -> int:
        """The tokens asked for, or the usual number, as far as so many branches leave room for it."""
        return self.tokens or max(min(usual, MOST_NODES // (self.branches or 1)), 1)


@dataclass(frozen=True, slots=True)
class Limit:
    """A plan with a fixed length, and if `threshold` is set, no further node after one the draft believes in less."""

    limit: int
    threshold: float = 0.0
    branches: int | None = None

    @property
    def needs_confidence(self) -> bool:
        """Without a threshold all guesses are alike."""
        return self.threshold > 0

    def go_on(self, paths: Sequence[Sequence[float]], width: int = 1) -> bool:
        """Whether another node may follow any of these."""
        return any(len(path) < self.limit and (not path or path[-1] >= self.threshold) for path in paths)

    @property
    def until(self) -> Until | None:
        """The threshold: of what lies below it the chance is 0. None for others with a `go_on` of their own."""
        from specdec.core.drafts import Until

        if type(self).go_on is not Limit.go_on:
            return None
        return Until((self.threshold,), (0.0, 2 / self.threshold), 0.5) if self.threshold > 0 else Until()

    def keep(self, confidence: Sequence[float]) -> bool:
        """Every drafted node is kept, down to the first one that the draft believes in less than the threshold."""
        return len(confidence) < 2 or confidence[-2] >= self.threshold


def check_nodes(tokens: int, branches: int | None) -> None:
    """Raises OptionError for trees of more than `MOST_NODES` nodes."""
    if branches is not None and branches > 1 and tokens * branches > MOST_NODES:
        raise OptionError(
            f"{branches} branches (`num_assistant_branches`) of {tokens} tokens (`num_assistant_tokens`) are "
            f"{branches * tokens} nodes for every sequence, and a pass checks at most {MOST_NODES}: lower one of them"
        )
