"""How much to draft next: schedules are values, and `after(round)` gives the next one.

A new schedule is a class like those in `fixed.py`, and a line in `SCHEDULES`, from which options, the command line and
the benchmark take its name. Nothing here loads torch.
"""

from __future__ import annotations

from typing import Any

from specdec.core.draft_schedules.auto import Auto
from specdec.core.draft_schedules.budget import Limit, NamedSchedule, Schedule, ScheduleSetup
from specdec.core.draft_schedules.cost import WIDEST, Cost
from specdec.core.draft_schedules.fixed import Confidence, Constant, Heuristic

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

    `offloaded`, `learned`: as in `ScheduleSetup`. `trees`: the target verifies a tree in one pass. `lookup_tokens`:
    transformers' `prompt_lookup_num_tokens`, a constant number of tokens per round.
    """
    if not isinstance(options.schedule, str | None):
        own: Schedule = options.schedule
        return own
    tokens, name = options.num_assistant_tokens, _name(options)
    if options.schedule is None and lookup_tokens is not None and tokens is None:
        tokens, name = lookup_tokens, "constant"
    setup = ScheduleSetup(
        tokens,
        options.num_assistant_branches,
        options.assistant_confidence_threshold,
        offloaded,
        # Drawn trees bring less, and searches choose their branches themselves.
        trees and options.num_beams == 1 and not options.needs_q,
        learned,
    )
    return SCHEDULES[name].of(setup)


def learns(options: Any) -> bool:
    """Whether the schedule of these `options` passes on what it learned to the next request of its family."""
    return isinstance(options.schedule, str | None) and SCHEDULES[_name(options)].learns


def _name(options: Any) -> str:
    """The schedule that the options name.

    Without a name it is the heuristic where a threshold of confidence is given, which it heeds, and where a seed is to
    give the same text though this depends on the rounds: then no clock may decide how much is drafted.
    """
    by_no_clock = options.assistant_confidence_threshold is not None or (options.needs_q and options.seed is not None)
    return options.schedule or ("heuristic" if by_no_clock else DEFAULT)


__all__ = [
    "SCHEDULES",
    "WIDEST",
    "Auto",
    "Confidence",
    "Constant",
    "Cost",
    "Heuristic",
    "Limit",
    "Schedule",
    "ScheduleSetup",
    "learns",
    "make_schedule",
]
