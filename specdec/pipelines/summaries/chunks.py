"""Long text in pieces that fit a model, cut between sentences."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence

from specdec.errors import OptionError

Count = Callable[[Sequence[str]], list[int]]

# A sentence ends at its mark, with the quotes and brackets that close after it, or at an empty line.
_END = re.compile(r"""(?:[.!?…]+["'”’»)\]]*\s+|[。！？]+[”’」』）]*\s*|\s*\n\s*\n\s*)""")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\[\"'“‘])(?:[^\W\d_](?:\.\w)*|Mrs?|Ms|Dr|Prof|Rev|Gen|Sen|Rep|Lt|Col|Capt|St|Mt|Jr|Sr|vs|cf|ca|approx|al|et|"
    r"Fig|fig|Eq|No|no|Vol|vol|pp|Inc|Ltd|Corp|Co|Jan|Feb|Mar|Apr|Aug|Sept?|Oct|Nov|Dec)\.\s+$"
)
_BREAKS = (re.compile(r"\n"), re.compile(r"\s"))


def sentences(text: str) -> list[str]:
    """The sentences of a text, each with the whitespace after it; joined, they are the text.

    By rule: a full stop ends no sentence after an initial or a common English abbreviation, nor before a small letter.
    """
    found, begin = [], 0
    for end in _END.finditer(text):
        if not _goes_on(text, begin, end):
            found.append(text[begin : end.end()])
            begin = end.end()
    return [*found, text[begin:]] if begin < len(text) else found


def _goes_on(text: str, begin: int, end: re.Match[str]) -> bool:
    """Whether the sentence from `begin` goes on after what looks like its end."""
    if not end.group().startswith(".") or re.search(r"\n\s*\n", end.group()):
        return end.end() == begin
    return text[end.end() : end.end() + 1].islower() or bool(_ABBREVIATION.search(text, begin, end.end()))


def chunked(text: str, budget: int, count: Count, *, even: bool = True) -> list[str]:
    """The text in as few pieces as whole sentences allow, each of at most `budget` tokens, as `count` counts them.

    `count` takes several texts and may count what is put around each. A sentence that is too long by itself is cut at a
    line end or space near its middle, or where it has none, inside the word. `even` makes the pieces about equally
    long; otherwise each is filled before the next begins. Raises OptionError where not even a character fits.
    """
    text = text.strip()
    if count([text])[0] <= budget:
        return [text]
    around = count([""])[0]
    if around >= budget:
        raise OptionError(f"{budget} tokens leave no room for text, since what is put around it takes {around}")
    pieces = [part for piece in sentences(text) for part in _cut(piece, budget, count)]
    sizes = [size - around for size in count(pieces)]
    room = budget - around
    while True:
        limit = _narrowest(sizes, room) if even else room
        chunks = [chunk for group in _packed(sizes, limit) if (chunk := "".join(pieces[group]).strip())]
        excess = max(count(chunks)) - budget
        if excess <= 0 or len(chunks) == len(pieces):
            return chunks
        room = limit - excess  # the pieces are longer together than one by one


def _cut(piece: str, budget: int, count: Count) -> list[str]:
    """The piece, halved until its parts fit."""
    if count([piece])[0] <= budget:
        return [piece]
    if len(piece) < 2:
        raise OptionError(f"{budget} tokens leave no room for text: a single character takes {count([piece])[0]}")
    at = _middle(piece)
    return _cut(piece[:at], budget, count) + _cut(piece[at:], budget, count)


def _middle(piece: str) -> int:
    """Where to cut: after the line end or else the space nearest to the middle, in the half around it."""
    half = len(piece) // 2
    for pattern in _BREAKS:
        found = [m.end() for m in pattern.finditer(piece, half // 2, len(piece) - half // 2) if m.end() < len(piece)]
        if found:
            return min(found, key=lambda at: abs(at - half))
    return half


def _packed(sizes: Sequence[int], limit: int) -> list[slice]:
    """Runs of neighbours, each filled as far as `limit` allows, and with one at least."""
    runs, begin, total = [], 0, 0
    for i, size in enumerate(sizes):
        if total + size > limit and i > begin:
            runs.append(slice(begin, i))
            begin, total = i, 0
        total += size
    return [*runs, slice(begin, len(sizes))]


def _narrowest(sizes: Sequence[int], limit: int) -> int:
    """The smallest limit that needs no more runs than this one."""
    fewest = len(_packed(sizes, limit))
    return bisect_left(range(limit), True, key=lambda narrow: len(_packed(sizes, narrow)) <= fewest)
