"""A batch from file to file: many rows at a time, answers in order."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import shorten
from time import monotonic
from typing import TYPE_CHECKING, Any

from specdec.batch.journal import Journal, writing
from specdec.batch.rows import (
    KINDS,
    Row,
    Source,
    fitting,
    kind_of,
    parquet,
    pyarrow_module,
    schema_of,
    windows,
    write_parquet,
)
from specdec.batch.tasks import BatchSpec, OutputLine
from specdec.errors import OptionError
from specdec.options.fields import SYNONYMS
from specdec.options.generate import Options

if TYPE_CHECKING:
    import pyarrow

OUT_KINDS = {suffix: kind for suffix, kind in KINDS.items() if kind != "text"}
AT_ONCE = 32
"""The default number of rows that share passes."""
_FAILURES = 3  # failed rows that `Progress` names
_LONGEST = 200  # characters of a reason
_WINDOW = 16  # rows sorted by length together, per row that runs
Stop = Callable[[], bool]
Answers = Callable[[Iterator[Row], Stop], Iterator[OutputLine]]
"""Turns rows into lines of output, in any order."""
Start = Callable[[BatchSpec], Answers]


@dataclass(frozen=True)
class Progress:
    """The progress of a run: `done` of `total` rows are done, `before` of them by earlier runs.

    `failures`: the first few of the `failed` rows, each its number (from 0) and reason. `new_tokens` and `seconds` are
    of this run.
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
        """The speed of this run."""
        return (self.done - self.before) / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of this run."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    def with_failure(self, number: int, data: bytes) -> Progress:
        """The progress with the failure that a line has, if any."""
        if (reason := failure_of(data)) is None:
            return self
        first = sorted([*self.failures, (number, reason)])[:_FAILURES]
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
    """Answers every row of `source` that has no line in `out` yet; lines are in the order of rows.

    `start`: `embedded()`, models in this process (the default), or `over_ray()`. `tell` is called after every row. Once
    `stop()` is true, no more rows start, and another run may resume. Raises OptionError for an `out` that is not of
    this run, and the errors of loading the models.
    """
    output = Output(Path(out), source, spec, overwrite=overwrite)
    spec, journal = output.spec, output.journal
    try:
        progress = Progress(source.rows, journal.done, journal.done)
        for number, line in journal.entries():
            progress = progress.with_failure(number, line)
        tell(progress)
        if progress.done < progress.total:
            answers = (start or embedded())(spec)
            missing = _misplaced((row for row in output.rows() if row.number not in journal), spec)
            began = monotonic()
            for answer in answers(missing, stop):
                journal.add(answer.number, answer.data)
                progress = progress.with_failure(answer.number, answer.data)
                tokens = progress.new_tokens + answer.tokens
                progress = replace(progress, done=progress.done + 1, new_tokens=tokens, seconds=monotonic() - began)
                tell(progress)
        if progress.done == progress.total:
            output.finish()
    finally:
        journal.close()
    return progress


class Output:
    """The output of a run: JSON lines as rows finish, Parquet once all are done."""

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
        settings = json.loads(json.dumps(asdict(self.spec), default=str))
        del settings["folder"]  # files may move before a run resumes
        self.journal = Journal(rows, {**settings, "input": source.digest}, overwrite=overwrite)

    def rows(self) -> Iterator[Row]:
        """The rows of the input; for Parquet, those that do not fit the columns are errors."""
        rows = self._source.read(self.spec.input)
        typed = self._source.kind == "parquet" or self.spec.task == "openai"
        return fitting(rows) if self._parquet and not typed else rows

    def finish(self) -> None:
        """Completes the file once all rows are done."""
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
        """The columns of the input: a Parquet file's own, otherwise inferred from values."""
        if self._source.kind == "parquet" and self.spec.task != "openai":
            return parquet(self._source.path).schema_arrow
        rows = (row.fields for row in self.rows())
        return schema_of({"custom_id": row.get("custom_id")} if self.spec.task == "openai" else row for row in rows)

    def _answers(self) -> Iterator[dict[str, Any]]:
        """The answer of every row; all have lists if any has several texts."""
        several = any(isinstance(json.loads(line).get("output"), list) for _, line in self.journal.entries())
        for _, line in self.journal.entries():
            answer = json.loads(line)
            for name in ("output", "finish_reason") if several else ():
                if isinstance(answer.get(name), str):
                    answer[name] = [answer[name]]
            yield answer

    def _rows(self, answered: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Every row with its answer, which replaces the fields `answered`."""
        for row, answer in zip(self.rows(), self._answers(), strict=True):
            own = {} if self.spec.task == "openai" else row.fields
            yield {**{name: value for name, value in own.items() if name not in answered}, **answer}


def embedded(at_once: int = AT_ONCE) -> Start:
    """Models in this process: `at_once` rows of similar length share passes."""
    if at_once < 1:
        raise OptionError.of("at_once", "at least 1", at_once)

    def start(spec: BatchSpec) -> Answers:
        worker = spec.start()

        def answers(rows: Iterator[Row], stop: Stop) -> Iterator[OutputLine]:
            running: set[Future[OutputLine]] = set()
            pool = ThreadPoolExecutor(at_once, thread_name_prefix="specdec-batch")
            try:
                for row in by_length(rows, spec, _WINDOW * at_once):
                    if stop():
                        break
                    running.add(pool.submit(worker, row))
                    if len(running) == 2 * at_once:  # no thread idles
                        done, running = wait(running, return_when=FIRST_COMPLETED)
                        yield from (future.result() for future in done)
                while running:
                    if stop():
                        running = {future for future in running if not future.cancel()}
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)  # a second interrupt does not wait for rows

        return answers

    return start


def by_length(rows: Iterator[Row], spec: BatchSpec, window: int) -> Iterator[Row]:
    """The rows, in each window of `window` the longest first."""
    for some in windows(rows, window):
        yield from sorted(some, key=spec.size, reverse=True)


def failure_of(line: bytes) -> str | None:
    """The error of a line, abbreviated; None for an answer."""
    found = json.loads(line)
    response, error = found.get("response"), found.get("error")
    if error is None and "output" not in found and isinstance(response, dict) and response.get("status_code") != 200:
        error = response.get("body", {}).get("error", response.get("status_code"))
    if isinstance(error, dict):
        error = error.get("message", error)
    return None if error is None else shorten(str(error), _LONGEST, placeholder=" …")


def _misplaced(rows: Iterator[Row], spec: BatchSpec) -> Iterator[Row]:
    """The same rows; warns once per field that has an option's name, but is data."""
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
