"""The helper threads that OpenMP gives to every thread that computes."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

_SOFT = 1  # omp_pause_soft: what the program has set stays as it is


@cache
def _openmp() -> Any:
    """torch's own copy of GNU's OpenMP; None where it has another one, or comes without."""
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*"):
        library = ctypes.CDLL(str(path))
        if hasattr(library, "omp_pause_resource_all"):
            return library
    return None


def release_helpers() -> None:
    """Ends the helper threads of the calling thread; its next parallel operation makes new ones (some 0.1 ms).

    GNU's OpenMP counts those of all threads: where they are more than the processors, helpers sleep between operations,
    and every operation of whichever thread computes takes up to twice as long.
    """
    if (library := _openmp()) is not None:
        library.omp_pause_resource_all(_SOFT)
