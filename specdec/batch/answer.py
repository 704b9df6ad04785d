"""A worker: loads models and turns each row into a line of output, an answer or an error."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar

from specdec.batch.rows import Row
from specdec.core.stats import Stats
from specdec.decoding.noise import fold
from specdec.errors import EngineError, OptionError, SpecdecError

_UNEXPECTED = 8  # unexpected errors in a row that end the run
_COUNTS = ("num_target_passes", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "seconds")


Fields = Mapping[str, Any]


class Task(ABC):
    """One task with its models; `field` is the default field that it reads of a row."""

    field: ClassVar[str]

    @abstractmethod
    def __init__(self, spec: BatchSpec) -> None:
        """Loads the models; raises OptionError for invalid options."""

    @abstractmethod
    def answer(self, fields: Fields, seed: int) -> tuple[dict[str, Any], Stats]:
        """The answer's fields and the call's statistics; raises for a row without an answer."""

    def failure(self, fields: Fields, error: Exception, seed: int) -> dict[str, Any]:
        """The fields of a failed row."""
        return {"output": None, "finish_reason": None, "usage": None, "error": explained(error)}

    @classmethod
    def size(cls, fields: Fields, name: str) -> int:
        """The approximate length of a row."""
        value = fields.get(name)
        return len(value) if isinstance(value, str | Sequence) else 0


TASKS = {
    "generate": "specdec.batch.tasks:Generate",
    "chat": "specdec.batch.tasks:Chat",
    "summarize": "specdec.batch.tasks:Summarize",
    "transcribe": "specdec.batch.tasks:Transcribe",
    "openai": "specdec.batch.openai_files:OpenAI",
}
"""Task -> its class, imported on first use."""


def task_class(name: str) -> type[Task]:
    """The class of a task; raises OptionError for an unknown name, SpecdecError for a missing package."""
    if name not in TASKS:
        raise OptionError.of("task", f"one of {', '.join(TASKS)}", name)
    module, _, kind = TASKS[name].partition(":")
    try:
        found: type[Task] = getattr(import_module(module), kind)
    except ImportError as error:
        raise SpecdecError(
            f"rows in OpenAI's form need what a server needs ({error}): pip install -e '.[serve]'"
        ) from None
    return found


def explained(error: Exception) -> str:
    """An error in one line, with its type unless it is a SpecdecError."""
    text = " ".join(str(error).split())
    return text if isinstance(error, SpecdecError) else f"{type(error).__name__}: {text}"


@dataclass(frozen=True)
class BatchSpec:
    """What to do with every row; picklable.

    `task`: one of `TASKS`; `field`: the field to read, by default the task's; `options`: of every call; `loading`: of
    `from_pretrained`; `more`: of the task; `folder`: the base of relative paths in rows; `merges`: lines repeat the
    fields of their rows; `row_stats`: lines have statistics of passes and drafts.
    """

    task: str
    target: str
    draft: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    loading: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    name: str = "model"
    field: str | None = None
    folder: str = "."
    merges: bool = True
    row_stats: bool = False

    @property
    def input(self) -> str:
        """The field to read of every row."""
        return self.field or task_class(self.task).field

    def size(self, row: Row) -> int:
        """The approximate length of a row; rows of similar lengths share passes well."""
        return task_class(self.task).size(row.fields, self.input)

    def start(self) -> Worker:
        """Loads the models; raises OptionError and LoadError as `from_pretrained` does."""
        return Worker(self, task_class(self.task)(self))


@dataclass(frozen=True)
class OutputLine:
    """A finished row: its number, its line of output, whether it failed, and its new tokens."""

    number: int
    data: bytes
    failed: bool
    tokens: int


class Worker:
    """Loaded models; several threads may call it, and share passes."""

    def __init__(self, spec: BatchSpec, task: Task) -> None:
        self._spec, self._task = spec, task
        self._unexpected = 0  # consecutive errors that no row explains

    def __call__(self, row: Row) -> OutputLine:
        """The line of a row, an answer or its error."""
        seed, tokens, failed = fold(self._spec.seed, row.number), 0, False
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
        except Exception as error:  # of this row alone
            self._count(error)
            result, failed = self._task.failure(row.fields, error, seed), True
        return OutputLine(
            row.number, encoded({**row.fields, **result} if self._spec.merges else result), failed, tokens
        )

    def _count(self, error: Exception) -> None:
        """Raises EngineError after several unexpected errors, which rows do not explain."""
        unexpected = isinstance(error, RuntimeError | MemoryError) and not isinstance(error, SpecdecError)
        self._unexpected = self._unexpected + 1 if unexpected else 0
        if self._unexpected == _UNEXPECTED:
            raise EngineError(
                f"{_UNEXPECTED} rows in turn failed ({error}): what is written stays, and the same command goes on"
            ) from error


def encoded(line: Mapping[str, Any]) -> bytes:
    """A line of JSON in UTF-8; unknown types become text, NaN and infinities null."""
    try:
        return json.dumps(line, ensure_ascii=False, default=str, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(line, default=str).encode() + b"\n"
    except ValueError:
        return encoded(_finite(line))


def _finite(value: Any) -> Any:
    """The value with None for NaN and infinities."""
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_finite, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value
