"""The tasks of a batch: what they read of a row, and the answers they return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.batch.answer import BatchSpec, Fields, Task
from specdec.core.stats import Stats
from specdec.errors import OptionError
from specdec.generator.generation import Generation
from specdec.generator.generator import SpecGenerator
from specdec.generator.tokenizers import ids_of
from specdec.options.fields import plain
from specdec.options.generate import listed
from specdec.pipelines import Summarizer, Transcriber

_NEW_TOKENS = 128  # the default limit of summaries
_KV_SHARE = 0.5  # of free memory


class Generate(Task):
    """Continues prompts, text or token ids."""

    field = "prompt"

    def __init__(self, spec: BatchSpec) -> None:
        self._spec, self._generator = spec, load_generator(spec)
        if self._generator.tokenizer is None:
            raise OptionError(f"{spec.target} has no tokenizer beside it, and a batch writes text: add one there")
        self._generator.options(**spec.options)

    def answer(self, fields: Fields, seed: int) -> tuple[dict[str, Any], Stats]:
        """The continuation."""
        ids = wanted(fields, self._spec.input, str, list)
        if isinstance(ids, str):
            begin = listed(self._generator.target.model.generation_config.bos_token_id)[:1]
            ids = ids_of(self._generator.tokenizer, ids, verbose=False) or begin
        return answered(self._generator.generate([ids], **call_options(self._spec, fields, seed)), len(ids))


class Chat(Generate):
    """Answers conversations; a text is one message of a user."""

    field = "messages"

    def answer(self, fields: Fields, seed: int) -> tuple[dict[str, Any], Stats]:
        """The assistant's next message."""
        chat = wanted(fields, self._spec.input, str, list)
        messages = [{"role": "user", "content": chat}] if isinstance(chat, str) else list(map(_message, chat))
        if (system := self._spec.more.get("system")) is not None:
            messages = [{"role": "system", "content": system}, *messages]
        return answered(self._generator.generate(messages=messages, **call_options(self._spec, fields, seed)))

    @classmethod
    def size(cls, fields: Fields, name: str) -> int:
        """The length of all messages."""
        chat = fields.get(name)
        if not isinstance(chat, list):
            return super().size(fields, name)
        return sum(len(str(message.get("content"))) for message in chat if isinstance(message, dict))


class Summarize(Task):
    """Summarizes texts of any length."""

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
    """Transcribes recordings, given by their paths."""

    field = "audio"

    def __init__(self, spec: BatchSpec) -> None:
        self._transcriber = Transcriber.from_pretrained(spec.target, spec.draft, kv_budget=_KV_SHARE, **spec.loading)
        self._transcriber.generator.compile()
        self._spec = spec

    def answer(self, fields: Fields, seed: int) -> tuple[dict[str, Any], Stats]:
        """The transcript; with timestamps, also `chunks`."""
        path = Path(self._spec.folder) / wanted(fields, self._spec.input, str)
        found = self._transcriber(str(path), **call_options(self._spec, fields, seed % 2**62))
        answer = result([found["text"]], ["eos"], {"completion_tokens": found.stats.num_new_tokens})
        chunks = {"chunks": found["chunks"]} if "chunks" in found else {}
        return {**answer, **chunks, "language": found.language, "seconds": round(found.duration, 3)}, found.stats

    @classmethod
    def size(cls, fields: Fields, name: str) -> int:
        """0: unknown before the recording is read."""
        return 0


def load_generator(spec: BatchSpec, **more: Any) -> SpecGenerator:
    """The generator of a text task."""
    generator = SpecGenerator.from_pretrained(spec.target, spec.draft, kv_budget=_KV_SHARE, **spec.loading, **more)
    generator.compile()
    return generator


def wanted(fields: Fields, name: str, *kinds: type) -> Any:
    """A field of a row; raises OptionError where it is missing or of another type."""
    value = plain(fields.get(name))
    if value is None:
        raise OptionError(f"the row has no field `{name}`: name another one with --field, or add it")
    if not isinstance(value, kinds):
        raise OptionError.of(name, " or ".join("text" if kind is str else kind.__name__ for kind in kinds), value)
    return value


def call_options(spec: BatchSpec, fields: Fields, seed: int) -> dict[str, Any]:
    """The options of a row's call: those of its field `options`, if an object, override those of all rows."""
    found = fields.get("options")
    own = found if isinstance(found, Mapping) else {}
    return {"seed": seed, **spec.options, **{name: value for name, value in own.items() if value is not None}}


def answered(out: Generation, prompt_tokens: int | None = None) -> tuple[dict[str, Any], Stats]:
    """The fields of a call's answer, and its statistics; `prompt_tokens` None: read from the result."""
    texts, stats, sequences = out.texts, out.stats, out.sequences
    assert texts is not None
    assert stats is not None
    assert sequences is not None
    read = sequences.shape[1] - max(stats.lengths) if prompt_tokens is None else prompt_tokens
    usage = {"prompt_tokens": read, "completion_tokens": sum(stats.lengths)}
    return result(texts, stats.finish_reasons, usage), stats


def result(texts: Sequence[str], reasons: Sequence[str], usage: dict[str, int]) -> dict[str, Any]:
    """The fields of an answer; lists for several texts."""
    output, reason = (list(found) if len(found) > 1 else found[0] for found in (texts, reasons))
    return {"output": output, "finish_reason": reason, "usage": usage, "error": None}


def _message(message: Any) -> Any:
    """A message without the None that a table adds for other messages' fields."""
    return {k: v for k, v in message.items() if v is not None} if isinstance(message, Mapping) else message


def is_request(fields: Fields) -> bool:
    """Whether a row is a request of OpenAI's batch files."""
    return "custom_id" in fields and "body" in fields
