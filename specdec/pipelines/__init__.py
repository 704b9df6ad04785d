"""Tasks on top of `SpecGenerator`: text and sound in, text out. A new pipeline is a class and a line in `PIPELINES`."""

from __future__ import annotations

from os import PathLike
from typing import Any, Protocol

from specdec.errors import OptionError
from specdec.generator.generator import SpecGenerator
from specdec.pipelines.scoring import rouge
from specdec.pipelines.speech.transcribe import Transcriber, Transcription
from specdec.pipelines.summaries.summarize import Summaries, Summarizer, Summary

PIPELINES: dict[str, type[Any]] = {
    "summarization": Summarizer,
    "automatic-speech-recognition": Transcriber,
}
"""Pipelines by transformers' name of their task."""
__all__ = [
    "PIPELINES",
    "Pipeline",
    "Summaries",
    "Summarizer",
    "Summary",
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
    kind = PIPELINES[task]
    make = kind.from_pretrained if isinstance(target, str | PathLike) else kind
    made: Pipeline = make(target, draft, **options)
    return made
