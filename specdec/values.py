"""What kind of value a caller handed in: small questions that several rooms ask."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any


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
