"""What the timestamps in a window's tokens say: where its segments begin and end, and where the next window starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.pipelines.speech.whisper import TOKEN_SECONDS


@dataclass(frozen=True)
class Segment:
    """A stretch of speech: seconds from the beginning of the recording, and its tokens with their timestamps.

    `token_times` are the seconds at which each token ends, where they were asked for.
    """

    start: float
    end: float
    tokens: list[int]
    token_times: list[float] | None = None


def split(
    tokens: Sequence[int],
    *,
    begin: int,
    offset: float,
    frames: int,
    stride: int,
    times: Sequence[float] | None = None,
) -> tuple[list[Segment], int]:
    """The segments of a window's tokens, and how many of its frames they cover (Whisper's paper, section 3.8).

    `begin` is the token of 0.00 seconds, `offset` the window's start in seconds, `frames` its sound. Text after the
    last pair of timestamps is left for the next window, unless one timestamp alone ends the tokens.
    """
    stamped = [token >= begin for token in tokens]
    cuts = [i + 1 for i in range(len(tokens) - 1) if stamped[i] and stamped[i + 1]]
    if not cuts:
        stamps = [token for token in tokens if token >= begin]
        last = frames // stride
        if stamps and stamps[-1] != begin:
            last = stamps[-1] - begin
        end = offset + last * TOKEN_SECONDS
        return [Segment(offset, end, list(tokens), None if times is None else list(times[: len(tokens)]))], frames
    single = stamped[-2:] == [False, True]
    if single:
        cuts.append(len(tokens))
    else:
        cuts[-1] += 1  # the last segment keeps both timestamps, which tell that it did not end the window
    segments = []
    for first, last in zip([0, *cuts], cuts, strict=False):
        closing = last - 1 if single or last != cuts[-1] else last - 2
        start, end = (offset + (tokens[i] - begin) * TOKEN_SECONDS for i in (first, closing))
        segments.append(
            Segment(start, end, list(tokens[first:last]), None if times is None else list(times[first:last]))
        )
    if single:
        return segments, frames
    return segments, (tokens[cuts[-1] - 2] - begin) * stride
