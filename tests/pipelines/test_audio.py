"""Sound from wherever it comes: every source, rate and channel count, and files that are none."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from specdec import OptionError, SpecdecError, Transcriber
from specdec.pipelines.speech.audio import log_mel, read_audio
from tests.speech import RATE, processor, speech, whisper

SOUND = speech(0.8)
PARTS = processor()


@pytest.fixture(scope="module")
def transcriber() -> Transcriber:
    return Transcriber(whisper(1, stamps=4.0, end=2.0), processor=PARTS, language="en")


def saved(folder: Path, samples: np.ndarray = SOUND, *, rate: int = RATE, ending: str = "wav", **how: Any) -> Path:
    path = folder / f"sound.{ending}"
    soundfile.write(path, samples, rate, **how)
    return path


def test_every_kind_of_source(tmp_path: Path, transcriber: Transcriber) -> None:
    """A name, a path, bytes, an open file, arrays and tensors, whole numbers: the same text."""
    path = saved(tmp_path, subtype="FLOAT")
    whole = (SOUND * 32767).round().astype(np.int16)
    expected = transcriber(SOUND)
    with path.open("rb") as file:
        sources = [str(path), path, path.read_bytes(), file, SOUND.astype(np.float64), torch.tensor(SOUND)]
        sources += [{"array": SOUND, "sampling_rate": RATE}, {"raw": SOUND, "sampling_rate": RATE}]
        sources += [np.stack([SOUND, SOUND]), SOUND[None], io.BytesIO(path.read_bytes())]
        assert transcriber(sources) == [expected] * len(sources)
    for numbers in (whole, torch.tensor(whole)):
        assert read_audio(numbers, RATE).samples == pytest.approx(SOUND, abs=1e-4)
    assert read_audio((whole.astype(np.int32) * 65536), RATE).samples == pytest.approx(SOUND, abs=1e-4)
    assert read_audio(((whole // 256) + 128).astype(np.uint8), RATE).samples == pytest.approx(SOUND, abs=1e-2)


@pytest.mark.parametrize("ending", ["wav", "flac", "ogg", "mp3"])
@pytest.mark.parametrize("rate", [8000, 44100])
def test_formats_and_rates(ending: str, rate: int, tmp_path: Path) -> None:
    """Mixed to one channel and brought to the model's rate, as if the whole were resampled at once."""
    tone = np.sin(2 * np.pi * 440 * np.arange(2 * rate) / rate).astype(np.float32)
    both = np.stack([0.6 * tone, 0.2 * tone])
    audio = read_audio(saved(tmp_path, both.T, rate=rate, ending=ending), RATE)
    given = read_audio({"array": both, "sampling_rate": rate}, RATE)
    assert given.samples == pytest.approx(audio.samples, abs=1e-4) or ending in ("ogg", "mp3")
    assert audio.rate == RATE
    assert audio.seconds == pytest.approx(2.0, abs=0.1)
    middle = audio.samples[RATE // 2 : RATE]
    assert np.abs(np.fft.rfft(middle)).argmax() == 220  # of half a second
    assert np.abs(middle).max() == pytest.approx(0.4, abs=0.06)


def test_blocks_join_without_a_seam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file read in many blocks equals one read at once, resampled or not."""
    for rate in (RATE, 22050):
        path = saved(tmp_path, speech(1.5, rate=rate), rate=rate, subtype="FLOAT")
        whole = read_audio(path, RATE).samples
        monkeypatch.setattr("specdec.pipelines.speech.audio._BLOCK", 1000)
        assert np.array_equal(read_audio(path, RATE).samples, whole)
        monkeypatch.undo()


@pytest.mark.parametrize("seconds", [0.3, 1.01, 2.5, 3.3337])
def test_features_equal_the_extractor(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made block by block, with a common loudest point and mirrored ends."""
    sound = speech(seconds)
    long = {"truncation": False, "padding": "longest"} if seconds > 1 else {}
    how = {"sampling_rate": RATE, "return_tensors": "pt", **long}
    expected = PARTS.feature_extractor(sound, **how).input_features[0]
    for block in (6000, 64, 1):
        monkeypatch.setattr("specdec.pipelines.speech.audio._FRAMES", block)
        found = log_mel(sound, PARTS.feature_extractor)
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, atol=1e-5)


EDGES = {
    "silence": np.zeros(RATE, np.float32),
    "noise": np.random.default_rng(0).standard_normal(3 * RATE // 2).astype(np.float32),
    "clipped": np.clip(50 * SOUND, -1, 1), "a blink": SOUND[: RATE // 20], "one sample": SOUND[:1],
    "exactly a window": speech(1.0), "a window and a sample": np.append(speech(1.0), np.float32(0)),
}  # fmt: skip


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("options", [{}, {"return_timestamps": True}, {"chunk_length_s": 0.5}], ids=str)
def test_odd_sounds_come_to_an_end(name: str, options: dict[str, Any], transcriber: Transcriber) -> None:
    """Whatever a model makes of them, the shape is right and the recording is read to its end."""
    if not options.get("return_timestamps") and name != "noise":
        options = {**options, "max_new_tokens": 5}
    told: list[float] = []
    out = transcriber(EDGES[name], progress=lambda done, _: told.append(done), **options)
    assert isinstance(out["text"], str)
    assert ("chunks" in out) == ("return_timestamps" in options)
    assert out.duration == len(EDGES[name]) / RATE
    assert told[-1] == pytest.approx(out.duration, abs=0.011)


def test_no_sound_at_all(transcriber: Transcriber, tmp_path: Path) -> None:
    """No samples, no text, and no pass through the model."""
    empty = saved(tmp_path, np.empty(0, np.float32))
    for source in (np.empty(0, np.float32), empty, {"array": np.empty((2, 0), np.float32), "sampling_rate": 8000}):
        out = transcriber(source, return_timestamps=True)
        assert dict(out) == {"text": "", "chunks": []}
        assert (out.duration, out.real_time_factor, out.language, out.tokens) == (0.0, 0.0, None, [])
        assert out.stats.num_target_passes == 0
    assert transcriber([EDGES["a blink"], np.empty(0, np.float32)], max_new_tokens=5)[1] == {"text": ""}


def test_truncated_files(tmp_path: Path) -> None:
    """What is left of a file is read; a flac file that breaks off in a block cannot be, and is named."""
    for ending in ("wav", "flac"):
        path = saved(tmp_path, speech(9.0), ending=ending)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert 3 < read_audio(path.with_suffix(".wav"), RATE).seconds < 6
    with pytest.raises(OptionError, match=r"sound\.flac is damaged"):
        read_audio(path, RATE)


def test_files_that_hold_no_sound(tmp_path: Path, transcriber: Transcriber) -> None:
    """Text, nothing, a header alone, a name that leads nowhere, a folder: each by its name, with the way out.

    Its neighbours in a batch do not hide it, and the transcriber works on.
    """
    contents = {
        "text.mp3": b"not a sound", "text.wav": b"not a sound", "empty.mp3": b"", "header.wav": b"RIFF\x24\0\0\0WAVE",
        "x.raw": b"\0" * 99,
    }  # fmt: skip
    for name, content in contents.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(OptionError, match=f"{name} is not sound, or .*ffmpeg"):
            transcriber([SOUND, path], batch_size=2, max_new_tokens=4)
    for name, way_out in (("nowhere.wav", "no such file"), (".", "pass the files in this folder")):
        with pytest.raises(OptionError, match=way_out):
            transcriber(tmp_path / name)
    with pytest.raises(OptionError, match="the input is not sound"):
        transcriber(b"not a sound")
    assert transcriber(SOUND, max_new_tokens=4)["text"]


WRONG: list[tuple[Any, str]] = [
    (np.zeros((4, 100)), "transpose"), (np.zeros((1, 2, 3)), "samples"), (np.array([0.1, np.nan]), "finite"),
    (np.array(["a"]), "a file name"), (3, "a file name"), ({"array": SOUND}, "sampling_rate"),
    ({"sampling_rate": RATE}, "array"), ({"array": SOUND, "sampling_rate": 0}, "positive"),
    ("https://example.org/a.wav", "downloaded first"), (io.StringIO("text"), "opened as text"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "words"), WRONG, ids=lambda value: str(type(value).__name__))
def test_wrong_inputs_are_told(source: Any, words: str, transcriber: Transcriber) -> None:
    with pytest.raises(OptionError, match=words):
        transcriber(source)


@pytest.mark.parametrize("missing", ["soundfile", "soxr"])
def test_without_the_extra(missing: str, tmp_path: Path, transcriber: Transcriber, monkeypatch: Any) -> None:
    """The extra's libraries are asked for where they are needed, and only there."""
    path = saved(tmp_path, rate=8000)
    monkeypatch.setitem(sys.modules, missing, None)
    assert transcriber(SOUND, max_new_tokens=4)["text"]
    with pytest.raises(SpecdecError, match=rf"{missing}.*-e '\.\[audio\]'"):
        transcriber(path)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"batch_size": 4}, {"chunk_length_s": 30, "batch_size": 4}], ids=str)
def test_an_hour(options: dict[str, Any], tmp_path: Path) -> None:
    """Memory beyond the sound and its features does not grow with the recording."""
    code = """
import resource, sys
import numpy as np
import torch
from transformers import WhisperFeatureExtractor, WhisperProcessor
from specdec import Transcriber
from tests.speech import processor, whisper
torch.set_num_threads(1)
parts = WhisperProcessor(WhisperFeatureExtractor(feature_size=8), processor().tokenizer)
transcriber = Transcriber(whisper(0, stamps=-30.0, max_source_positions=1500), processor=parts)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
tone = np.tile(np.sin(np.arange(16000) / 20).astype(np.float32), int(sys.argv[1]))
transcriber(tone[: 100 * 16000], max_new_tokens=4, **eval(sys.argv[2]))
before = peak()
out = transcriber(tone, max_new_tokens=4, **eval(sys.argv[2]))
print(out.duration, peak() - before)
"""
    ran = subprocess.run([sys.executable, "-c", code, "3600", str(options)], capture_output=True, text=True, cwd=".")
    assert ran.returncode == 0, ran.stderr
    duration, grown = map(float, ran.stdout.split())
    assert duration == 3600
    assert grown < 400  # MiB; an hour of samples is 220, and 8 mels are 11
