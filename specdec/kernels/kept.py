"""Files that outlive a process: put in their place in one step, and checked before anybody loads them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Lack(Exception):
    """Why something cannot be built or kept, and the way out, each in a line."""

    def __init__(self, reason: str, way_out: str) -> None:
        super().__init__(f"{reason}: {way_out}" if way_out else reason)
        self.reason, self.way_out = reason, way_out


def put(made: Path, place: Path) -> None:
    """Moves a file to its place, with its digest beside it."""
    _seal(place).write_text(_digest(made))
    os.replace(made, place)


def is_whole(place: Path) -> bool:
    """Whether a file is as it was put; a library that was cut short would kill the process that loads it."""
    try:
        return _seal(place).read_text() == _digest(place)
    except (OSError, UnicodeDecodeError):
        return False


@contextmanager
def alone(path: Path, variable: str) -> Iterator[None]:
    """One process at a time; the others wait until the file is let go.

    Raises Lack where its folder, which `variable` of the environment names, cannot be written to.
    """
    import fcntl  # not everywhere

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise unwritable(path.parent, variable, error) from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)  # closing it lets go
        yield


def unwritable(folder: Path, variable: str, error: OSError) -> Lack:
    """What `error` of writing into a folder, which `variable` of the environment names, comes down to."""
    why = error.strerror or str(error)
    return Lack(f"{folder} cannot be written to ({why})", f"change that, or name another folder in {variable}")


def _seal(place: Path) -> Path:
    return place.with_name(f"{place.name}.sha256")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
