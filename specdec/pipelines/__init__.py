"""Tasks on top of `SpecGenerator`: sound and long texts in, text out."""

from __future__ import annotations

from specdec.pipelines.speech.transcribe import Transcriber, Transcription
from specdec.pipelines.summaries.summarize import Summaries, Summarizer, Summary

__all__ = ["Summaries", "Summarizer", "Summary", "Transcriber", "Transcription"]
