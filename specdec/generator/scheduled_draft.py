"""A draft and the schedules that its calls share."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from specdec.core.draft_schedules import kind_of, make_schedule
from specdec.core.drafts import Draft
from specdec.engine.request import Pacing
from specdec.options.generate import Options


@dataclass(eq=False)
class ScheduledDraft:
    """A draft of one target, and its schedules that learn, by kind, `Options.family` and number of draft tokens."""

    draft: Draft | None
    _pacings: dict[Hashable, Pacing] = field(default_factory=dict)
    _last: dict[Hashable, Pacing] = field(default_factory=dict)  # by family
    _lock: Any = field(default_factory=threading.Lock)

    def pacing(self, options: Options, **how: Any) -> Pacing:
        """The pacing of a request: its own, or its family's where the schedule learns; `how`: see `make_schedule`.

        A new schedule of a family begins with what the family's last one has learned.
        """
        kind = kind_of(options)
        if kind is None or not kind.learns:
            return Pacing(make_schedule(options, **how))
        family = options.family
        key = (kind, family, options.num_assistant_tokens)
        with self._lock:
            found, last = self._pacings.get(key), self._last.get(family)
            if found is None:
                learned = None if last is None else last.schedule
                found = self._pacings[key] = Pacing(make_schedule(options, learned=learned, **how))
            elif not found.users:
                found.schedule = make_schedule(options, learned=(last or found).schedule, **how)
            self._last[family] = found
        return found
