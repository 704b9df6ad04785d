"""Chunks with timestamps as subtitles: SubRip (srt) and WebVTT (vtt)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import inf
from typing import Any, TypeVar

T = TypeVar("T")
Chunk = Mapping[str, Any]
_PIECE = re.compile(r"\s*\S+")
_SHORTEST = 0.1  # seconds; players drop cues without length


def srt(cues: Iterable[Chunk], width: int | None = None, words: int | None = None, lines: int | None = None) -> str:
    """SubRip: numbered cues, `HH:MM:SS,mmm`, and an empty line after each; takes the arguments of `vtt`."""
    pairs = enumerate(_cues(cues, width, words, lines), 1)
    return "".join(f"{number}\n{cue.times(',')}\n{cue.text().replace('-->', '->')}\n\n" for number, cue in pairs)


def vtt(cues: Iterable[Chunk], width: int | None = None, words: int | None = None, lines: int | None = None) -> str:
    """WebVTT: cues with `HH:MM:SS.mmm`, reserved characters escaped, and the time of each word that has one.

    A cue is a chunk of `text` and `timestamp`, perhaps with its `words`, which are chunks too. Lines have at most
    `width` characters, longer words excepted; cues have at most `lines` lines, and cues with words have at most `words`
    words. Parts of a cue without words share its time by their numbers of characters.
    """
    parts = _cues(cues, width, words, lines)
    return "WEBVTT\n\n" + "".join(f"{cue.times('.')}\n{cue.text(cue.with_time)}\n\n" for cue in parts)


@dataclass(frozen=True)
class _Piece:
    """Characters that stay in one line, and the space before them; seconds from `start` to `end`.

    `before`: the start of the previous word; infinite without a time: within a word, or in text without words.
    """

    gap: str
    text: str
    start: float
    end: float
    before: float


@dataclass(frozen=True)
class _Cue:
    """What is shown from `start` to `end`."""

    lines: Sequence[Sequence[_Piece]]
    start: float
    end: float

    def times(self, mark: str) -> str:
        return f"{_clock(self.start, mark)} --> {_clock(self.end, mark)}"

    def text(self, form: Callable[[_Piece], str] = lambda piece: piece.text) -> str:
        return "\n".join("".join(piece.gap + form(piece) for piece in line).strip() for line in self.lines)

    def with_time(self, piece: _Piece) -> str:
        """A piece with its time, which must be within the cue and after the word before."""
        is_timed = max(piece.before, self.start) < piece.start < self.end
        return (f"<{_clock(piece.start, '.')}>" if is_timed else "") + escape(piece.text, quote=False)


def _cues(chunks: Iterable[Chunk], width: int | None, words: int | None, lines: int | None) -> list[_Cue]:
    """The cues that are shown; each has a length, and ends at latest where the next begins."""
    cues: list[_Cue] = []
    for chunk in chunks:
        words_with_text = [word for word in chunk.get("words", [chunk]) if word["text"].strip()]
        for group in _groups(words_with_text, words):
            for cue_lines in _groups(_even_lines(list(_pieces(group)), width, lines), lines):
                start, end = cue_lines[0][0].start, cue_lines[-1][-1].end
                if cues:
                    last = cues.pop()
                    start = max(start, min(last.end, last.start + _SHORTEST))
                    cues.append(_Cue(last.lines, last.start, min(last.end, start)))
                cues.append(_Cue(cue_lines, start, end if end > start else start + _SHORTEST))
    return cues


def _groups(items: Sequence[T], most: int | None) -> Iterator[Sequence[T]]:
    """The items in groups of at most `most`."""
    step = most or max(len(items), 1)
    return (items[first : first + step] for first in range(0, len(items), step))


def _pieces(words: Iterable[Chunk]) -> Iterator[_Piece]:
    """The words cut at spaces; the pieces of a word share its time by their numbers of characters."""
    before = inf
    for word in words:
        text, (start, end) = word["text"].rstrip(), word["timestamp"]
        start = start or 0.0
        pace = ((start if end is None else end) - start) / len(text)
        for match in _PIECE.finditer(text):
            begins, ends = (round(start + pace * i, 3) for i in match.span())
            piece = match[0].strip()
            yield _Piece(" " if piece != match[0] else "", piece, begins, ends, inf if match.start() else before)
        before = start


def _lines(pieces: Iterable[_Piece], width: int | None) -> list[list[_Piece]]:
    """The pieces in lines of at most `width` characters."""
    lines, length = list[list[_Piece]](), 0
    for piece in pieces:
        length += len(piece.gap + piece.text)
        if not lines or (width is not None and length > width):
            lines.append([])
            length = len(piece.text)
        lines[-1].append(piece)
    return lines


def _even_lines(pieces: Sequence[_Piece], width: int | None, most: int | None) -> list[list[_Piece]]:
    """The lines, as narrow as their number, or their number of cues of `most` lines, allows: no last word is alone."""
    lines = _lines(pieces, width)
    if width is None or not lines:
        return lines
    room = len(lines) if most is None or len(lines) <= most else -(-len(lines) // most) * most
    return next(even for narrow in range(1, width + 1) if len(even := _lines(pieces, narrow)) <= room)


def _clock(seconds: float, mark: str) -> str:
    """Hours, minutes, seconds and, after `mark`, thousandths."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest:02}{mark}{thousandths:03}"
