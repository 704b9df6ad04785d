"""The tasks of a batch: what is read of a row, what is done with it, and what its answer looks like."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from specdec.core.stats import Stats
from specdec.errors import OptionError, SpecdecError
from specdec.generator.generator import SpecGenerator
from specdec.generator.output import Generation
from specdec.options import bundled_models
from specdec.options.checks import plain
from specdec.options.generate import listed
from specdec.pipelines import Summarizer, Transcriber

if TYPE_CHECKING:
    from specdec.batch.answer import BatchSpec

Fields = Mapping[str, Any]
_NEW_TOKENS = 128  # the length limit of summaries where nothing sets one
_KV_SHARE = 0.5  # of the memory that is free


class Task(ABC):
    """One kind of work, with its models loaded; `field` is what it reads of a row where nobody says."""

    field: ClassVar[str]

    @abstractmethod
    def __init__(self, spec: BatchSpec) -> None:
        """Loads what `spec` names; raises OptionError for options that no row could be answered with."""

    @abstractmethod
    def answer(self, fields: Fields, seed: int) -> tuple[dict[str, Any], Stats]:
        """The fields that a row gets, and what they took; raises for a row that cannot be answered."""

    def failure(self, fields: Fields, error: Exception, seed: int) -> dict[str, Any]:
        """The fields of a row that went wrong."""
        return {"output": None, "finish_reason": None, "usage": None, "error": explained(error)}

    @classmethod
    def size(cls, fields: Fields, name: str) -> int:
        """About how long a row is."""
        value = fields.get(name)
        return len(value) if isinstance(value, str | Sequence) else 0


class Generate(Task):
    """Prompts, text or token ids, are continued."""

    field = "prompt"

    def __init__(self, spec: BatchSpec) -> None:
        self._spec, self._generator = spec, load_generator(spec)
        if self._generator.tokenizer is None:
            raise OptionError(f"{spec.target} has no tokenizer beside it, and a batch writes text: add one there")
        self._generator.options(**spec.options)

    def answer(self, fields: Fields, seed: int) -> tuple[dict[str, Any], Stats]:
        """The text that follows."""
        ids = self._ids(wanted(fields, self._spec.input, str, list))
        return answered(self._generator.generate([ids], **call_options(self._spec, fields, seed)), len(ids))

    def _ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        ids: list[int] = self._generator.tokenizer(prompt, verbose=False)["input_ids"]
        return ids or listed(self._generator.target.model.generation_config.bos_token_id)[:1]


class Chat(Generate):
    """Conversations are answered; a text is one message of a user."""

    field = "messages"

    def answer(self, fields: Fields, seed: int) -> tuple[dict[str, Any], Stats]:
        """The assistant's next message."""
        said = wanted(fields, self._spec.input, str, list)
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else list(map(_message, said))
        if (system := self._spec.more.get("system")) is not None:
            messages = [{"role": "system", "content": system}, *messages]
        return answered(self._generator.generate(messages=messages, **call_options(self._spec, fields, seed)))

    @classmethod
    def size(cls, fields: Fields, name: str) -> int:
        """The length of all messages."""
        said = fields.get(name)
        if not isinstance(said, list):
            return super().size(fields, name)
        return sum(len(str(message.get("content"))) for message in said if isinstance(message, dict))


class Summarize(Task):
    """Texts of any length are summarised."""

    field = "text"

    def __init__(self, spec: BatchSpec) -> None:
        from specdec.pipelines.summaries.summarize import TASK

        generator = load_generator(spec, task=TASK)
        limits = generator.options(**spec.options)
        unlimited = limits.max_new_tokens is None and limits.max_length is None
        self._limit = {"max_new_tokens": _NEW_TOKENS} if unlimited else {}
        self._spec, self._summarizer = spec, Summarizer(generator, **spec.more)

    def answer(self, fields: Fields, seed: int) -> tuple[dict[str, Any], Stats]:
        """The summary."""
        text = wanted(fields, self._spec.input, str)
        found = self._summarizer.summarize([text], **{**self._limit, **call_options(self._spec, fields, seed)})
        texts, stats = found.documents[0].texts, found.stats
        return result(texts, stats.finish_reasons[-len(texts) :], {"completion_tokens": stats.num_new_tokens}), stats


class Transcribe(Task):
    """Recordings, files by their paths, are written down."""

    field = "audio"

    def __init__(self, spec: BatchSpec) -> None:
        target, draft = located(spec)
        self._transcriber = Transcriber.from_pretrained(target, draft, kv_budget=_KV_SHARE, **spec.loading)
        self._spec = spec

    def answer(self, fields: Fields, seed: int) -> tuple[dict[str, Any], Stats]:
        """What was said, with `chunks` where timestamps are asked for."""
        path = Path(self._spec.folder) / wanted(fields, self._spec.input, str)
        found = self._transcriber(str(path), **call_options(self._spec, fields, seed % 2**62))
        said = result([found["text"]], ["eos"], {"completion_tokens": found.stats.num_new_tokens})
        chunks = {"chunks": found["chunks"]} if "chunks" in found else {}
        return {**said, **chunks, "language": found.language, "seconds": round(found.duration, 3)}, found.stats

    @classmethod
    def size(cls, fields: Fields, name: str) -> int:
        """Nothing is known before a recording is read."""
        return 0


def load_generator(spec: BatchSpec, **more: Any) -> SpecGenerator:
    """The models of a task over text."""
    target, draft = located(spec)
    return SpecGenerator.from_pretrained(target, draft, kv_budget=_KV_SHARE, **spec.loading, **more)


def located(spec: BatchSpec) -> tuple[str, Any]:
    """Target and draft, those that come with the package by their folders."""
    draft = spec.draft
    if isinstance(draft, str):
        draft = bundled_models.locate(draft, "draft")
    elif isinstance(draft, tuple | list):
        draft = tuple(bundled_models.locate(part, "draft") for part in draft)
    return bundled_models.locate(spec.target, "target"), draft


def wanted(fields: Fields, name: str, *kinds: type) -> Any:
    """The field that is read; raises OptionError where it is missing or of another type."""
    value = plain(fields.get(name))
    if value is None:
        raise OptionError(f"the row has no field `{name}`: name another one with --field, or add it")
    if not isinstance(value, kinds):
        raise OptionError.of(name, " or ".join("text" if kind is str else kind.__name__ for kind in kinds), value)
    return value


def call_options(spec: BatchSpec, fields: Fields, seed: int) -> dict[str, Any]:
    """The options of a row's call: its own field `options`, where that is an object, over those of all rows."""
    found = fields.get("options")
    own = found if isinstance(found, Mapping) else {}
    return {"seed": seed, **spec.options, **{name: value for name, value in own.items() if value is not None}}


def answered(out: Generation, prompt_tokens: int | None = None) -> tuple[dict[str, Any], Stats]:
    """The fields that come of a call of `generate`, and its statistics; the result tells how long a chat is."""
    texts, stats, sequences = out.texts, out.stats, out.sequences
    assert texts is not None
    assert stats is not None
    assert sequences is not None
    read = sequences.shape[1] - max(stats.lengths) if prompt_tokens is None else prompt_tokens
    usage = {"prompt_tokens": read, "completion_tokens": sum(stats.lengths)}
    return result(texts, stats.finish_reasons, usage), stats


def result(texts: Sequence[str], reasons: Sequence[str], usage: dict[str, int]) -> dict[str, Any]:
    """The fields of an answer; lists of texts and reasons where there are several."""
    output, reason = (list(found) if len(found) > 1 else found[0] for found in (texts, reasons))
    return {"output": output, "finish_reason": reason, "usage": usage, "error": None}


def is_several(answer: Fields) -> bool:
    """Whether an answer has several texts."""
    return isinstance(answer.get("output"), list)


def as_several(answer: Fields) -> dict[str, Any]:
    """An answer with lists, be it of one text; null stays null."""
    return {
        name: [value] if name in ("output", "finish_reason") and isinstance(value, str) else value
        for name, value in answer.items()
    }


def _message(message: Any) -> Any:
    """A message without fields that only others have, as a table gives it."""
    return {k: v for k, v in message.items() if v is not None} if isinstance(message, Mapping) else message


def explained(error: Exception) -> str:
    """What went wrong, in a line; what specdec raises on purpose speaks for itself."""
    text = " ".join(str(error).split())
    return text if isinstance(error, SpecdecError) else f"{type(error).__name__}: {text}"


def is_request(fields: Fields) -> bool:
    """Whether a row is a request in OpenAI's form."""
    return "custom_id" in fields and "body" in fields


TASKS = {
    "generate": "specdec.batch.tasks:Generate",
    "chat": "specdec.batch.tasks:Chat",
    "summarize": "specdec.batch.tasks:Summarize",
    "transcribe": "specdec.batch.tasks:Transcribe",
    "openai": "specdec.batch.openai_files:OpenAI",
}
"""Task -> its class, which is imported where it is asked for."""


def task_class(name: str) -> type[Task]:
    """The class of a task; raises OptionError for a name that is none, SpecdecError where a package is missing."""
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
