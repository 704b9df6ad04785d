"""Rows of files: JSON lines, lines of text, and Parquet by pyarrow; read in order and in bounded memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import OptionError, SpecdecError

if TYPE_CHECKING:
    import pyarrow
    from pyarrow.parquet import ParquetFile

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet", ".txt": "text"}
"""Suffix -> kind of input."""
_BLOCK = 2**20  # bytes hashed at a time
_ROWS = 1024  # of Parquet, read or written at a time


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
            digest = hashlib.blake2b(digest_size=16)
            with path.open("rb") as file:
                while block := file.read(_BLOCK):
                    digest.update(block)
            rows = parquet(path).metadata.num_rows if kind == "parquet" else sum(1 for _ in _lines(path))
        except OSError as error:
            raise OptionError(f"{path} cannot be read ({error.strerror or error}): check the name") from None
        if not rows:
            raise OptionError(f"{path} is empty: there is nothing to do")
        return cls(path, kind, rows, digest.hexdigest())

    def read(self, name: str) -> Iterator[Row]:
        """All rows in order; a line of text becomes the field `name`."""
        if self.kind == "parquet":
            batches = parquet(self.path).iter_batches(batch_size=_ROWS)
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from (Row(number, fields) for number, fields in enumerate(rows))
            return
        for number, line in enumerate(_lines(self.path)):
            try:
                text = line.decode("utf-8-sig" if number == 0 else "utf-8").rstrip("\r\n")
                found = {name: text} if self.kind == "text" else json.loads(text)
            except (ValueError, RecursionError) as error:
                kind = "text" if self.kind == "text" else "JSON"
                yield Row(number, error=f"the line is not {kind} in UTF-8: {error}")
                continue
            wrong = None if isinstance(found, dict) else f"the line must be a JSON object, got {type(found).__name__}"
            yield Row(number, error=wrong) if wrong else Row(number, found)

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


def windows(rows: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """The rows in lists of `size`."""
    rest = iter(rows)
    while window := list(islice(rest, size)):
        yield window


def _lines(path: Path) -> Iterator[bytes]:
    """The lines that are not blank."""
    with path.open("rb") as file:
        yield from (line for line in file if line.strip())


def pyarrow_module() -> Any:
    """pyarrow; raises SpecdecError where it is missing."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise SpecdecError("Parquet needs pyarrow: pip install -e '.[parquet]'") from None
    return pyarrow


def parquet(path: Path) -> ParquetFile:
    """Opens a Parquet file; raises OptionError for another format."""
    arrow = pyarrow_module()
    try:
        return arrow.parquet.ParquetFile(path)
    except arrow.ArrowInvalid as error:
        raise OptionError(f"{path} is no Parquet file ({error}): check the name") from None


def write_parquet(path: Path, rows: Iterable[dict[str, Any]], schema: pyarrow.Schema) -> None:
    """Writes a Parquet file; raises OptionError for a value that does not fit its column."""
    arrow = pyarrow_module()
    with _columns(), arrow.parquet.ParquetWriter(path, schema) as writer:
        for some in windows(rows, _ROWS):
            writer.write_table(arrow.Table.from_pylist([_without_empty(row) or {} for row in some], schema=schema))


def schema_of(rows: Iterable[dict[str, Any]]) -> pyarrow.Schema:
    """The schema of all rows; raises OptionError for a field with values of different types."""
    arrow = pyarrow_module()
    found = arrow.schema([])
    with _columns():
        for some in windows(rows, _ROWS):
            names = dict.fromkeys(name for row in some for name in row)
            columns = [(name, arrow.array([_without_empty(row.get(name)) for row in some]).type) for name in names]
            found = arrow.unify_schemas([found, arrow.schema(columns)], promote_options="permissive")
    return found


@contextmanager
def _columns() -> Iterator[None]:
    """Turns pyarrow's errors about types into OptionError."""
    try:
        yield
    except (pyarrow_module().ArrowException, OverflowError) as error:
        raise OptionError(f"the rows do not fit into columns ({error}): name OUT .jsonl, which takes any") from None


def _without_empty(value: Any) -> Any:
    """The value with None for empty objects, which Parquet cannot store."""
    if isinstance(value, dict):
        return {name: _without_empty(one) for name, one in value.items()} or None
    return [_without_empty(one) for one in value] if isinstance(value, list) else value
