"""Rows of input: JSON lines, Parquet or lines of text, read in order and in bounded memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from specdec.batch.parquet import parquet, pyarrow_module
from specdec.errors import OptionError

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet", ".txt": "text"}
"""Suffix -> kind of input."""
_READ = 2**20  # bytes hashed at a time
_ROWS = 256  # of Parquet, read at a time


@dataclass(frozen=True)
class Row:
    """One row: its number, its fields, and the error if it could not be read."""

    number: int
    fields: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Source:
    """A file of `rows` rows, blank lines not counted; `digest` identifies its content."""

    path: Path
    kind: str
    rows: int
    digest: str

    @classmethod
    def of(cls, path: str | Path) -> Source:
        """Reads the file once; raises OptionError for an unreadable, empty or unknown kind of file."""
        path = Path(path)
        kind = kind_of(path, "IN", KINDS)
        try:
            digest = _digest(path)
            rows = parquet(path).metadata.num_rows if kind == "parquet" else sum(1 for _ in _lines(path))
        except OSError as error:
            raise OptionError(f"{path} cannot be read ({error.strerror or error}): check the name") from None
        if not rows:
            raise OptionError(f"{path} is empty: there is nothing to do")
        return cls(path, kind, rows, digest)

    def read(self, name: str) -> Iterator[Row]:
        """All rows in order; a line of text becomes the field `name`."""
        if self.kind == "parquet":
            batches = parquet(self.path).iter_batches(batch_size=_ROWS)
            fields = (found for batch in batches for found in batch.to_pylist())
            yield from (Row(number, found) for number, found in enumerate(fields))
            return
        for number, line in enumerate(_lines(self.path)):
            yield _text(number, line, name) if self.kind == "text" else _object(number, line)

    def first(self) -> Row:
        """The first row."""
        return next(self.read("text"))


def kind_of(path: Path, name: str, kinds: dict[str, str]) -> str:
    """The kind of a file, by its suffix; raises an OptionError about `name` for an unknown one."""
    found = kinds.get(path.suffix.lower())
    if found is None:
        raise OptionError.of(name, f"a file that ends in {', '.join(kinds)}", str(path), "rename or convert it")
    return found


def fitting(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows for one table: a value that does not fit its column, as earlier rows set it, is an error of its row."""
    arrow = pyarrow_module()
    seen: dict[str, Any] = {}
    for row in rows:
        fields, wrong = {}, None
        for name, value in row.fields.items():
            try:
                kind = arrow.array([value]).type
                both = [arrow.schema([(name, one)]) for one in (seen.get(name, kind), kind)]
                merged = arrow.unify_schemas(both, promote_options="permissive").field(name).type
                arrow.array([value], merged)  # a large number may not fit
                seen[name], fields[name] = merged, value
            except (arrow.ArrowException, OverflowError, ValueError):
                wrong = f"the value of `{name}` does not fit into the column of the rows before: name OUT .jsonl"
        yield row if wrong is None else replace(row, fields=fields, error=row.error or wrong)


def windows(rows: Iterator[Row], size: int) -> Iterator[list[Row]]:
    """The rows in lists of `size`."""
    while window := list(islice(rows, size)):
        yield window


def _lines(path: Path) -> Iterator[bytes]:
    """The lines that are not blank."""
    with path.open("rb") as file:
        yield from (line for line in file if line.strip())


def _text(number: int, line: bytes, name: str) -> Row:
    try:
        return Row(number, {name: line.decode("utf-8-sig" if number == 0 else "utf-8").rstrip("\r\n")})
    except UnicodeDecodeError as error:
        return Row(number, error=f"the line is not text in UTF-8: {error}")


def _object(number: int, line: bytes) -> Row:
    try:
        found = json.loads(line.decode("utf-8-sig" if number == 0 else "utf-8"))
    except (ValueError, RecursionError) as error:
        return Row(number, error=f"the line is not JSON in UTF-8: {error}")
    if not isinstance(found, dict):
        return Row(number, error=f"the line must be a JSON object, got {type(found).__name__}")
    return Row(number, found)


def _digest(path: Path) -> str:
    found = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_READ):
            found.update(block)
    return found.hexdigest()
