"""Chunks with timestamps as subtitles: SubRip (srt) and WebVTT (vtt)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

Chunk = Mapping[str, Any]
_PIECE = re.compile(r"\s*\S+")
_SHORTEST = 0.1  # seconds; players drop cues without length


def srt(cues: Iterable[Chunk], width: int | None = None, words: int | None = None) -> str:
    """SubRip: numbered cues, `HH:MM:SS,mmm`, and an empty line after each; `width` and `words` are those of `vtt`."""
    shown = enumerate(_split(cues, words), 1)
    return "".join(
        f"{number}\n{_times(cue, ',')}\n{_lines(cue, width).replace('-->', '->')}\n\n" for number, cue in shown
    )


def vtt(cues: Iterable[Chunk], width: int | None = None, words: int | None = None) -> str:
    """WebVTT: cues with `HH:MM:SS.mmm`, reserved characters escaped, and the time of each word that has one.

    A cue is a chunk of `text` and `timestamp`, perhaps with its `words`, which are chunks too. Lines have at most
    `width` characters, longer words excepted; cues with `words` at most `words` of them.
    """
    shown = (f"{_times(cue, '.')}\n{_lines(cue, width, partial(_timed, cue))}\n\n" for cue in _split(cues, words))
    return "WEBVTT\n\n" + "".join(shown)


def _split(cues: Iterable[Chunk], most: int | None) -> Iterator[Sequence[Chunk]]:
    """The words of each cue, at most `most`; a cue without words is one."""
    for cue in cues:
        words = [word for word in cue.get("words", [cue]) if word["text"].strip()]
        step = most or max(len(words), 1)
        yield from (words[first : first + step] for first in range(0, len(words), step))


def _span(cue: Sequence[Chunk]) -> tuple[float, float]:
    """Begin and end in seconds; the end is the later."""
    start, end = cue[0]["timestamp"][0] or 0.0, cue[-1]["timestamp"][1]
    return start, start + _SHORTEST if end is None or round(end, 3) <= round(start, 3) else end


def _times(cue: Sequence[Chunk], mark: str) -> str:
    return " --> ".join(_clock(seconds, mark) for seconds in _span(cue))


def _lines(
    cue: Sequence[Chunk], width: int | None, shown: Callable[[int, str], str] = lambda number, text: text
) -> str:
    """The text in lines; `shown` returns the form of a word, or of a part of it, by the word's number in the cue."""
    lines, length = "", 0
    for number, word in enumerate(cue):
        for piece in _PIECE.findall(word["text"]):
            text = piece.strip()
            gap = " " if length and text != piece else ""
            if length and width is not None and length + len(gap + text) > width:
                gap, length = "\n", -1
            lines += gap + shown(number, text)
            length += len(gap + text)
    return lines


def _timed(cue: Sequence[Chunk], number: int, text: str) -> str:
    """A word with its time, which must be within the cue and after the word before."""
    before, start = ((cue[i]["timestamp"][0] or 0.0) for i in (max(number - 1, 0), number))
    tag = f"<{_clock(start, '.')}>" if before < start < _span(cue)[1] else ""
    return tag + escape(text, quote=False)


def _clock(seconds: float, mark: str) -> str:
    """Hours, minutes, seconds and, after `mark`, thousandths."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest:02}{mark}{thousandths:03}"
