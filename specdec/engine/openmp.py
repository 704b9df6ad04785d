"""OpenMP's threads: how many there are, and when they end."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

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


def use_threads(count: int) -> None:
    """Has the calling thread compute on so many threads."""
    if torch.get_num_threads() != count:  # to set it is global: threads that start later have the same
        torch.set_num_threads(count)
