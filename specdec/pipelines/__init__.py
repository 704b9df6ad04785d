"""Tasks on top of `SpecGenerator`: text and sound in, text out.

A new pipeline is a class and a line in `PIPELINES`. Names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol

from specdec.errors import OptionError

if TYPE_CHECKING:
    from specdec.generator.generator import SpecGenerator
    from specdec.pipelines.scoring import rouge
    from specdec.pipelines.speech.transcribe import Transcriber, Transcription
    from specdec.pipelines.summaries.summarize import Summaries, Summarizer, Summary
    from specdec.pipelines.text import Text

PIPELINES: dict[str, str | type[Any]] = {
    "text-generation": "text:Text",
    "summarization": "summaries.summarize:Summarizer",
    "automatic-speech-recognition": "speech.transcribe:Transcriber",
}
"""Pipelines by transformers' name of their task: a class, or "module:Class" in this package."""
_HOMES = {
    **{kind.partition(":")[2]: kind.partition(":")[0] for kind in PIPELINES.values() if isinstance(kind, str)},
    "Summaries": "summaries.summarize",
    "Summary": "summaries.summarize",
    "Transcription": "speech.transcribe",
    "rouge": "scoring",
}
__all__ = [
    "PIPELINES",
    "Pipeline",
    "Summaries",
    "Summarizer",
    "Summary",
    "Text",
    "Transcriber",
    "Transcription",
    "pipeline",
    "rouge",
]


class Pipeline(Protocol):
    """A pipeline: its generator, and a call."""

    generator: SpecGenerator

    def __call__(self, inputs: Any, /, **options: Any) -> Any:
        """The results for `inputs`; `options` are those of the pipeline and of `SpecGenerator.generate`."""
        ...


def pipeline(task: str, target: Any, draft: Any = None, **options: Any) -> Pipeline:
    """The pipeline of a task in `PIPELINES`, for a target and a draft.

    `target`: an id or path to load, with the `options` of the class's `from_pretrained`; or a model or `SpecGenerator`,
    with the `options` of the class. Raises OptionError for an unknown task.
    """
    if task not in PIPELINES:
        raise OptionError.of("task", f"one of {', '.join(PIPELINES)}", task)
    found = PIPELINES[task]
    kind: Any = __getattr__(found.partition(":")[2]) if isinstance(found, str) else found
    make = kind.from_pretrained if isinstance(target, str | PathLike) else kind
    made: Pipeline = make(target, draft, **options)
    return made


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specdec.pipelines' has no attribute {name!r}")
    return getattr(import_module(f"specdec.pipelines.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
