"""Unfinished output: lines in the order of rows, and a journal of the lines that are ahead of their turn.

A finished line is written at once, to the file if it is next, else to the journal beside it. A killed run loses only
unfinished rows, and the next run resumes from the two files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from specdec.errors import EngineError, OptionError

_DEAD = 2**24  # bytes of the journal's lines that are in the file, above which the journal is rewritten


class Journal:
    """Writes one line per row to the file `path`, in any order; resumes a run of the same `settings`.

    Raises OptionError for a file that is no unfinished run's, for other settings, and while another process writes it.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, overwrite: bool = False) -> None:
        self.path, self._journal_path = path, path.with_name(path.name + ".journal")
        self._header = json.dumps(settings, sort_keys=True).encode() + b"\n"
        self._file = _opened(path)
        try:
            _lock(self._file, path)
            if overwrite:
                self._journal_path.unlink(missing_ok=True)
                self._file.truncate(0)
            self._check(settings)
            if not self._journal_path.exists():
                self._renew([])
            self.next = _drop_half_line(self._file)
            self._open_journal()
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
            entry = b"%d\t%s" % (row, line)
            _write(self._journal, entry)
            self._note(entry, self._journal.tell())

    def entries(self) -> Iterator[tuple[int, bytes]]:
        """Numbers and lines of finished rows; in order once all are finished."""
        with self.path.open("rb") as file:
            yield from enumerate(file)
        for row in self._pending:
            yield row, self._read(row)

    def finish(self) -> None:
        """Deletes the journal: the file is complete."""
        with writing(self.path):
            os.fsync(self._file.fileno())
        self._journal_path.unlink()
        self.close()

    def close(self) -> None:
        """Closes the files; another run may resume."""
        self._journal.close()
        self._file.close()

    def _check(self, settings: Mapping[str, Any]) -> None:
        """Raises an OptionError where the existing file is not of a run with these settings."""
        ways_out = "take another name for OUT, or pass --overwrite to begin anew"
        if not self._journal_path.exists():
            if self.path.stat().st_size:
                raise OptionError(f"{self.path} exists, and no unfinished run made it: {ways_out}")
            return
        try:
            with self._journal_path.open("rb") as journal:
                before = json.loads(journal.readline())
        except (OSError, ValueError) as error:
            raise OptionError(f"{self._journal_path} cannot be read ({error}): {ways_out}") from None
        now = json.loads(self._header)
        for name in {**before, **now}:
            if before.get(name) != now.get(name):
                raise OptionError(
                    f"{self.path} was begun with `{name}`={before.get(name)!r}, and now it is {now.get(name)!r}: "
                    f"go on with the former, {ways_out}"
                )

    def _open_journal(self) -> None:
        """Opens the journal and indexes its lines."""
        self._journal = _opened(self._journal_path)
        _drop_half_line(self._journal)
        self._pending: dict[int, tuple[int, int]] = {}  # row -> offset and length of its line in the journal
        self._dead = 0  # bytes of lines that are in the file
        with self._journal_path.open("rb") as entries:
            end = len(entries.readline())
            for entry in entries:
                end += len(entry)
                self._note(entry, end)

    def _note(self, entry: bytes, end: int) -> None:
        """Indexes an entry of the journal that ends at offset `end`."""
        row, _, line = entry.partition(b"\t")
        if int(row) >= self.next:
            self._pending[int(row)] = (end - len(line), len(line))
        else:
            self._dead += len(line)

    def _promote(self) -> None:
        """Copies the journal's lines that are next to the file; rewrites a journal of mostly dead lines."""
        while self.next in self._pending:
            _write(self._file, self._read(self.next))
            self._dead += self._pending.pop(self.next)[1]
            self.next += 1
        if self._dead > _DEAD:
            with writing(self.path):
                os.fsync(self._file.fileno())
            entries = [b"%d\t%s" % (row, self._read(row)) for row in self._pending]
            self._journal.close()
            self._renew(entries)
            self._open_journal()

    def _read(self, row: int) -> bytes:
        begin, length = self._pending[row]
        return os.pread(self._journal.fileno(), length, begin)

    def _renew(self, entries: Iterable[bytes]) -> None:
        """Replaces the journal by one with these entries."""
        new = self._journal_path.with_name(self._journal_path.name + ".new")
        with writing(new), new.open("wb") as file:
            file.writelines([self._header, *entries])
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._journal_path)


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("ab+", buffering=0)  # type: ignore[return-value]
    except OSError as error:
        raise OptionError(f"{path} cannot be written ({error}): take another name for OUT") from None


def _lock(file: BinaryIO, path: Path) -> None:
    """Locks the file against other processes until it is closed."""
    try:
        import fcntl  # not on Windows
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise OptionError(f"{path} is being written by another process: wait for it, or take another name") from None


def _write(file: BinaryIO, data: bytes) -> None:
    """Writes all bytes; the system may take fewer at a time."""
    with writing(file.name):
        while data:
            data = data[file.write(data) :]


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Turns an OSError, as of a full disk, into an EngineError that names the file."""
    try:
        yield
    except OSError as error:
        raise EngineError(
            f"{path} cannot be written ({error.strerror or error}): what was written stays, and once there is room "
            "the same command goes on"
        ) from None


def _drop_half_line(file: BinaryIO) -> int:
    """Truncates the file after its last newline; returns the number of lines."""
    file.seek(0)
    lines = end = 0
    position = 0
    while block := file.read(2**20):
        lines += block.count(b"\n")
        if (last := block.rfind(b"\n")) >= 0:
            end = position + last + 1
        position += len(block)
    file.truncate(end)
    return lines
