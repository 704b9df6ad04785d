"""Parquet files, by pyarrow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import OptionError, SpecdecError

if TYPE_CHECKING:
    import pyarrow
    from pyarrow.parquet import ParquetFile

_ROWS = 1024  # per batch


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
        for batch in _batches(rows):
            writer.write_table(arrow.Table.from_pylist(batch, schema=schema))


def schema_of(rows: Iterable[dict[str, Any]]) -> pyarrow.Schema:
    """The schema of all rows; raises OptionError for a field with values of different types."""
    arrow = pyarrow_module()
    found = arrow.schema([])
    with _columns():
        for batch in _batches(rows):
            names = list(dict.fromkeys(name for row in batch for name in row))
            columns = [(name, arrow.array([row.get(name) for row in batch]).type) for name in names]
            found = arrow.unify_schemas([found, arrow.schema(columns)], promote_options="permissive")
    return found


@contextmanager
def _columns() -> Iterator[None]:
    """Turns pyarrow's errors about types into OptionError."""
    try:
        yield
    except (pyarrow_module().ArrowException, OverflowError) as error:
        raise OptionError(f"the rows do not fit into columns ({error}): name OUT .jsonl, which takes any") from None


def _batches(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    rest = iter(rows)
    while batch := [_without_empty(row) or {} for row in islice(rest, _ROWS)]:
        yield batch


def _without_empty(value: Any) -> Any:
    """The value with None for empty objects, which Parquet cannot store."""
    if isinstance(value, dict):
        return {name: _without_empty(one) for name, one in value.items()} or None
    return [_without_empty(one) for one in value] if isinstance(value, list) else value
