"""What becomes of a row: models are loaded, and each row gets its answer, or says what was wrong with it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from specdec.batch.rows import Row
from specdec.batch.tasks import Task, task_class
from specdec.decoding.noise import fold
from specdec.errors import EngineError, OptionError, SpecdecError

_ODD = 8
_COUNTS = ("num_target_passes", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "seconds")


@dataclass(frozen=True)
class BatchSpec:
    """What is done with every row; it can be pickled, and `start` loads what it needs.

    `task` is one of `TASKS`; `field` names what is read of a row, if not the task's own. `options` go with every call,
    `loading` to `from_pretrained`, `more` to the task. `folder` is where relative paths in rows begin. `merges` says
    that lines hold the fields of their rows too, `row_stats` that they tell of passes and drafts.
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
        """The field that is read of every row."""
        return self.field or task_class(self.task).field

    @property
    def settings(self) -> dict[str, Any]:
        """What the answers depend on, as JSON has it."""
        known: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        del known["folder"]  # files may move between two runs
        return known

    def size(self, row: Row) -> int:
        """About how long a row is; rows of alike sizes share passes well."""
        return task_class(self.task).size(row.fields, self.input)

    def start(self) -> Worker:
        """Loads the models; raises OptionError and LoadError as `from_pretrained` does."""
        return Worker(self, task_class(self.task)(self))


@dataclass(frozen=True)
class OutputLine:
    """A finished row: its number, its line of the output, whether it failed, and how many tokens were written."""

    number: int
    data: bytes
    failed: bool
    tokens: int


class Worker:
    """Models at work: called with a row it returns its line; several threads may call, and share the passes."""

    def __init__(self, spec: BatchSpec, task: Task) -> None:
        self._spec, self._task = spec, task
        self._odd = 0  # rows, one after the other, that failed for none of the reasons that lie in a row

    def __call__(self, row: Row) -> OutputLine:
        """The line of a row; what goes wrong with it is told there."""
        seed, tokens, failed = fold(self._spec.seed, row.number), 0, False
        try:
            if row.error is not None:
                raise OptionError(row.error)
            result, stats = self._task.answer(row.fields, seed)
            tokens = stats.num_new_tokens
            if self._spec.row_stats:
                result |= {"stats": {name: getattr(stats, name) for name in _COUNTS}}
            self._odd = 0
        except EngineError:
            raise
        except Exception as error:  # one row's error is no other's
            self._count(error)
            result, failed = self._task.failure(row.fields, error, seed), True
        return OutputLine(
            row.number, encoded({**row.fields, **result} if self._spec.merges else result), failed, tokens
        )

    def _count(self, error: Exception) -> None:
        """Raises EngineError where it is not the rows that are wrong: what they would be told now is no answer."""
        odd = isinstance(error, RuntimeError | MemoryError) and not isinstance(error, SpecdecError)
        self._odd = self._odd + 1 if odd else 0
        if self._odd == _ODD:
            raise EngineError(
                f"{_ODD} rows in turn failed ({error}): what is written stays, and the same command goes on"
            ) from error


def encoded(line: Mapping[str, Any]) -> bytes:
    """A line of JSON in UTF-8, values that JSON does not know as text, and numbers that it does not know as null."""
    try:
        return json.dumps(line, ensure_ascii=False, default=str, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:  # half of a character somewhere
        return json.dumps(line, default=str).encode() + b"\n"
    except ValueError:
        return encoded(_finite(line))


def _finite(value: Any) -> Any:
    """The same without numbers that are infinite or none."""
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_finite, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value
