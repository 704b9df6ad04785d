"""A batch from file to file: rows go through the models many at a time, and their answers to the output in order."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from time import monotonic
from typing import TYPE_CHECKING, Any

from specdec.batch.answer import BatchSpec, OutputLine, Worker
from specdec.batch.journal import Journal, writing
from specdec.batch.parquet import parquet, pyarrow_module, schema_of, write_parquet
from specdec.batch.rows import Row, Source, fitting, kind_of, windows
from specdec.batch.tasks import as_several, is_several
from specdec.errors import OptionError
from specdec.options.fields import SYNONYMS
from specdec.options.generate import Options

if TYPE_CHECKING:
    import pyarrow

OUT_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet"}
AT_ONCE = 32
"""Rows that share passes, where nobody says."""
_TOLD = 3  # rows that failed
_LONGEST = 200  # letters of a reason
_WINDOW = 16  # rows that are sorted by length together, for each that runs
Stop = Callable[[], bool]
Answers = Callable[[Iterator[Row], Stop], Iterator[OutputLine]]
"""From rows to their lines, in any order."""
Start = Callable[[BatchSpec], Answers]


@dataclass(frozen=True)
class Progress:
    """How far a run is: `done` of `total` rows, of which `before` were done by earlier runs; the rest is this run's.

    `failures` are the numbers (0 is the first) of the first of the rows that `failed`, each with the reason.
    """

    total: int
    before: int
    done: int
    failed: int = 0
    failures: tuple[tuple[int, str], ...] = ()
    new_tokens: int = 0
    seconds: float = 0.0

    @property
    def rows_per_second(self) -> float:
        """Of this run."""
        return (self.done - self.before) / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of this run."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    def after(self, line: OutputLine, began: float) -> Progress:
        """One row later."""
        known = self.told(line.number, line.data) if line.failed else self
        tokens = self.new_tokens + line.tokens
        return replace(known, done=self.done + 1, new_tokens=tokens, seconds=monotonic() - began)

    def told(self, number: int, data: bytes) -> Progress:
        """With what the line of a row says of a failure."""
        if (reason := failure_of(data)) is None:
            return self
        first = sorted([*self.failures, (number, reason)])[:_TOLD]
        return replace(self, failed=self.failed + 1, failures=tuple(first))


def run(
    source: Source,
    out: str | Path,
    spec: BatchSpec,
    *,
    start: Start | None = None,
    overwrite: bool = False,
    tell: Callable[[Progress], None] = lambda _: None,
    stop: Stop = lambda: False,
) -> Progress:
    """Answers every row of `source` that has no answer in `out` yet; `out` has one for each row then, in order.

    `start` says who answers: `embedded()`, models in this process, or `over_ray()`. `tell` hears of every row. Where
    `stop` says so, no more rows are begun, and the rest is left to another run. Raises OptionError for an `out` that
    belongs to something else, and whatever loading the models does.
    """
    output = Output(Path(out), source, spec, overwrite=overwrite)
    spec, journal = output.spec, output.journal
    try:
        progress = Progress(source.rows, journal.done, journal.done)
        for number, line in journal.entries():
            progress = progress.told(number, line)
        tell(progress)
        if progress.done < progress.total:
            answers = (start or embedded())(spec)
            missing = _misplaced((row for row in output.rows() if row.number not in journal), spec)
            began = monotonic()
            for answer in answers(missing, stop):
                journal.add(answer.number, answer.data)
                progress = progress.after(answer, began)
                tell(progress)
        if progress.done == progress.total:
            output.finish()
    finally:
        journal.close()
    return progress


class Output:
    """The file that a run writes, or goes on with: JSON lines as they come, Parquet when all rows are there."""

    def __init__(self, path: Path, source: Source, spec: BatchSpec, *, overwrite: bool) -> None:
        kind = kind_of(path, "OUT", OUT_KINDS)
        if path.resolve() == source.path.resolve():
            raise OptionError(f"{path} is the input too: take another name for OUT")
        self._parquet, self._path, self._source = kind == "parquet", path, source
        rows = path.with_name(path.name + ".rows") if self._parquet else path
        if self._parquet:
            pyarrow_module()
            if overwrite:
                path.unlink(missing_ok=True)
            elif path.exists():
                raise OptionError(f"{path} exists: take another name for OUT, or pass --overwrite to begin anew")
        self.spec = replace(spec, merges=not self._parquet and spec.task != "openai")
        self._columns = self._own_columns() if self._parquet else None
        settings = {**self.spec.settings, "input": source.digest}
        self.journal = Journal(rows, settings, overwrite=overwrite)

    def rows(self) -> Iterator[Row]:
        """The input, so that it fits into the file."""
        rows = self._source.read(self.spec.input)
        typed = self._source.kind == "parquet" or self.spec.task == "openai"
        return fitting(rows) if self._parquet and not typed else rows

    def finish(self) -> None:
        """All rows are done: the file takes its final form."""
        if self._columns is None:
            return self.journal.finish()
        new = self._path.with_name(self._path.name + ".new")
        try:
            answers = schema_of(self._answers())
            kept = [column for column in self._columns if column.name not in answers.names]
            with writing(new):
                write_parquet(new, self._rows(answers.names), pyarrow_module().schema([*kept, *answers]))
        except OptionError as error:
            raise OptionError(f"{error}; the answers are in {self.journal.path}") from None
        new.replace(self._path)
        self.journal.finish()
        self.journal.path.unlink()

    def _own_columns(self) -> pyarrow.Schema:
        """The columns of the input: those of a Parquet file as they are, of other rows as their values say."""
        if self._source.kind == "parquet" and self.spec.task != "openai":
            return parquet(self._source.path).schema_arrow
        rows = (row.fields for row in self.rows())
        return schema_of({"custom_id": row.get("custom_id")} if self.spec.task == "openai" else row for row in rows)

    def _answers(self) -> Iterator[dict[str, Any]]:
        """The answer of every row; where any row has several texts, all have lists."""
        several = any(map(is_several, self._told()))
        answers = self._told()
        return map(as_several, answers) if several else answers

    def _told(self) -> Iterator[dict[str, Any]]:
        return (json.loads(line) for _, line in self.journal.entries())

    def _rows(self, answered: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Every row with its answer, which takes the place of all fields of these names."""
        for row, answer in zip(self.rows(), self._answers(), strict=True):
            own = {} if self.spec.task == "openai" else row.fields
            yield {**{name: value for name, value in own.items() if name not in answered}, **answer}


def embedded(at_once: int = AT_ONCE) -> Start:
    """Models in this process: so many rows share their passes, rows of alike length side by side."""
    if at_once < 1:
        raise OptionError.of("at_once", "at least 1", at_once)

    def start(spec: BatchSpec) -> Answers:
        worker = spec.start()

        def answers(rows: Iterator[Row], stop: Stop) -> Iterator[OutputLine]:
            pool = ThreadPoolExecutor(at_once, thread_name_prefix="specdec-batch")
            try:
                yield from _through(pool, worker, 2 * at_once, by_length(rows, spec, _WINDOW * at_once), stop)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)  # who is interrupted twice does not wait for rows

        return answers

    return start


def _through(pool: Executor, worker: Worker, most: int, rows: Iterator[Row], stop: Stop) -> Iterator[OutputLine]:
    """The lines of rows as they are finished; `most` are handed in, so that no thread waits for one."""
    running: set[Future[OutputLine]] = set()
    try:
        for row in rows:
            if stop():
                break
            running.add(pool.submit(worker, row))
            if len(running) == most:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        while running:
            if stop():
                running = {future for future in running if not future.cancel()}
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    finally:
        for future in running:
            future.cancel()


def by_length(rows: Iterator[Row], spec: BatchSpec, window: int) -> Iterator[Row]:
    """The rows, the longest of each `window` first."""
    for some in windows(rows, window):
        yield from sorted(some, key=spec.size, reverse=True)


def failure_of(line: bytes) -> str | None:
    """The error that a line tells of, in a few words; None where it has an answer."""
    found = json.loads(line)
    response, error = found.get("response"), found.get("error")
    if error is None and "custom_id" in found and isinstance(response, dict) and response.get("status_code") != 200:
        error = response.get("body", {}).get("error", response.get("status_code"))
    if isinstance(error, dict):
        error = error.get("message", error)
    return None if error is None else shorten(str(error), _LONGEST, placeholder=" …")


def _misplaced(rows: Iterator[Row], spec: BatchSpec) -> Iterator[Row]:
    """The rows; warns of the first that has a field which is called like an option, and is data."""
    place = "body" if spec.task == "openai" else "options"
    names, seen = {*Options.model_fields, *SYNONYMS} - {"n", spec.input}, set[str]()
    for row in rows:
        for name in sorted(row.fields.keys() & names - seen):
            seen.add(name)
            warnings.warn(
                f"row {row.number + 1}: its field `{name}` sets no option, and is carried along: "
                f"options of a row are read in its field `{place}`",
                stacklevel=2,
            )
        yield row
