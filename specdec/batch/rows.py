"""Rows of files: JSON lines, lines of text, and Parquet by pyarrow; read in order and in bounded memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import OptionError, SpecdecError

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet", ".txt": "text"}
"""Suffix -> kind of input."""
_BLOCK = 2**20  # bytes hashed at a time
_ROWS = 1024  # Parquet's rows that are read at a time


@dataclass(frozen=True)
class InputRow:
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
        kind = KINDS.get(path.suffix.lower())
        if kind is None:
            raise OptionError.of("IN", f"a file that ends in {', '.join(KINDS)}", str(path), "rename or convert it")
        try:
            digest = hashlib.blake2b(digest_size=16)
            with path.open("rb") as file:
                while block := file.read(_BLOCK):
                    digest.update(block)
            rows = _parquet(path).metadata.num_rows if kind == "parquet" else sum(1 for _ in _lines(path))
        except OSError as error:
            raise OptionError(f"{path} cannot be read ({error.strerror or error}): check the name") from None
        if not rows:
            raise OptionError(f"{path} is empty: there is nothing to do")
        return cls(path, kind, rows, digest.hexdigest())

    def read(self, name: str) -> Iterator[InputRow]:
        """All rows in order; a line of text becomes the field `name`."""
        if self.kind == "parquet":
            batches = _parquet(self.path).iter_batches(batch_size=_ROWS)
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from (InputRow(number, fields) for number, fields in enumerate(rows))
            return
        for number, line in enumerate(_lines(self.path)):
            try:
                text = line.decode("utf-8-sig" if number == 0 else "utf-8").rstrip("\r\n")
                record = {name: text} if self.kind == "text" else json.loads(text)
            except (ValueError, RecursionError) as error:
                kind = "text" if self.kind == "text" else "JSON"
                yield InputRow(number, error=f"the line is not {kind} in UTF-8: {error}")
                continue
            wrong = None if isinstance(record, dict) else f"the line must be a JSON object, got {type(record).__name__}"
            yield InputRow(number, error=wrong) if wrong else InputRow(number, record)


def _lines(path: Path) -> Iterator[bytes]:
    """The lines that are not blank."""
    with path.open("rb") as file:
        yield from (line for line in file if line.strip())


def _parquet(path: Path) -> ParquetFile:
    """Opens a Parquet file; raises OptionError for another format, SpecdecError without pyarrow."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise SpecdecError("Parquet needs pyarrow: pip install -c constraints.txt -e '.[parquet]'") from None
    try:
        return ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise OptionError(f"{path} is no Parquet file ({error}): check the name") from None
