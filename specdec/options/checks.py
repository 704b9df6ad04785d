"""Kinds of values, and warnings of options without effect."""

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
    """Within this context an option without effect raises instead of warning: clients of a server see no warnings."""
    before = _refusing.set(True)
    try:
        yield
    finally:
        _refusing.reset(before)


def warn_of_idle(message: str) -> None:
    """Warns of an option without effect; raises OptionError within `refusing`."""
    if _refusing.get():
        raise OptionError(message)
    warnings.warn(message, stacklevel=2)  # a fixed place, so that Python shows each message once


def plain(value: Any) -> Any:
    """Numbers and arrays of numpy and torch as Python objects; other values unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def is_list(value: object) -> bool:
    """Whether `value` is a sequence other than text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def is_whole(value: object) -> bool:
    """Whether `value` is an integer of Python, numpy or torch, not a bool."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))  # the former is faster


def is_number(value: object) -> bool:
    """Whether `value` is an int or float, not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)
