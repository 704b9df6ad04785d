"""Subtitles, byte for byte."""

import pytest

from specdec.pipelines.speech.subtitles import srt, vtt
from specdec.pipelines.speech.windows import window_segments

CHUNKS = [
    {"text": " Tom & Jerry", "timestamp": (0.0, 1.5)},
    {"text": " ", "timestamp": (1.5, 1.6)},
    {"text": " a <b>\n --> c", "timestamp": (59.9996, 3725.04)},
    {"text": " open", "timestamp": (3726.0, None)},
]
SRT = """1
00:00:00,000 --> 00:00:01,500
Tom & Jerry

2
00:01:00,000 --> 01:02:05,040
a <b> -> c

3
01:02:06,000 --> 01:02:06,000
open

"""
VTT = """WEBVTT

00:00:00.000 --> 00:00:01.500
Tom &amp; Jerry

00:01:00.000 --> 01:02:05.040
a &lt;b&gt; -&gt; c

01:02:06.000 --> 01:02:06.000
open

"""


def test_both_forms() -> None:
    """Numbered cues with commas, or a header, points and escapes; empty ones go, and no text looks like times."""
    assert (srt(CHUNKS), srt([])) == (SRT, "")
    assert (vtt(CHUNKS), vtt([])) == (VTT, "WEBVTT\n\n")


BEGIN = 100
HOW = {"begin": BEGIN, "offset": 10.0, "frames": 3000, "stride": 2}
WINDOWS = [
    # tokens -> (start, end, number of tokens) of segments, frames
    ([100, 1, 2, 150], [(10.0, 11.0, 4)], 3000),
    ([100, 1, 150, 150, 2, 200], [(10.0, 11.0, 3), (11.0, 12.0, 3)], 3000),
    ([100, 1, 150, 160, 2, 200, 200], [(10.0, 11.0, 3), (11.2, 12.0, 4)], 200),
    ([100, 1, 150, 160, 2, 3], [(10.0, 11.0, 4)], 100),
    ([1, 2, 3], [(10.0, 40.0, 3)], 3000),
    ([100, 1, 2], [(10.0, 40.0, 3)], 3000),
    ([], [(10.0, 40.0, 0)], 3000),
]


@pytest.mark.parametrize(("tokens", "segments", "frames"), WINDOWS)
def test_windows_are_split_at_pairs_of_timestamps(
    tokens: list[int], segments: list[tuple[float, float, int]], frames: int
) -> None:
    """A single one at the end closes the window; text after the last pair is left for the next."""
    found, covered = window_segments(tokens, **HOW)
    assert [(round(s.start, 2), round(s.end, 2), len(s.tokens)) for s in found] == segments
    assert covered == frames
    assert [token for s in found for token in s.tokens] == tokens[: sum(n for *_, n in segments)]
