"""Results of trials with the installed libraries: once per process, and successes once per machine.

The file is `specdec/probes.json` in `$XDG_CACHE_HOME` (by default `~/.cache`), or the one in `$SPECDEC_PROBES`. It
holds successes, by releases; the next process repeats failed trials, as an update may have repaired them.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
import transformers

from specdec import __version__
from specdec.kernels import cache_folder

_log = logging.getLogger(__name__)
_TRYING = threading.Lock()
_found: dict[str, bool] = {}


def holds(what: str, trial: Callable[[], bool | None]) -> bool:
    """Whether `what` holds, from the cache or by `trial`; None (cannot be tried) counts as True in this process.

    Runs one trial at a time; if it raises, nothing is remembered.
    """
    releases = f"transformers {transformers.__version__}, torch {torch.__version__}, specdec {__version__}"
    with _TRYING:
        if what not in _found and what in _read().get(releases, []):
            _found[what] = True
        if what not in _found:
            result = trial()
            _found[what] = result is not False
            if result:
                _write(what, releases)
        return _found[what]


def _path() -> Path | None:
    with suppress(RuntimeError):  # no home folder
        return Path(os.environ.get("SPECDEC_PROBES") or cache_folder() / "probes.json")
    return None


def _read() -> dict[str, list[str]]:
    """Successes by releases; empty if the file is missing or broken."""
    path = _path()
    try:
        known = json.loads(path.read_text("utf-8")) if path is not None else {}
    except (OSError, ValueError, RecursionError):
        return {}
    known = known if isinstance(known, dict) else {}
    return {releases: held for releases, held in known.items() if isinstance(held, list)}


def _write(what: str, releases: str) -> None:
    """Adds to the file atomically; of two processes at once, one result may be lost."""
    path, known = _path(), _read()
    if path is None:
        return
    held = [one for one in known.get(releases, []) if isinstance(one, str)]
    known[releases] = sorted({*held, what})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".json", delete=False, encoding="utf-8") as file:
            json.dump(known, file, indent=1)
        try:
            os.replace(file.name, path)
        finally:
            Path(file.name).unlink(missing_ok=True)
    except OSError as error:  # the next process repeats the trial
        _warn(f"{path} cannot be written ({error.strerror or error})")


@cache
def _warn(reason: str) -> None:
    way_out = "change that, or name another file in SPECDEC_PROBES"
    _log.warning("results of trials are not kept, so every load takes longer: %s: %s", reason, way_out)
