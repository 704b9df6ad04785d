"""What schedules learned of a target and its draft, kept for the next program on this machine.

A file of about 2 kB in the folder `costs` beside the results of other trials (`probe_folder`) holds one kind of call of
one pair, on one backend, number of threads and processor; another file holds what the pair's hybrid learned. They only
decide how much is drafted at first, never a text. A model without a name and a caller's function or class have no file,
and files that cannot be read or written are left alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from pydantic import TypeAdapter

from specdec import __version__, kernels
from specdec.core.draft_schedules.cost import Cost
from specdec.core.draft_schedules.estimates import BINS, Acceptance, LinearFit
from specdec.core.draft_schedules.seconds import Seconds
from specdec.core.drafts import Draft
from specdec.engine.request import Pacing
from specdec.models import LanguageModel
from specdec.models.hf.probe_cache import probe_folder
from specdec.proposers.function import FunctionDraft
from specdec.proposers.hybrid import HybridDraft, Odds

_MOST = 256  # files; the files that were not written for the longest time go first
_WEIGHT = 1.5  # an earlier program's seconds count as if measured twice: the machine may have been busy then
_LEVELS = 8  # what is known of other texts' guesses weighs as much as so many of a new text
LastPacings = dict[Hashable, tuple[Path | None, Pacing]]
"""The last pacing of each kind of call, and the file for what it learns."""


class Learned(NamedTuple):
    """The estimates in the file of a schedule."""

    acceptance: Acceptance
    seconds: Seconds


_JSON: dict[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (Learned, Odds)}


def place(target: LanguageModel, draft: Draft | None, family: Hashable) -> Path | None:
    """The file for calls of `family`; None without a draft, a name for each part, or a home folder."""
    folder = probe_folder()
    if folder is None or draft is None or not _has_name(draft):
        return None
    models = [target, *draft.models]
    names = [str(getattr(model.model.config, "name_or_path", "") or "") for model in models]
    if not all(names):
        return None
    parts = [_machine(), f"{torch.get_num_threads()} threads", repr(draft)]
    parts += [os.path.realpath(name) if os.path.exists(name) else name for name in names]
    for model in models:
        gpu = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else ""
        parts.append(f"{model!r} {model.weight_kind} {model.is_offloaded} {model.is_strict} {gpu}")
    return folder / "costs" / f"{_digest(*parts)}-{_digest(repr(family))}.json"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _has_name(draft: Draft) -> bool:
    """Whether `repr` tells the draft, and the drafts in it, from all others: not where a caller wrote their code."""
    is_ours = type(draft).__module__.startswith("specdec.") and not isinstance(draft, FunctionDraft)
    return is_ours and all(_has_name(part) for part in vars(draft).values() if isinstance(part, Draft))


@cache
def _machine() -> str:
    releases = f"specdec {__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{releases}, {kernels.instructions()}"


def odds_of(draft: Draft | None) -> Odds | None:
    """What a hybrid learned."""
    return draft.odds if isinstance(draft, HybridDraft) else None


def _odds_file(path: Path) -> Path:
    """The file of the pair's odds, beside a file of one kind of call."""
    return path.with_name(f"{path.name.partition('-')[0]}.json")


def read_costs(path: Path | None, odds: Odds | None) -> Cost | None:
    """A schedule with the estimates in `path`, None without a sound file; new `odds` take the values of the pair's."""
    if path is None:
        return None
    if odds == Odds() and (earlier := _read(_odds_file(path), Odds)) is not None:
        # Where a poor draft or a busy machine kept the model from reading, nothing would correct it.
        passes, acceptance = _faded(earlier.passes), earlier.acceptance.faded(_LEVELS)
        vars(odds).update(vars(replace(earlier, acceptance=acceptance, passes=passes, reading=None)))
    learned = _read(path, Learned)
    if learned is None:
        return None
    seconds = learned.seconds
    most = seconds.plain.at(1) if seconds.plain.weight else math.inf
    # A draft's pass that took longer than a plain round was measured while the machine was busy.
    drafts = {at: _faded(line) for at, line in seconds.drafts.items() if not line.weight or line.at(1) <= most}
    seconds = seconds._replace(passes=_faded(seconds.passes), plain=_faded(seconds.plain), drafts=drafts)
    return Cost(acceptance=learned.acceptance, seconds=seconds)


def _read(path: Path, kind: type) -> Any:
    """The value in a file; None if it is not sound."""
    with suppress(OSError, ValueError, TypeError):
        text = path.read_text("utf-8")
        learned = _JSON[kind].validate_json(text) if _is_sound(json.loads(text)) else None
        return learned if learned is not None and len(learned.acceptance.bins) == BINS else None


def _is_sound(value: Any) -> bool:
    """Whether all numbers are finite and at least 0."""
    if isinstance(value, dict | list):
        return all(map(_is_sound, value.values() if isinstance(value, dict) else value))
    return value is None or (isinstance(value, int | float) and 0 <= value < math.inf)


def _faded(line: LinearFit) -> LinearFit:
    """The same line with a weight of at most `_WEIGHT`, so that new passes soon count more; its slope is the prior.

    Of a steep slope, its geometric mean with the usual one: a busy machine's ended all drafting, and without passes
    over several nodes nothing corrected it, in all later programs.
    """
    if line.weight <= _WEIGHT or not line.seconds:
        return line
    sums, mean = [_WEIGHT / line.weight * value for value in line[:5]], line.seconds / line.weight
    steepness = line.slope / mean
    return LinearFit._make((*sums, min(steepness, math.sqrt(steepness * LinearFit().steepness)), line.trust, False))


def write_costs(last: LastPacings, odds: Odds | None) -> None:
    """Takes out of `last` and writes what measured schedules learned, and deletes the oldest files beyond `_MOST`."""
    for path, pacing in [last.pop(key) for key in list(last)]:  # other threads may add to it
        schedule = pacing.schedule
        if path is not None and isinstance(schedule, Cost) and schedule.is_measured:
            with suppress(Exception):  # the next program measures anew
                path.parent.mkdir(parents=True, exist_ok=True)
                _write(path, Learned(schedule.acceptance, schedule.seconds))
                if odds is not None:
                    _write(_odds_file(path), odds)
                for old in sorted(path.parent.glob("*.json"), key=os.path.getmtime)[:-_MOST]:
                    old.unlink()


def _write(path: Path, learned: Learned | Odds) -> None:
    """Writes a file that other programs see whole or not at all."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        file = Path(folder, path.name)
        file.write_bytes(_JSON[type(learned)].dump_json(learned))
        os.replace(file, path)
