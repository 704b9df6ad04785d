"""Unfinished output: lines in the order of rows, and a journal of the lines that are ahead of their turn.

A finished line is written at once, to the file if it is next, else to the journal beside it. A killed run loses only
unfinished rows, and the next run resumes from the two files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from specdec.errors import EngineError, OptionError
from specdec.options.line_files import whole_lines


class Journal:
    """Writes one line per row to the file `path`, in any order; resumes a run of the same `settings`.

    The lines that are ahead of their turn are also kept in memory. Raises OptionError for a file that no unfinished run
    wrote, for other settings, and while another process writes it.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, overwrite: bool = False) -> None:
        self._path, self._journal_path = path, path.with_name(path.name + ".journal")
        self._pending: dict[int, bytes] = {}  # row -> its line, which is in the journal alone
        self._file = _open(path)
        try:
            _lock(self._file, path)
            if overwrite:
                self._journal_path.unlink(missing_ok=True)
                self._file.truncate(0)
            self._check(settings)
            self.next = sum(1 for _ in whole_lines(self._file))
            self._journal = _open(self._journal_path)
            lines = [*whole_lines(self._journal)]
            if not lines:
                _write(self._journal, json.dumps(settings, sort_keys=True).encode() + b"\n")
            for entry in lines[1:]:
                row, _, line = entry.partition(b"\t")
                if int(row) >= self.next:
                    self._pending[int(row)] = line
            self._promote()
        except BaseException:
            self._file.close()
            raise

    @property
    def done(self) -> int:
        """The number of finished rows."""
        return self.next + len(self._pending)

    def __contains__(self, row: int) -> bool:
        return row < self.next or row in self._pending

    def add(self, row: int, line: bytes) -> None:
        """Writes the line of a finished row; it ends in a newline."""
        assert row not in self, row
        if row == self.next:
            _write(self._file, line)
            self.next += 1
            self._promote()
        else:
            _write(self._journal, b"%d\t%s" % (row, line))
            self._pending[row] = line

    def entries(self) -> Iterator[tuple[int, bytes]]:
        """Numbers and lines of finished rows, in any order."""
        with self._path.open("rb") as file:
            yield from enumerate(file)
        yield from self._pending.items()

    def finish(self) -> None:
        """Deletes the journal: the file is complete."""
        with _writing(self._path):
            os.fsync(self._file.fileno())
        self._journal_path.unlink()
        self.close()

    def close(self) -> None:
        """Closes the files; another run may resume."""
        self._journal.close()
        self._file.close()

    def _check(self, settings: Mapping[str, Any]) -> None:
        """Raises OptionError if no unfinished run with these settings wrote the existing file."""
        ways_out = "take another name for OUT, or pass --overwrite to begin anew"
        if not self._journal_path.exists():
            if self._path.stat().st_size:
                raise OptionError(f"{self._path} exists, and no unfinished run made it: {ways_out}")
            return
        try:
            with self._journal_path.open("rb") as journal:
                before, has_rows = json.loads(journal.readline()), bool(journal.readline())
        except (OSError, ValueError) as error:
            raise OptionError(f"{self._journal_path} cannot be read ({error}): {ways_out}") from None
        if not (has_rows or self._path.stat().st_size):  # as when its models could not be loaded
            self._journal_path.unlink()
            return
        now = json.loads(json.dumps(settings))
        for name in {**before, **now}:
            if before.get(name) != now.get(name):
                raise OptionError(
                    f"{self._path} was begun with `{name}`={before.get(name)!r}, and now it is {now.get(name)!r}: "
                    f"go on with the former, {ways_out}"
                )

    def _promote(self) -> None:
        """Copies the journal's lines that are next to the file."""
        while (line := self._pending.pop(self.next, None)) is not None:
            _write(self._file, line)
            self.next += 1


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("ab+", buffering=0)  # type: ignore[return-value]
    except OSError as error:
        raise OptionError(f"{path} cannot be written ({error}): take another name for OUT") from None


def _lock(file: BinaryIO, path: Path) -> None:
    """Locks the file against other processes until it is closed."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # on Windows
        return
    except OSError:
        raise OptionError(f"{path} is being written by another process: wait for it, or take another name") from None


def _write(file: BinaryIO, data: bytes) -> None:
    """Writes all bytes; the system may take fewer at a time."""
    with _writing(file.name):
        while data:
            data = data[file.write(data) :]


@contextmanager
def _writing(path: Path | str) -> Iterator[None]:
    """Turns an OSError, as of a full disk, into an EngineError that names the file."""
    try:
        yield
    except OSError as error:
        raise EngineError(
            f"{path} cannot be written ({error.strerror or error}): what was written stays, and once there is room "
            "the same command goes on"
        ) from None
