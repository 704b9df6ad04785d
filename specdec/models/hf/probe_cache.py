"""Results of trials with the installed libraries: once per process, and successes once per machine.

Each success is a file, named by a digest of the claim and the releases, in `specdec/probes` in `$XDG_CACHE_HOME` (by
default `~/.cache`), or in `$SPECDEC_PROBES`. The next process repeats failed trials: an update may help.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
import transformers

from specdec import __version__
from specdec.kernels.cache_files import cache_folder, unwritable

_log = logging.getLogger(__name__)
_FOLDER = "SPECDEC_PROBES"
_TRYING = threading.Lock()
_results: dict[str, bool] = {}


def holds(claim: str, trial: Callable[[], bool | None]) -> bool:
    """Whether `claim` holds, from the cache or by `trial`; None (cannot be tried) counts as True in this process.

    Runs one trial at a time; if it raises, nothing is remembered.
    """
    with _TRYING:
        if claim not in _results:
            marker = _marker(claim)
            is_marked = marker is not None and os.path.exists(marker)
            result = is_marked or trial()
            _results[claim] = result is not False
            if result and not is_marked and marker is not None:
                _mark(marker, claim)
        return _results[claim]


def _marker(claim: str) -> Path | None:
    """The file that says that `claim` holds with these releases; None without a home folder."""
    releases = f"transformers {transformers.__version__}, torch {torch.__version__}, specdec {__version__}"
    place = probe_folder()
    return None if place is None else place / hashlib.sha256(f"{releases}\n{claim}".encode()).hexdigest()[:16]


def probe_folder() -> Path | None:
    """The folder of all results; None without a home folder."""
    with suppress(RuntimeError):
        return cache_folder("probes", _FOLDER)
    return None


def _mark(marker: Path, claim: str) -> None:
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text(claim, "utf-8")
    except OSError as error:  # the next process repeats the trial
        _warn(str(unwritable(marker.parent, _FOLDER, error)))


@cache
def _warn(reason: str) -> None:
    _log.warning("results of trials are not kept, so every load takes longer: %s", reason)
