"""Everything specdec raises on purpose, as one tree.

SpecdecError
├── OptionError (ValueError)          an argument is wrong, unknown or contradicts another
├── UnsupportedError (OptionError)    the request is sound, but this model or strategy cannot serve it
├── VocabularyError (OptionError)     target and draft do not share a vocabulary
├── LoadError (RuntimeError)          a checkpoint is broken, or memory or disk ran out while it was loaded
├── EngineError (RuntimeError)        decoding stopped half-way, for a reason outside the request
│   └── CancelledError                somebody gave the request up
└── DraftError (RuntimeError)         a draft returned something that is not a proposal
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class SpecdecError(Exception):
    """The root of all errors raised by specdec itself."""


class OptionError(SpecdecError, ValueError):
    """An argument is wrong, unknown, or contradicts another one."""

    @classmethod
    def of(cls, name: str, expected: str, got: object, way_out: str = "") -> OptionError:
        """The error for argument `name`: what was expected, what came, and the way out."""
        hint = f": {way_out}" if way_out else ""
        return cls(f"`{name}` must be {expected}, got {got!r}{hint}")


class UnsupportedError(OptionError):
    """The request is sound, but this model or strategy cannot serve it."""


class VocabularyError(OptionError):
    """Target and draft do not share a vocabulary."""


class LoadError(SpecdecError, RuntimeError):
    """A model could not be brought in: its checkpoint is broken, or memory or disk ran out; nothing of it is left."""


class EngineError(SpecdecError, RuntimeError):
    """Decoding stopped half-way for a reason outside the request: another thread's interrupt, a call from within."""


class CancelledError(EngineError):
    """Somebody gave the request up, `Job.cancel` for one."""


class DraftError(SpecdecError, RuntimeError):
    """A draft returned something that is not a proposal."""


def closest_name(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that is closest to `name`; None if none is near."""
    return next(iter(get_close_matches(name, names, n=1, cutoff=0.75)), None)
