"""Files that outlive a process: in which folder, how many, moved into place atomically, verified before use."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_DAY = 24 * 3600  # seconds until what failed is tried again, as libraries may have been repaired


class Lack(Exception):
    """Something that cannot be built or kept: the reason and the way out, each in one line."""

    def __init__(self, reason: str, way_out: str) -> None:
        super().__init__(f"{reason}: {way_out}" if way_out else reason)
        self.reason, self.way_out = reason, way_out


def cache_folder(name: str, variable: str) -> Path:
    """The folder in environment `variable`, by default `specdec/NAME` in `$XDG_CACHE_HOME`, by default `~/.cache`.

    Raises RuntimeError without a home folder.
    """
    default = os.environ.get("XDG_CACHE_HOME")
    return Path(os.environ.get(variable) or Path(default or Path.home() / ".cache") / "specdec" / name)


def failure(file: Path) -> list[str]:
    """The lines of a file that records a failure of the last day; empty otherwise."""
    try:
        return file.read_text("utf-8").splitlines() if time.time() - file.stat().st_mtime < _DAY else []
    except (OSError, ValueError):
        return []


def install(file: Path, place: Path) -> None:
    """Moves a file to its place, and writes its digest beside it."""
    place.with_name(f"{place.name}.sha256").write_text(_digest(file))
    os.replace(file, place)


def is_intact(place: Path) -> bool:
    """Whether a file is as `install` left it: a truncated library would crash the process."""
    try:
        return place.with_name(f"{place.name}.sha256").read_text() == _digest(place)
    except (OSError, UnicodeDecodeError):
        return False


@contextmanager
def file_lock(path: Path, variable: str) -> Iterator[None]:
    """Context for one process at a time; the others wait for the lock on file `path`.

    Raises Lack if the folder, which environment `variable` names, cannot be written to.
    """
    import fcntl  # not on Windows

    with _lock_file(path, variable) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released by closing it
        yield


def is_locked(path: Path, variable: str) -> bool:
    """Whether a process holds `file_lock` of this path; raises Lack as `file_lock` does."""
    import fcntl

    with _lock_file(path, variable) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # others may ask at the same time
        except BlockingIOError:
            return True
    return False


def _lock_file(path: Path, variable: str) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w")
    except OSError as error:
        raise unwritable(path.parent, variable, error) from None


def unwritable(folder: Path, variable: str, error: OSError) -> Lack:
    """A Lack for `error`, raised by writing to the folder that environment `variable` names."""
    why = error.strerror or str(error)
    return Lack(f"{folder} cannot be written to ({why})", f"change that, or name another folder in {variable}")


def size(folder: Path) -> int:
    """The bytes of all files in a folder, which another process may delete meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(place, name).stat().st_size
    return total


def make_room(new: Path, mark: str, most: int, variable: str) -> None:
    """Deletes folders beside `new`, the folder with the oldest file `mark` first, until all folders take `most` bytes.

    The folder `new` stays, and so do folders without a file `mark`, which are not ours, and locked ones (`file_lock`).
    """
    times = {path.parent: path.stat().st_mtime for path in new.parent.glob(f"*/{mark}")}
    sizes = {folder: size(folder) for folder in times}
    surplus = sum(sizes.values()) - most
    for folder in sorted(set(times) - {new}, key=times.__getitem__):
        if surplus > 0 and not is_locked(folder.with_suffix(".lock"), variable):
            shutil.rmtree(folder, ignore_errors=True)
            surplus -= sizes[folder]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
