"""OpenMP's threads: how many there are, how many a busy machine leaves, and when they end."""

from __future__ import annotations

import ctypes
import logging
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import perf_counter as clock
from typing import Any

import torch

_log = logging.getLogger(__name__)
_SOFT = 1  # omp_pause_soft: keeps the program's settings
_WINDOW = 0.5  # seconds from one look at the threads to the next
_WAITING = 0.2  # threads that wait for a core, on average: 0.01 on a quiet machine, 0.3 beside one busy program
_PAUSES = 5.0, 80.0  # seconds until all threads are tried again: at first, and at most


@cache
def _openmp() -> Any:
    """torch's own copy of GNU's OpenMP; None if it has another one, or none."""
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*"):
        library = ctypes.CDLL(str(path))
        if hasattr(library, "omp_pause_resource_all"):
            return library
    return None


@cache
def _mkl() -> Any:
    """What sets the threads of MKL's products for the calling thread; None where torch is built without MKL.

    MKL heeds OpenMP's number until `torch.set_num_threads` tells it one, which then holds in all threads.
    """
    with suppress(OSError, AttributeError):
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).MKL_Set_Num_Threads_Local
    return None


def release_helpers() -> None:
    """Ends the calling thread's OpenMP helper threads; its next parallel operation starts new ones (about 0.1 ms).

    If all threads together have more helpers than there are processors, GNU's OpenMP lets helpers sleep between
    operations, and every parallel operation takes up to twice as long.
    """
    if (library := _openmp()) is not None:
        library.omp_pause_resource_all(_SOFT)


def use_threads(count: int) -> None:
    """Has the calling thread compute on so many threads."""
    if torch.get_num_threads() != count:  # to set it is global: threads that start later have the same
        torch.set_num_threads(count)


class Threads:
    """The threads on which an engine computes: fewer than its callers have, while other programs take the cores.

    An operation waits for the last of its threads: beside one busy program, two threads on two cores took twice as long
    as one. Linux counts how long threads waited for cores; elsewhere all threads are used. All are tried again as soon
    as the cores are free, and after ever longer pauses where others seem to run on (a container sees its whole host).
    """

    def __init__(self) -> None:
        self._most = self._used = 0
        self._began = self._waited = 0.0  # when the window began, and how long threads had waited then
        self._retry_at, self._pause, self._told = 0.0, _PAUSES[0], False

    def use(self, most: int) -> None:
        """Has the engine's thread, which calls it, compute on at most so many threads from now on."""
        if most != self._most:
            use_threads(most)
            self._most, self._pause = most, _PAUSES[0]
            self._begin(most)
        if most == 1 or (library := _openmp()) is None:
            return
        if clock() >= self._began + _WINDOW:
            self._begin(self._next())
        if library.omp_get_max_threads() != self._used:  # of the calling thread alone, unlike torch's number
            library.omp_set_num_threads(self._used)
            self._tell_mkl()

    def _begin(self, count: int) -> None:
        """Begins a window on `count` threads."""
        self._used, self._began, self._waited = count, clock(), waited_seconds()
        self._tell_mkl()

    def _tell_mkl(self) -> None:
        if (set_threads := _mkl()) is not None:
            set_threads(self._used)

    def _next(self) -> int:
        """The threads of the next window: fewer after a window in which threads waited, later all again."""
        now, whole = clock(), self._used == self._most
        waiting = (waited_seconds() - self._waited) / (now - self._began)  # threads, on average
        if waiting > _WAITING:
            if whole:
                if not self._told:
                    self._told = True
                    _log.info("the cores are busy: passes run on fewer threads meanwhile")
                self._retry_at, self._pause = now + self._pause, min(2 * self._pause, _PAUSES[1])
            return max(self._used - max(round(waiting), 1), 1)
        if whole:
            self._pause = _PAUSES[0]
            return self._most
        others = others_running()
        free = others is not None and others + self._most <= (os.cpu_count() or 1)
        return self._most if free or now >= self._retry_at else self._used


def waited_seconds() -> float:
    """How long the program's threads have waited for cores; 0 where the system does not say.

    Threads that give way to the calling thread, such as one that writes packed weights, wait as they should.
    """
    total = 0
    with suppress(OSError):
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError, ValueError, IndexError):  # it may have ended
                if os.getpriority(os.PRIO_PROCESS, int(task.name)) <= usual:
                    total += int((task / "schedstat").read_text().split()[1])
    return total / 1e9


def others_running() -> int | None:
    """How many threads of other programs run or wait for a core; None where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
        return max(running - sum(_is_running(task) for task in Path("/proc/self/task").iterdir()), 0)
    return None


def _is_running(task: Path) -> bool:
    with suppress(OSError, IndexError):  # it may have ended
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
    return False
