"""Segments of a window by the timestamps in its tokens, and the begin of the next window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.pipelines.speech.whisper import TOKEN_SECONDS


@dataclass(frozen=True)
class Segment:
    """A stretch of speech: begin and end in seconds of the recording, and its tokens with their timestamps.

    `token_times`: the second at which each token ends; None without word timestamps.
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
    """The segments of a window's tokens, and how many of its frames they cover (Radford et al. 2022, section 3.8).

    `begin`: the token of 0.00 seconds; `offset`: the window's begin in seconds; `frames`: its length, `stride` per
    timestamp token. Text after the last pair of timestamps is left to the next window, unless the tokens end with a
    single timestamp.
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
        cuts[-1] += 1  # the last segment keeps both timestamps: it does not end the window
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
