"""The statistics of several calls as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from specdec.types import Stats


def total(parts: Sequence[Stats]) -> Stats:
    """The statistics of several calls in a row: counts and seconds in sum, rows one after the other."""
    joined: dict[str, Any] = {}
    for field in fields(Stats):
        values = [getattr(part, field.name) for part in parts]
        if field.name == "settings":
            joined[field.name] = values[-1] if values else {}
        elif isinstance(field.default, tuple):
            joined[field.name] = tuple(item for value in values for item in value)
        else:
            joined[field.name] = sum(values)
    return Stats(**joined)
