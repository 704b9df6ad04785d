"""What kind of value a caller handed in, and what to do about one that has no effect."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Integral
from typing import Any

from specdec.errors import OptionError

_refusing = ContextVar("refusing", default=False)


@contextmanager
def refusing() -> Iterator[None]:
    """While it lasts, an option without effect is an error: a program that answers others has nobody to warn."""
    before = _refusing.set(True)
    try:
        yield
    finally:
        _refusing.reset(before)


def warn_of_idle(message: str) -> None:
    """Warns of an option that changes no text; raises OptionError while `refusing`."""
    if _refusing.get():
        raise OptionError(message)
    warnings.warn(message, stacklevel=2)  # one line in every program's log: the place is this one, whoever calls


def plain(value: Any) -> Any:
    """Numbers and arrays of numpy and torch as Python's own; everything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def is_list(value: object) -> bool:
    """Whether this is a sequence, and no text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def is_whole(value: object) -> bool:
    """Whether this is a whole number, of Python's, numpy's or torch's, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether this is a number of Python's, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    least, most = 0, min(len(one), len(other))
    while least < most:  # comparing slices is fast
        middle = (least + most + 1) // 2
        least, most = (middle, most) if one[least:middle] == other[least:middle] else (least, middle - 1)
    return least
