"""Sound as it comes: streams, and blocks that are read ahead."""

import io
import struct
from collections.abc import Iterator
from threading import Event

import numpy as np
import pytest
import soundfile

from specdec import OptionError
from specdec.pipelines.speech.audio import Samples, read_audio
from specdec.pipelines.speech.sources import arriving, pcm_samples, streamed
from tests.speech import RATE, speech


class Slow(io.BytesIO):
    """A pipe, of which a read returns what there is."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(min(size or 0, 999))


def wav(seconds: float, rate: int = RATE, channels: int = 1, **how: str) -> bytes:
    file, sound = io.BytesIO(), speech(seconds, rate=rate)
    soundfile.write(file, np.stack([sound * part for part in (1.0, 0.5)[:channels]], 1), rate, format="WAV", **how)
    return file.getvalue()


def joined(blocks: Iterator[Samples]) -> Samples:
    return np.concatenate(list(blocks))


@pytest.mark.parametrize(("rate", "channels"), [(RATE, 1), (RATE, 2), (8000, 1), (44_100, 2)])
def test_streams_are_heard_as_files(rate: int, channels: int) -> None:
    """WAV at any rate and length, also one that its header does not know yet; raw samples at the rate that is named."""
    content = wav(0.73, rate, channels)
    expected = read_audio(content, RATE).samples
    endless = content.replace(struct.pack("<I", len(content) - 44), b"\xff\xff\xff\xff")
    for stream in (content, endless):
        assert np.allclose(joined(streamed(Slow(stream), RATE, 1)), expected, atol=1e-6)
    if channels == 1:
        assert np.allclose(joined(streamed(Slow(content[44:]), RATE, rate)), expected, atol=1e-6)


def test_other_headers() -> None:
    """Chunks before the samples are passed over, and the newer form of the header is read."""
    content = wav(0.2)
    noted = content[:12] + b"LIST" + struct.pack("<I", 3) + b"abc\0" + content[12:]
    newer = wav(0.2).replace(struct.pack("<H", 1), struct.pack("<H", 0xFFFE), 1)
    for stream in (noted, newer):
        assert np.array_equal(joined(streamed(Slow(stream), RATE, 1)), read_audio(content, RATE).samples)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"RIFF1234WAVEfmt ", "no whole header: convert it, as with ffmpeg"),
        (b"RIFF" + bytes(100), "no whole header"),
        (wav(0.1, subtype="FLOAT"), "not 16-bit PCM: convert it"),
        # (An mp3 was half a second of noise.)
        *((head + bytes(4000), "pass - in place of --stdin") for head in (b"ID3\x04", b"fLaC", b"OggS")),
    ],
)
def test_streams_that_are_no_sound(content: bytes, words: str) -> None:
    """They are told at once."""
    with pytest.raises(OptionError, match=words):
        next(streamed(Slow(content), RATE, RATE))


@pytest.mark.parametrize(("rate", "level"), [(44_100, 0.1), (22_050, 0.9), (8_000, 0.5)])
def test_mp3_without_a_tag(rate: int, level: float) -> None:
    """Its frames were heard as raw samples; raw samples that look like a frame are still sound."""
    file = io.BytesIO()
    soundfile.write(file, speech(1.0, rate=rate), rate, format="MP3", bitrate_mode="CONSTANT", compression_level=level)
    content = file.getvalue()
    assert content[:1] == b"\xff"
    with pytest.raises(OptionError, match="flac, ogg or mp3, which come whole: pass - in place of --stdin"):
        next(streamed(Slow(content), RATE, RATE))
    loud = content[:4] + bytes(4000)
    assert np.array_equal(joined(streamed(Slow(loud), RATE, RATE)), pcm_samples(loud))


def test_nothing_is_no_sound() -> None:
    assert len(joined(streamed(Slow(b""), RATE, RATE))) == 0


def test_blocks_are_read_ahead() -> None:
    """While the caller works; those that wait come as one, and an error behind them."""
    works, is_read = Event(), Event()

    def blocks() -> Iterator[Samples]:
        yield np.zeros(2, np.float32)
        works.wait()
        yield from np.ones((5, 2), np.float32)
        is_read.set()
        raise OptionError("broken: mend it")

    arrivals = arriving(blocks())
    parts = [next(arrivals)]
    works.set()
    is_read.wait()
    parts.append(next(arrivals))
    with pytest.raises(OptionError, match="broken"):
        next(arrivals)
    assert [len(part) for part in parts] == [2, 10]


def test_what_waits_when_the_sound_is_over() -> None:
    """It is the last part. (Ctrl-C left out what had come while a pass ran.)"""
    works, is_read, is_over, ends = Event(), Event(), Event(), Event()

    def blocks() -> Iterator[Samples]:
        yield np.zeros(2, np.float32)
        works.wait()
        yield from np.ones((5, 2), np.float32)
        is_read.set()
        ends.wait(30)

    arrivals = arriving(blocks(), is_over.is_set)
    next(arrivals)
    works.set()
    is_read.wait()
    is_over.set()
    assert sum(map(len, arrivals)) == 10
    ends.set()


def test_a_caller_that_leaves() -> None:
    """No thread reads on for it."""
    is_read = Event()

    def blocks() -> Iterator[Samples]:
        try:
            while True:
                yield np.zeros(1, np.float32)
        finally:
            is_read.set()

    arrivals = arriving(blocks())
    next(arrivals)
    arrivals.close()
    assert is_read.wait(10)


def test_all_blocks_arrive() -> None:
    """In order, and no less where many wait."""
    parts = list(arriving(np.full(2, number, np.float32) for number in range(2000)))
    assert np.concatenate(parts).tolist() == [number for number in range(2000) for _ in range(2)]
