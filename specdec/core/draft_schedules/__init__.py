"""How much to draft next: schedules are values, and `after(round)` gives the next one.

A new schedule is a class like those in `fixed.py`, and a line in `SCHEDULES`, from which options, the command line and
the benchmark take its name. Nothing here loads torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from specdec.core.budget import Budget
from specdec.core.draft_schedules.cost import Cost
from specdec.core.draft_schedules.fixed import Confidence, Constant, Heuristic, NamedSchedule, Schedule, ScheduleSetup

if TYPE_CHECKING:
    from specdec.core.drafts import SequenceView
    from specdec.core.outcome import Round


@dataclass(frozen=True)
class Auto(Cost):
    """`cost`, with chains at most as long as `heuristic`'s until the seconds of passes were measured.

    A bound by `heuristic` from then on was measured too: it loses 3 to 5% where drafting pays
    (`benchmarks/schedules.py`).
    """

    heuristic: Heuristic = field(default_factory=Heuristic)

    @classmethod
    def of(cls, setup: ScheduleSetup) -> Auto:
        return replace(super().of(replace(setup, tokens=None)), heuristic=Heuristic(setup.tokens_or(Heuristic.k)))

    def budgets(self, seqs: Sequence[SequenceView]) -> list[Budget]:
        budgets = super().budgets(seqs)
        if self.is_measured:
            return budgets
        lengths = [budget.limit for budget in self.heuristic.budgets(seqs)]
        return [
            replace(budget, limit=min(budget.limit, length)) if budget.branches in (None, 1) else budget
            for budget, length in zip(budgets, lengths, strict=True)
        ]

    def after(self, round: Round) -> Auto:
        learned = super().after(round)
        return learned if self.is_measured else replace(learned, heuristic=self.heuristic.after(round))


SCHEDULES: dict[str, type[NamedSchedule]] = {
    "auto": Auto,
    "heuristic": Heuristic,
    "constant": Constant,
    "confidence": Confidence,
    "cost": Cost,
}
"""Every schedule by its name."""
DEFAULT = "auto"


def make_schedule(
    options: Any,
    *,
    offloaded: bool = False,
    trees: bool = True,
    learned: Schedule | None = None,
    lookup_tokens: int | None = None,
) -> Schedule:
    """The schedule that the call's `options` name, or the caller's own.

    `offloaded`, `learned`: as in `ScheduleSetup`. `trees`: the draft guesses trees, and the target verifies one in a
    pass. `lookup_tokens`: transformers' `prompt_lookup_num_tokens`, a constant number of tokens per round.
    """
    tokens, kind = options.num_assistant_tokens, schedule_kind(options)
    if kind is None:
        schedule: Schedule = options.schedule
        return schedule
    if options.schedule is None and lookup_tokens is not None and tokens is None:
        tokens, kind = lookup_tokens, Constant
    setup = ScheduleSetup(
        tokens,
        options.num_assistant_branches,
        options.assistant_confidence_threshold,
        offloaded,
        # Drawn trees bring less, and searches choose their branches themselves.
        trees and options.num_beams == 1 and not options.needs_q,
        learned,
    )
    return kind.of(setup)


def schedule_kind(options: Any) -> type[NamedSchedule] | None:
    """The kind of schedule that the options name; None for the caller's own.

    Without a name it is the heuristic where a threshold of confidence is given, which it heeds, and where a seed is to
    give the same text though this depends on the rounds: then no clock may decide how much is drafted.
    """
    if not isinstance(options.schedule, str | None):
        return None
    by_no_clock = options.assistant_confidence_threshold is not None or (options.needs_q and options.seed is not None)
    return SCHEDULES[options.schedule or ("heuristic" if by_no_clock else DEFAULT)]


__all__ = ["SCHEDULES", "Schedule", "make_schedule", "schedule_kind"]
