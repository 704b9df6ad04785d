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
