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
01:02:06,000 --> 01:02:06,100
open

"""
VTT = """WEBVTT

00:00:00.000 --> 00:00:01.500
Tom &amp; Jerry

00:01:00.000 --> 01:02:05.040
a &lt;b&gt; --&gt; c

01:02:06.000 --> 01:02:06.100
open

"""


def test_both_forms() -> None:
    """Numbered cues with commas, or a header, points and escapes; empty ones go, and no text looks like times."""
    assert (srt(CHUNKS), srt([])) == (SRT, "")
    assert (vtt(CHUNKS), vtt([])) == (VTT, "WEBVTT\n\n")


WORDS = [
    {"text": " So", "timestamp": (1.0, 1.2)},
    {"text": " it", "timestamp": (1.2, 1.2)},
    {"text": " <came>", "timestamp": (1.2, 2.0)},
    {"text": " back.", "timestamp": (2.0, 2.0)},
]
CUES = [{"text": " So it <came> back.", "timestamp": (1.0, 2.0), "words": WORDS}]


def test_words_stand_inside_the_cues() -> None:
    """Each has its time where one may stand: after the word before, and before the end. (A word was a cue.)"""
    begin = "00:00:01.000 --> 00:00:02.000\n"
    assert vtt(CUES) == f"WEBVTT\n\n{begin}So <00:00:01.200>it &lt;came&gt; back.\n\n"
    assert srt(CUES) == "1\n00:00:01,000 --> 00:00:02,000\nSo it <came> back.\n\n"


def test_no_cue_is_without_length() -> None:
    """(`setting` was there from 56.2 to 56.2 seconds, and players drop that.)"""
    setting = {"text": " setting", "timestamp": (56.2, 56.2)}
    assert vtt([setting]) == "WEBVTT\n\n00:00:56.200 --> 00:00:56.300\nsetting\n\n"
    assert "00:00:02,000 --> 00:00:02,100\nback." in srt(CUES, words=1)


def test_lines_are_short() -> None:
    """Lines break before the word that is too long for them, cues after so many words; words stay whole."""
    text = [{"text": " It was a considerable time ago", "timestamp": (0.0, 3.0)}]
    lines = srt(text, width=10).splitlines()[2:-1]
    assert lines == ["It was a", "considerable", "time ago"]
    assert srt(CUES, width=8).splitlines()[2:-1] == ["So it", "<came>", "back."]
    cues = srt(CUES, words=3).split("\n\n")
    assert cues == ["1\n00:00:01,000 --> 00:00:02,000\nSo it <came>", "2\n00:00:02,000 --> 00:00:02,100\nback.", ""]
    assert "<00:00:01.200>it\n&lt;" in vtt(CUES, width=8)
    characters = [{"text": one, "timestamp": (i, i + 1)} for i, one in enumerate("日本語")]
    assert "日本\n語" in srt([{"text": "日本語", "timestamp": (0, 3), "words": characters}], width=2)


def spans(text: str) -> list[list[str]]:
    """Begin and end of the cues of a VTT, without hours and minutes."""
    return [line.replace("00:00:", "").split(" --> ") for line in text.splitlines() if " --> " in line]


def test_cues_do_not_overlap() -> None:
    """A cue ends where the next begins, and still has a length. (At seams of windows a cue ended behind that.)"""
    times = [(11.56, 23.02), (22.92, 24.0), (24.0, 24.0), (24.0, 25.0), (23.0, 23.5)]
    out = vtt({"text": "a", "timestamp": time} for time in times)
    assert spans(out) == [
        *(["11.560", "22.920"], ["22.920", "24.000"], ["24.000", "24.100"], ["24.100", "24.200"]),
        ["24.200", "24.300"],
    ]


def test_cues_have_so_many_lines() -> None:
    """A cue with more lines is split in several, at its words' times, else in proportion to its characters."""
    text = [{"text": " It was a considerable time ago", "timestamp": (0.0, 3.1)}]
    out = vtt(text, width=12, lines=2)
    assert [cue.splitlines()[1:] for cue in out.split("\n\n")[1:-1]] == [["It was a", "considerable"], ["time ago"]]
    assert spans(out) == [["00.000", "02.200"], ["02.200", "03.100"]]
    assert vtt(text, width=12, lines=3) == vtt(text, width=12)
    out = vtt(CUES, width=8, lines=2)
    assert spans(out) == [["01.000", "01.200"], ["01.200", "02.000"]]
    assert out.endswith("So\nit\n\n00:00:01.200 --> 00:00:02.000\n&lt;came&gt;\nback.\n\n")


def test_lines_are_even() -> None:
    """In a cue, and over the cues of a segment. (The last word was shown alone, for half a second.)"""
    text = [{"text": " in the only sense with which we are concerned, differs from most", "timestamp": (0.0, 6.6)}]
    shown = [cue.splitlines()[1:] for cue in vtt(text, width=28, lines=2).split("\n\n")[1:-1]]
    assert shown == [["in the only sense", "with which we are"], ["concerned,", "differs from most"]]
    lines = srt(text, width=62).splitlines()[2:-1]
    assert lines == ["in the only sense with which we", "are concerned, differs from most"]


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
    # (One segment began with the window, also where a timestamp said later.)
    ([125, 1, 2, 145], [(10.5, 10.9, 4)], 3000),
    ([125, 1, 2], [(10.5, 40.0, 3)], 3000),
    ([1, 2, 145], [(10.0, 10.9, 3)], 3000),
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
