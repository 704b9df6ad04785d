"""A batch from file to file: many rows at a time, answers in order."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from textwrap import shorten
from time import monotonic
from typing import Any

from specdec.batch.journal import Journal
from specdec.batch.rows import KINDS, InputRow, Source
from specdec.batch.tasks import BatchSpec, ChatTask, GenerateTask, SummarizeTask, Task, TranscribeTask
from specdec.decoding.noise import fold
from specdec.errors import EngineError, OptionError, SpecdecError
from specdec.options.fields import SYNONYMS
from specdec.options.generate import Options

_ANSWERS = {"output", "finish_reason", "usage", "error"}  # fields of a row's answer
_FAILURES = 3  # failed rows that `Progress` names
_LONGEST = 200  # characters of a reason
_WINDOW = 16  # rows sorted by length together, per row that runs
_UNEXPECTED = 8  # unexpected errors in a row that end the run
_COUNTS = ("num_target_passes", "num_draft_rounds", "num_draft_tokens", "num_accepted_draft_tokens", "seconds")
_TASKS: dict[str, type[Task]] = {
    "generate": GenerateTask,
    "chat": ChatTask,
    "summarize": SummarizeTask,
    "transcribe": TranscribeTask,
}
Stop = Callable[[], bool]


@dataclass(frozen=True)
class Progress:
    """The progress of a run: `done` of `total` rows are done, `before` of them by earlier runs.

    `failures`: the first few of the `failed` rows, each with its number (from 0) and reason. `new_tokens` and `seconds`
    count this run alone.
    """

    total: int
    before: int
    done: int
    failed: int = 0
    failures: tuple[tuple[int, str], ...] = ()
    new_tokens: int = 0
    seconds: float = 0.0

    def with_failure(self, number: int, data: bytes) -> Progress:
        """The progress with the failure that a line has, if any."""
        if (reason := failure_of(data)) is None:
            return self
        first = sorted([*self.failures, (number, reason)])[:_FAILURES]
        return replace(self, failed=self.failed + 1, failures=tuple(first))


def run_batch(
    source: Source,
    out: str | Path,
    spec: BatchSpec,
    *,
    at_once: int = 32,
    overwrite: bool = False,
    tell: Callable[[Progress], None] = lambda _: None,
    stop: Stop = lambda: False,
) -> Progress:
    """Answers every row of `source` that has no line in `out` yet; lines are in the order of rows.

    `at_once` rows share passes. `tell` is called after every row. Once `stop()` is true, no more rows start, and
    another run may resume. Raises OptionError for an `out` that another run wrote, and the errors of loading models.
    """
    journal = _journal(Path(out), source, spec, overwrite=overwrite)
    try:
        progress = Progress(source.rows, journal.done, journal.done)
        for number, line in journal.entries():
            progress = progress.with_failure(number, line)
        tell(progress)
        if progress.done < progress.total:
            worker = load_worker(spec)
            missing = _warn_misplaced((row for row in source.read(spec.input) if row.number not in journal), spec)
            began = monotonic()
            for answer in _answers(worker, _by_length(missing, spec, _WINDOW * at_once), at_once, stop):
                journal.add(answer.number, answer.data)
                progress = progress.with_failure(answer.number, answer.data)
                tokens = progress.new_tokens + answer.tokens
                progress = replace(progress, done=progress.done + 1, new_tokens=tokens, seconds=monotonic() - began)
                tell(progress)
        if progress.done == progress.total:
            journal.finish()
    finally:
        journal.close()
    return progress


def _journal(out: Path, source: Source, spec: BatchSpec, *, overwrite: bool) -> Journal:
    """The output of a run, JSON lines; raises OptionError for another kind of file, and for the input."""
    if KINDS.get(out.suffix.lower()) != "jsonl":
        expected = f"a file that ends in {' or '.join(suffix for suffix, kind in KINDS.items() if kind == 'jsonl')}"
        raise OptionError.of("OUT", expected, str(out), "it gets JSON lines, so name it .jsonl")
    if out.resolve() == source.path.resolve():
        raise OptionError(f"{out} is the input too: take another name for OUT")
    settings = json.loads(json.dumps(asdict(spec), default=str))
    del settings["folder"]  # files may move before a run resumes
    return Journal(out, {**settings, "input": source.digest}, overwrite=overwrite)


def _answers(worker: Worker, rows: Iterator[InputRow], at_once: int, stop: Stop) -> Iterator[OutputLine]:
    """The lines of the rows, in any order, `at_once` of which are answered together."""
    running: set[Future[OutputLine]] = set()
    pool = ThreadPoolExecutor(at_once, thread_name_prefix="specdec-batch")
    try:
        while True:
            if stop():
                running = {future for future in running if not future.cancel()}
            else:
                nearest = islice(rows, 2 * at_once - len(running))  # no thread idles
                running |= {pool.submit(worker, row) for row in nearest}
            if not running:
                return
            futures, running = wait(running, return_when=FIRST_COMPLETED)
            for future in sorted(futures, key=lambda future: future.exception() is not None):  # an error comes last
                yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # a second interrupt does not wait for rows


def _by_length(rows: Iterator[InputRow], spec: BatchSpec, window: int) -> Iterator[InputRow]:
    """The rows, in each window of `window` the longest first."""
    while nearest := list(islice(rows, window)):
        yield from sorted(nearest, key=spec.size, reverse=True)


def failure_of(line: bytes) -> str | None:
    """The error of a line, abbreviated; None for an answer."""
    record = json.loads(line)
    response, error = record.get("response"), record.get("error")
    if error is None and "output" not in record and isinstance(response, dict) and response.get("status_code") != 200:
        error = response.get("body", {}).get("error", response.get("status_code"))
    if isinstance(error, dict):
        error = error.get("message", error)
    return None if error is None else shorten(str(error), _LONGEST, placeholder=" …")


def _warn_misplaced(rows: Iterator[InputRow], spec: BatchSpec) -> Iterator[InputRow]:
    """The same rows; warns once per field that has an option's name but is data, or that an answer replaces."""
    place = "body" if spec.task == "openai" else "options"
    rest = f"sets no option, and is carried along: options of a row are read in its field `{place}`"
    reasons = {name: f"its field `{name}` {rest}" for name in {*Options.model_fields, *SYNONYMS} - {"n", spec.input}}
    if spec.task != "openai":
        reasons |= {name: f"the answer replaces its field `{name}`: rename it" for name in _ANSWERS}
    for row in rows:
        for name in sorted(row.fields.keys() & reasons.keys()):
            warnings.warn(f"row {row.number + 1}: {reasons.pop(name)}", stacklevel=2)
        yield row


def load_worker(spec: BatchSpec) -> Worker:
    """Loads the models; raises OptionError and LoadError as `from_pretrained` does, SpecdecError without a package."""
    if spec.task != "openai":
        return Worker(spec, _TASKS[spec.task](spec))
    try:
        from specdec.batch.openai_files import OpenAITask
    except ImportError as error:
        way_out = "pip install -c constraints.txt -e '.[serve]'"
        raise SpecdecError(f"rows in OpenAI's form need what a server needs ({error}): {way_out}") from None
    return Worker(spec, OpenAITask(spec))


@dataclass(frozen=True)
class OutputLine:
    """A finished row: its number, its line of output, and its new tokens."""

    number: int
    data: bytes
    tokens: int


class Worker:
    """Loaded models; several threads may call it, and share passes."""

    def __init__(self, spec: BatchSpec, task: Task) -> None:
        self._spec, self._task = spec, task
        self._unexpected = 0  # consecutive errors that no row explains

    def __call__(self, row: InputRow) -> OutputLine:
        """The line of a row, an answer or its error."""
        seed, tokens = fold(self._spec.seed, row.number), 0
        try:
            if row.error is not None:
                raise OptionError(row.error)
            result, stats = self._task.answer(row.fields, seed)
            tokens = stats.num_new_tokens
            if self._spec.row_stats:
                result |= {"stats": {name: getattr(stats, name) for name in _COUNTS}}
            self._unexpected = 0
        except EngineError:
            raise
        except Exception as error:  # this row alone fails
            self._count(error)
            result = self._task.failure(row.fields, error, seed)
        line = result if self._spec.task == "openai" else {**row.fields, **result}
        return OutputLine(row.number, encode_line(line), tokens)

    def _count(self, error: Exception) -> None:
        """Raises EngineError after several unexpected errors, which rows do not explain."""
        unexpected = isinstance(error, RuntimeError | MemoryError) and not isinstance(error, SpecdecError)
        self._unexpected = self._unexpected + 1 if unexpected else 0
        if self._unexpected >= _UNEXPECTED:
            raise EngineError(
                f"{_UNEXPECTED} rows in turn failed ({error}): what is written stays, and the same command goes on"
            ) from error


def encode_line(line: Mapping[str, Any]) -> bytes:
    """A line of JSON in UTF-8; unknown types become text, NaN and infinities null."""
    try:
        return json.dumps(line, ensure_ascii=False, default=str, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(line, default=str).encode() + b"\n"
    except ValueError:
        return encode_line(json.loads(json.dumps(line, default=str), parse_constant=lambda _: None))
