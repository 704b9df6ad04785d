"""What schedules learned of a target and its draft, kept for the next program on this machine.

A file of about 2 kB in the folder `costs` beside the results of other trials (`probe_cache.folder`) holds one kind of
call of one pair, on one backend, number of threads and processor. It only decides how much is drafted at first, never a
text. A model without a name has none, and files that cannot be read or written are left alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Hashable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter

from specdec import __version__, kernels
from specdec.core.draft_schedules.cost import Cost
from specdec.core.draft_schedules.estimates import BINS, Acceptance
from specdec.core.draft_schedules.seconds import Seconds
from specdec.core.drafts import Draft
from specdec.engine.request import Pacing
from specdec.models import LanguageModel
from specdec.models.hf import probe_cache
from specdec.proposers.hybrid import HybridDraft, Odds

_MOST = 256  # files; those that were not written for the longest time go first
LastPacings = dict[Hashable, tuple[Path | None, Pacing]]
"""The last pacing of each kind of call, and the file for what it learns."""


class Learned(NamedTuple):
    """What a file holds: a schedule's estimates, and a hybrid's."""

    acceptance: Acceptance
    seconds: Seconds
    odds: Odds | None = None


_JSON = TypeAdapter(Learned)


def place(target: LanguageModel, draft: Draft | None, family: Hashable) -> Path | None:
    """The file for calls of `family`; None if a model has no name or there is no home folder."""
    models = [target, *(() if draft is None else draft.models)]
    names = [str(getattr(model.model.config, "name_or_path", "") or "") for model in models]
    folder = probe_cache.probe_folder()
    if folder is None or not all(names):
        return None
    parts = [_machine(), f"{torch.get_num_threads()} threads", repr(draft), repr(family), *names]
    parts += [f"{model!r} {model.weight_kind}" for model in models]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return folder / "costs" / f"{digest[:16]}.json"


@cache
def _machine() -> str:
    return f"specdec {__version__}, torch {torch.__version__}, {kernels.instructions()}"


def odds_of(draft: Draft | None) -> Odds | None:
    """What a hybrid learned."""
    return draft.odds if isinstance(draft, HybridDraft) else None


def read_costs(path: Path | None, odds: Odds | None) -> Cost | None:
    """A schedule with what `path` holds, which new `odds` take in too; None without a sound file."""
    with suppress(OSError, ValueError):
        text = "" if path is None else path.read_text("utf-8")
        learned = _JSON.validate_json(text) if _is_sound(json.loads(text)) else None
        if learned is None or len(learned.acceptance.bins) != BINS:
            return None
        if learned.odds is not None and odds == Odds():
            vars(odds).update(vars(learned.odds))
        return Cost(acceptance=learned.acceptance, seconds=learned.seconds)
    return None


def _is_sound(value: Any) -> bool:
    """Whether all numbers are finite and at least 0."""
    if isinstance(value, dict | list):
        return all(map(_is_sound, value.values() if isinstance(value, dict) else value))
    return value is None or (isinstance(value, int | float) and 0 <= value < math.inf)


def write_costs(last: LastPacings, odds: Odds | None) -> None:
    """Writes what measured schedules learned, and deletes the oldest files beyond `_MOST`."""
    for path, pacing in last.values():
        schedule = pacing.schedule
        if path is not None and isinstance(schedule, Cost) and schedule.is_measured:
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                    file.write(_JSON.dump_json(Learned(schedule.acceptance, schedule.seconds, odds)))
                os.replace(file.name, path)
                for old in sorted(path.parent.iterdir(), key=os.path.getmtime)[:-_MOST]:
                    old.unlink()
