"""The tasks of a batch: each loads models, and answers rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from specdec.batch.rows import InputRow
from specdec.core.stats import Stats
from specdec.errors import OptionError, SpecdecError
from specdec.generator import memories
from specdec.generator.generation import Generation
from specdec.generator.generator import SpecGenerator
from specdec.generator.tokenizers import ids_of
from specdec.options.fields import plain
from specdec.options.generate import to_list
from specdec.pipelines import Summarizer, Transcriber
from specdec.pipelines.summaries.summarize import TASK

_KV_SHARE = 0.5  # share of the free memory
Fields = Mapping[str, Any]
INPUTS = {"generate": "prompt", "chat": "messages", "summarize": "text", "transcribe": "audio", "openai": "body"}
"""Task -> the field that it reads of a row by default."""


@dataclass(frozen=True)
class BatchSpec:
    """What to do with every row.

    `task`: one of `INPUTS`; `field`: the field to read, by default the task's; `options`: arguments of every call;
    `loading`: arguments of `from_pretrained`; `more`: arguments of the task; `folder`: the base of relative paths in
    rows; `row_stats`: lines have statistics of passes and drafts.
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
    row_stats: bool = False

    @property
    def input(self) -> str:
        """The field to read of every row."""
        return self.field or INPUTS[self.task]

    def size(self, row: InputRow) -> int:
        """The approximate length of a row; rows of similar lengths share passes well. 0 for a recording."""
        return 0 if self.task == "transcribe" else len(str(row.fields.get(self.input)))


class Task(Protocol):
    """One task; making it loads its models, and raises OptionError for invalid options."""

    def __init__(self, spec: BatchSpec) -> None: ...

    def answer(self, fields: Fields, seed: int) -> tuple[dict[str, Any], Stats]:
        """The answer's fields and the call's statistics; raises for a row without an answer."""

    def failure(self, fields: Fields, error: Exception, seed: int) -> dict[str, Any]:
        """The fields of a failed row."""
        return {"output": None, "finish_reason": None, "usage": None, "error": error_text(error)}


class GenerateTask(Task):
    """Continues prompts, text or token ids."""

    def __init__(self, spec: BatchSpec) -> None:
        self._spec, self._generator = spec, load_generator(spec)
        if self._generator.tokenizer is None:
            raise OptionError(f"{spec.target} has no tokenizer beside it, and a batch writes text: add one there")
        self._generator.options(**spec.options)

    def answer(self, fields: Fields, seed: int) -> tuple[dict[str, Any], Stats]:
        ids = read_field(fields, self._spec.input, str, list)
        if isinstance(ids, str):
            begin = to_list(self._generator.target.model.generation_config.bos_token_id)[:1]
            ids = ids_of(self._generator.tokenizer, ids, verbose=False) or begin
        return answer_of(self._generator.generate([ids], **row_options(self._spec, fields, seed)), len(ids))


class ChatTask(GenerateTask):
    """Answers conversations; a text is one message of a user."""

    def answer(self, fields: Fields, seed: int) -> tuple[dict[str, Any], Stats]:
        chat = read_field(fields, self._spec.input, str, list)
        messages = [{"role": "user", "content": chat}] if isinstance(chat, str) else list(map(_message, chat))
        if (system := self._spec.more.get("system")) is not None:
            messages = [{"role": "system", "content": system}, *messages]
        return answer_of(self._generator.generate(messages=messages, **row_options(self._spec, fields, seed)))


class SummarizeTask(Task):
    """Summarizes texts of any length."""

    def __init__(self, spec: BatchSpec) -> None:
        self._summarizer = Summarizer(load_generator(spec, task=TASK), **spec.more)
        self._spec = replace(spec, options=self._summarizer.with_limit(spec.options))

    def answer(self, fields: Fields, seed: int) -> tuple[dict[str, Any], Stats]:
        text = read_field(fields, self._spec.input, str)
        summaries = self._summarizer.summarize([text], **row_options(self._spec, fields, seed))
        [summary], stats = summaries.documents, summaries.stats
        usage = {"completion_tokens": stats.num_new_tokens}
        return result(summary.texts, summary.finish_reasons, usage), stats


class TranscribeTask(Task):
    """Transcribes recordings, given by their paths."""

    def __init__(self, spec: BatchSpec) -> None:
        self._transcriber = Transcriber.from_pretrained(spec.target, spec.draft, kv_budget=_KV_SHARE, **spec.loading)
        self._spec = spec

    def answer(self, fields: Fields, seed: int) -> tuple[dict[str, Any], Stats]:
        """The transcript; with timestamps, also `chunks`."""
        path = Path(self._spec.folder) / read_field(fields, self._spec.input, str)
        transcription = self._transcriber(str(path), **row_options(self._spec, fields, seed % 2**62))
        cut = [reason for reason in transcription.finish_reasons if reason != "eos"]  # windows
        reason = cut[0] if cut else "eos"
        answer = result([transcription["text"]], [reason], {"completion_tokens": transcription.stats.num_new_tokens})
        chunks = {"chunks": transcription["chunks"]} if "chunks" in transcription else {}
        facts = {"language": transcription.language, "seconds": round(transcription.duration, 3)}
        return {**answer, **chunks, **facts}, transcription.stats


def error_text(error: Exception) -> str:
    """An error in one line, with its type unless it is a SpecdecError."""
    text = " ".join(str(error).split())
    return text if isinstance(error, SpecdecError) else f"{type(error).__name__}: {text}"


def load_generator(spec: BatchSpec, **more: Any) -> SpecGenerator:
    arguments = {"kv_budget": _KV_SHARE, "memory": memories.DEFAULT, **spec.loading, **more}
    return SpecGenerator.from_pretrained(spec.target, spec.draft, **arguments)


def read_field(fields: Fields, name: str, *kinds: type) -> Any:
    """A field of a row; raises OptionError where it is missing or of another type."""
    value = plain(fields.get(name))
    if value is None:
        raise OptionError(f"the row has no field `{name}`: name another one with --field, or add it")
    if not isinstance(value, kinds):
        raise OptionError.of(name, " or ".join("text" if kind is str else kind.__name__ for kind in kinds), value)
    return value


def row_options(spec: BatchSpec, fields: Fields, seed: int) -> dict[str, Any]:
    """A row's field `options`, if an object, overrides the options of the run."""
    options = fields.get("options")
    overrides = options if isinstance(options, Mapping) else {}
    return {"seed": seed, **spec.options, **{name: value for name, value in overrides.items() if value is not None}}


def answer_of(out: Generation, prompt_tokens: int | None = None) -> tuple[dict[str, Any], Stats]:
    """The fields of a call's answer, and its statistics; `prompt_tokens` None: read from the result."""
    texts, stats, sequences = out.texts, out.stats, out.sequences
    assert texts is not None
    assert stats is not None
    assert sequences is not None
    num_prompt = sequences.shape[1] - max(stats.lengths) if prompt_tokens is None else prompt_tokens
    usage = {"prompt_tokens": num_prompt, "completion_tokens": sum(stats.lengths)}
    return result(texts, stats.finish_reasons, usage), stats


def result(texts: Sequence[str], reasons: Sequence[str], usage: dict[str, int]) -> dict[str, Any]:
    """The fields of an answer; lists for several texts."""
    output, reason = (list(values) if len(values) > 1 else values[0] for values in (texts, reasons))
    return {"output": output, "finish_reason": reason, "usage": usage, "error": None}


def _message(message: Any) -> Any:
    """A message without the None that a table adds for other messages' fields."""
    return {k: v for k, v in message.items() if v is not None} if isinstance(message, Mapping) else message
