"""The output file in the making: rows in order, those that are ahead of their turn beside it, nothing twice or lost.

A finished row is handed to the system at once: to the file if it is its turn, else to a journal beside it. So a run
that is killed loses only rows that were not finished, and the next one goes on from these two files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from specdec.errors import EngineError, OptionError

_DEAD = 2**24  # bytes of a journal that nobody will read again, from which on it is written anew


class Journal:
    """Lines of the file `path`, one for each row, written in any order; `settings` are what they depend on.

    Goes on where another run with the same settings was ended. Raises OptionError for a file that belongs to something
    else, for other settings, and where another process writes it.
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
        """How many rows are finished."""
        return self.next + len(self._pending)

    def __contains__(self, row: int) -> bool:
        return row < self.next or row in self._pending

    def add(self, row: int, line: bytes) -> None:
        """Takes the line of a finished row, which ends in a newline."""
        assert row not in self, row
        if row != self.next:
            return self._hold(row, line)
        _write(self._file, line)
        self.next += 1
        self._promote()

    def entries(self) -> Iterator[tuple[int, bytes]]:
        """The numbers and lines of all finished rows, in order where all are."""
        with self.path.open("rb") as file:
            yield from enumerate(file)
        for row in self._pending:
            yield row, self._read(row)

    def finish(self) -> None:
        """The file is complete: the journal goes."""
        with writing(self.path):
            os.fsync(self._file.fileno())
        self._journal_path.unlink()
        self.close()

    def close(self) -> None:
        """Lets go of the files; another run may go on."""
        self._journal.close()
        self._file.close()

    def _check(self, settings: Mapping[str, Any]) -> None:
        """Raises where the file at hand is not of a run with these settings."""
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
        """Finds the rows that the journal holds."""
        self._journal = _opened(self._journal_path)
        _drop_half_line(self._journal)
        self._pending: dict[int, tuple[int, int]] = {}  # row -> where its line begins in the journal, and its bytes
        self._end = len(self._header)
        self._live = 0  # bytes of these lines
        with self._journal_path.open("rb") as entries:
            entries.readline()
            for entry in entries:
                self._note(entry)

    def _note(self, entry: bytes) -> None:
        """Takes an entry into account that is at the end of the journal."""
        number, _, line = entry.partition(b"\t")
        self._end += len(entry)
        if int(number) >= self.next:
            self._pending[int(number)] = (self._end - len(line), len(line))
            self._live += len(line)

    def _hold(self, row: int, line: bytes) -> None:
        entry = b"%d\t%s" % (row, line)
        _write(self._journal, entry)
        self._note(entry)

    def _promote(self) -> None:
        """Rows of the journal whose turn has come go to the file."""
        while self.next in self._pending:
            _write(self._file, self._read(self.next))
            self._live -= self._pending.pop(self.next)[1]
            self.next += 1
        if self._end - self._live > _DEAD:
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
        """A journal with these entries takes the place of the one before."""
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
    """Keeps other processes from writing the file until it is closed."""
    try:
        import fcntl  # not everywhere
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise OptionError(f"{path} is being written by another process: wait for it, or take another name") from None


def _write(file: BinaryIO, data: bytes) -> None:
    """All of it, as the system may take less at a time."""
    with writing(file.name):
        while data:
            data = data[file.write(data) :]


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Raises EngineError, naming the file, where the system does not take what is written: a full disk, for one."""
    try:
        yield
    except OSError as error:
        raise EngineError(
            f"{path} cannot be written ({error.strerror or error}): what was written stays, and once there is room "
            "the same command goes on"
        ) from None


def _drop_half_line(file: BinaryIO) -> int:
    """Cuts off a line that was not written to its end; how many are left."""
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
