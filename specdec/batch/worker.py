"""The workers of a batch: one loads the models of a task, and turns each row into a line of output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec.batch.rows import InputRow
from specdec.batch.tasks import BatchSpec, ChatTask, GenerateTask, SummarizeTask, Task, TranscribeTask
from specdec.decoding.noise import fold
from specdec.errors import EngineError, OptionError, SpecdecError

_UNEXPECTED = 8  # unexpected errors in a row that end the run
_COUNTS = ("num_target_passes", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "seconds")
_TASKS: dict[str, type[Task]] = {
    "generate": GenerateTask,
    "chat": ChatTask,
    "summarize": SummarizeTask,
    "transcribe": TranscribeTask,
}


def load_worker(spec: BatchSpec) -> Worker:
    """Loads the models; raises OptionError and LoadError as `from_pretrained` does, SpecdecError without a package."""
    if spec.task != "openai":
        return Worker(spec, _TASKS[spec.task](spec))
    try:
        from specdec.batch.openai_files import OpenAITask
    except ImportError as error:
        way_out = "pip install -e '.[serve]'"
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
