"""OpenMP's threads: when their helpers end, and the core that is left to the compiler."""

from __future__ import annotations

import ctypes
import os
import time
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from specdec.models import compiler_is_running

_EVERY = 0.2  # seconds between two looks at the compiler
_SOFT = 1  # omp_pause_soft: keeps the program's settings


@cache
def _openmp() -> Any:
    """torch's own copy of GNU's OpenMP; None if it has another one, or none."""
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*"):
        library = ctypes.CDLL(str(path))
        if hasattr(library, "omp_pause_resource_all"):
            return library
    return None


def release_helpers() -> None:
    """Ends the calling thread's OpenMP helper threads; its next parallel operation starts new ones (about 0.1 ms).

    If all threads together have more helpers than there are processors, GNU's OpenMP lets helpers sleep between
    operations, and every parallel operation takes up to twice as long.
    """
    if (library := _openmp()) is not None:
        library.omp_pause_resource_all(_SOFT)


class Threads:
    """Context in which the calling thread leaves one core to specdec's compiler while that runs, if it uses them all.

    OpenMP's threads spin while they wait for one another. On all cores they would stop the compiler, which has the
    lowest priority, or spin in vain for one that shares a core with it.
    """

    def __init__(self) -> None:
        self._before, self._next = torch.get_num_threads(), 0.0

    def __enter__(self) -> Threads:
        return self

    def adapt(self) -> None:
        """Changes the number of threads if the compiler has begun or ended; called before each step."""
        if 1 < self._before >= _cores() and time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            self._set(self._before - compiler_is_running())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._set(self._before)

    def _set(self, count: int) -> None:
        if count != torch.get_num_threads():
            torch.set_num_threads(count)


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
