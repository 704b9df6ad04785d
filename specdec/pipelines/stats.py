"""Statistics of several calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from specdec.core.stats import Stats


def total(parts: Sequence[Stats]) -> Stats:
    """The statistics of several calls of one generator: sums of counts and seconds, rows one after the other."""
    joined: dict[str, Any] = {}
    for field in fields(Stats) if parts else ():
        values = [getattr(part, field.name) for part in parts]
        if isinstance(field.default, tuple):
            joined[field.name] = tuple(item for value in values for item in value)
        elif isinstance(field.default, int | float):
            joined[field.name] = sum(values)
        else:
            joined[field.name] = values[-1]
    return Stats(**joined)
