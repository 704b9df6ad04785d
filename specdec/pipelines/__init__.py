"""Work that models are used for, on top of `SpecGenerator`: text and sound in, text out.

Names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.pipelines.scoring import rouge
    from specdec.pipelines.summarize import Summaries, Summarizer, Summary
    from specdec.pipelines.text import Text
    from specdec.pipelines.transcribe import Transcriber, Transcription

_HOMES = {
    "Summaries": "summarize",
    "Summarizer": "summarize",
    "Summary": "summarize",
    "Text": "text",
    "Transcriber": "transcribe",
    "Transcription": "transcribe",
    "rouge": "scoring",
}
__all__ = ["Summaries", "Summarizer", "Summary", "Text", "Transcriber", "Transcription", "rouge"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specdec.pipelines' has no attribute {name!r}")
    return getattr(import_module(f"specdec.pipelines.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
