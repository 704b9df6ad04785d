"""OpenMP's threads: when their helpers end, and the core that is left to the compiler."""

from __future__ import annotations

import ctypes
import os
import time
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from specdec.models import compiler_is_running

_EVERY = 1.0  # seconds between two looks at the compiler
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


def share_cores(most: int) -> None:
    """Has the calling thread compute on `most` threads, or on one fewer of them while specdec's compiler needs a core.

    Called before each step. OpenMP's threads spin while they wait for one another: on all cores they would stop the
    compiler, which has the lowest priority, or spin in vain for one that shares a core with it.
    """
    count = most - _left_to_compiler(most, time.monotonic() // _EVERY) if most > 1 else most
    if torch.get_num_threads() != count:  # to set it is global: threads that start later have the same
        torch.set_num_threads(count)


@lru_cache(maxsize=1)
def _left_to_compiler(most: int, period: float) -> int:
    """Cores of `most` that the compiler needs; looked up once in each `period`."""
    return int(most >= _cores() and compiler_is_running())


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
