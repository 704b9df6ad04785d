"""Cuts long text between sentences into pieces that fit a model."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence

from specdec.errors import OptionError

Count = Callable[[Sequence[str]], list[int]]

# A sentence ends at a mark and its closing quotes, brackets and emphasis, or at an empty line.
_END = re.compile(r"""(?:[.!?…]+["'”’»)\]*_`]*\s+|[。！？]+[”’」』）]*\s*|\s*\n\s*\n\s*)""")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\[\"'“‘])(?:[^\W\d_](?:\.\w)*|Mrs?|Ms|Dr|Prof|Rev|Gen|Sen|Rep|Lt|Col|Capt|St|Mt|Jr|Sr|vs|cf|ca|approx|al|et|"
    r"Fig|fig|Eq|No|no|Vol|vol|pp|Inc|Ltd|Corp|Co|Jan|Feb|Mar|Apr|Aug|Sept?|Oct|Nov|Dec)\.\s+$"
)
_WHOLE = re.compile(r"""[.!?…。！？]["'”’»)\]」』）*_`]*$""")
_BREAKS = (re.compile(r"\n"), re.compile(r"\s"))


def sentences(text: str) -> list[str]:
    """The sentences of a text, each with the whitespace after it; joined they are the text.

    A full stop ends no sentence after an initial or a common English abbreviation, nor before a small letter.
    """
    pieces, begin = [], 0
    for end in _END.finditer(text):
        if not _goes_on(text, begin, end):
            pieces.append(text[begin : end.end()])
            begin = end.end()
    return [*pieces, text[begin:]] if begin < len(text) else pieces


def whole_sentences(text: str) -> str:
    """A text that was cut, up to its last whole sentence or line; all of it where none is whole."""
    if _WHOLE.search(text.rstrip()):
        return text
    return max("".join(sentences(text)[:-1]), text.rpartition("\n")[0], key=len).rstrip() or text


def _goes_on(text: str, begin: int, end: re.Match[str]) -> bool:
    """Whether the sentence from `begin` goes on after the match `end`."""
    if not end.group().startswith(".") or re.search(r"\n\s*\n", end.group()):
        return end.end() == begin
    return text[end.end() : end.end() + 1].islower() or bool(_ABBREVIATION.search(text, begin, end.end()))


def cut_text(text: str, limit: int, count: Count, *, even: bool = True) -> list[str]:
    """The text in as few pieces of whole sentences as possible, each of at most `limit` tokens.

    `count` returns the tokens of several texts, template included. A longer sentence is halved at a line end or space
    near its middle, or else inside a word. `even`: the pieces are about equally long; otherwise each is filled before
    the next. Raises OptionError where not even a character fits.
    """
    text = text.strip()
    if count([text])[0] <= limit:
        return [text]
    around = count([""])[0]
    if around >= limit:
        raise OptionError(f"{limit} tokens leave no room for text, since the template takes {around}")
    pieces = [part for piece in sentences(text) for part in _cut(piece, limit, count)]
    sizes = [size - around for size in count(pieces)]
    room = limit - around
    while True:
        part_limit = room
        if even:  # the smallest limit that needs no more pieces
            fewest = len(_pack(sizes, room))
            part_limit = bisect_left(range(room), True, key=lambda narrow: len(_pack(sizes, narrow)) <= fewest)
        chunks = [chunk for group in _pack(sizes, part_limit) if (chunk := "".join(pieces[group]).strip())]
        excess = max(count(chunks)) - limit
        if excess <= 0 or len(chunks) == len(pieces):
            return chunks
        room = part_limit - excess  # joined pieces can have more tokens than single ones


def _cut(piece: str, limit: int, count: Count) -> list[str]:
    """The piece, halved until its parts fit the `limit`."""
    if count([piece])[0] <= limit:
        return [piece]
    if len(piece) < 2:
        raise OptionError(f"{limit} tokens leave no room for text: a single character takes {count([piece])[0]}")
    at = half = len(piece) // 2
    for pattern in _BREAKS:  # a line end, else a space, nearest to the middle and within the middle half
        ends = (m.end() for m in pattern.finditer(piece, half // 2, len(piece) - half // 2) if m.end() < len(piece))
        if (nearest := min(ends, key=lambda end: abs(end - half), default=None)) is not None:
            at = nearest
            break
    return _cut(piece[:at], limit, count) + _cut(piece[at:], limit, count)


def _pack(sizes: Sequence[int], limit: int) -> list[slice]:
    """Runs of neighbours, each of at least one and filled up to `limit`."""
    runs, begin, total = [], 0, 0
    for i, size in enumerate(sizes):
        if total + size > limit and i > begin:
            runs.append(slice(begin, i))
            begin, total = i, 0
        total += size
    return [*runs, slice(begin, len(sizes))]
