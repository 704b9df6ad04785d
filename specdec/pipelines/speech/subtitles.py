"""Chunks with timestamps as subtitles: SubRip (srt) and WebVTT (vtt)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any


def srt(chunks: Iterable[Mapping[str, Any]]) -> str:
    """SubRip: numbered cues, `HH:MM:SS,mmm`, and an empty line after each."""
    cues = enumerate(_cues(chunks, ","), 1)
    return "".join(f"{number}\n{times}\n{text}\n\n" for number, (times, text) in cues)


def vtt(chunks: Iterable[Mapping[str, Any]]) -> str:
    """WebVTT: cues with `HH:MM:SS.mmm`, reserved characters escaped."""
    cues = [f"{times}\n{escape(text, quote=False)}\n\n" for times, text in _cues(chunks, ".")]
    return "WEBVTT\n\n" + "".join(cues)


def _cues(chunks: Iterable[Mapping[str, Any]], mark: str) -> list[tuple[str, str]]:
    """The line of times and the text, in one line, of each chunk that has text."""
    found = []
    for chunk in chunks:
        start, end = chunk["timestamp"]
        text = " ".join(chunk["text"].split()).replace("-->", "->")
        if text:
            start = 0.0 if start is None else start
            end = start if end is None else end
            found.append((f"{_clock(start, mark)} --> {_clock(max(start, end), mark)}", text))
    return found


def _clock(seconds: float, mark: str) -> str:
    """Hours, minutes, seconds and, after `mark`, thousandths."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest:02}{mark}{thousandths:03}"
