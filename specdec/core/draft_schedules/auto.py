"""The default: the published heuristic sets the length until costs are measured, then these do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from specdec.core.draft_schedules.budget import ScheduleSetup
from specdec.core.draft_schedules.cost import Cost
from specdec.core.draft_schedules.fixed import Heuristic

if TYPE_CHECKING:
    from specdec.core.drafts import Plan, SequenceView
    from specdec.core.rounds import Round


@dataclass(frozen=True)
class Auto:
    """`cost`, whose chains are at most as long as those of `heuristic` until the seconds of passes were measured.

    A bound by `heuristic` from then on was measured too: it loses 3 to 5% where drafting pays
    (`benchmarks/schedules.py`).
    """

    heuristic: Heuristic = field(default_factory=Heuristic)
    cost: Cost = field(default_factory=Cost)
    takes_threshold: ClassVar[bool] = False
    grows_trees: ClassVar[bool] = True
    learns: ClassVar[bool] = True

    @classmethod
    def of(cls, setup: ScheduleSetup) -> Auto:
        learned = setup.learned.cost if isinstance(setup.learned, Auto) else setup.learned
        return cls(Heuristic(setup.tokens_or(Heuristic.k)), Cost.of(replace(setup, tokens=None, learned=learned)))

    @property
    def max_branches(self) -> int:
        return self.cost.max_branches

    def plan(self, seqs: Sequence[SequenceView]) -> Sequence[Plan]:
        plans = self.cost.plan(seqs)
        if self.cost.is_measured:
            return plans
        lengths = [own.limit for own in self.heuristic.plan(seqs)]
        return [plan.up_to(length) for plan, length in zip(plans, lengths, strict=True)]

    def after(self, round: Round) -> Auto:
        heuristic = self.heuristic if self.cost.is_measured else self.heuristic.after(round)
        return Auto(heuristic, self.cost.after(round))
