"""`specdec transcribe --stdin`, as it is typed."""

import io
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile

from specdec import Transcriber
from specdec.cli.commands import run_command
from tests.speech import RATE, processor, speech, whisper

SOUND = (speech(2.6, 1) * 2**15).astype("<i2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("live")
    target = whisper(1, stamps=1.0)
    target.generation_config.language = "en"
    target.save_pretrained(folder)
    processor().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def typed(model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `specdec transcribe` on what comes on standard input: exit code, stdout, stderr in one line."""

    def call(content: bytes, *arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        code = run_command(["transcribe", *map(str, arguments), "--model", model, "--max-new-tokens", "12"])
        out, err = capsys.readouterr()
        return code, out, " ".join(err.split())

    return call


@pytest.fixture(scope="module")
def whole(model: str) -> Any:
    """What is heard in the file with the same sound."""
    sound = SOUND.astype(np.float32) / 2**15
    return Transcriber.from_pretrained(model)(sound, max_new_tokens=12, return_timestamps=True)


def test_text_and_json(typed: Any, whole: Any) -> None:
    """The text of the file, raw and as WAV; JSON has a line for what each pass heard, and the file's."""
    file = io.BytesIO()
    soundfile.write(file, SOUND, RATE, format="WAV")
    for content in (SOUND.tobytes(), file.getvalue()):
        code, out, err = typed(content, "--stdin")
        assert (code, out) == (0, whole["text"].strip() + "\n")
        assert err.startswith("listening; Ctrl-C ends the sound 2.6 s of sound in")
    code, out, _ = typed(SOUND.tobytes(), "--stdin", "--format", "json")
    *events, last = map(json.loads, out.splitlines())
    assert "".join(event["text"] for event in events if event["type"] == "final") == last["text"] == whole["text"]
    assert last["chunks"] == json.loads(json.dumps(whole["chunks"]))
    assert last["file"] == "stdin"


def test_rates_and_folders(typed: Any, whole: Any, tmp_path: Path) -> None:
    """Raw sound at another rate; subtitles in a file, named as the flag."""
    twice = np.repeat(SOUND, 2).tobytes()
    code, out, _ = typed(twice, "--stdin", "--rate", "32000", "--format", "srt", "--output-dir", tmp_path, "--quiet")
    assert (code, out) == (0, "")
    assert (tmp_path / "stdin.srt").read_text("utf-8").startswith("1\n00:00:00")


def test_half_a_sample(typed: Any, whole: Any) -> None:
    """What came before it is transcribed all the same."""
    code, out, err = typed(SOUND.tobytes() + b"\0", "--stdin")
    assert (code, out) == (2, whole["text"].strip() + "\n")
    assert err.endswith("the sound ends with 1 of a sample's 2 bytes: send whole 16-bit samples")


class PortAudioError(Exception):
    """sounddevice's."""


class Microphone:
    """A device that is heard for 2.6 seconds, and then as its driver says."""

    samplerate = float(RATE)

    def __init__(self, end: Any) -> None:
        self._sound, self._end = SOUND.astype(np.float32)[:, None] / 2**15, end

    def __enter__(self) -> "Microphone":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, count: int) -> tuple[np.ndarray, bool]:
        block, self._sound = self._sound[:count], self._sound[count:]
        return block, not len(block) and self._end()


def unplugged() -> None:
    raise PortAudioError("device unavailable")


def interrupting() -> Any:
    """Presses Ctrl-C once."""
    presses = iter([lambda: os.kill(os.getpid(), signal.SIGINT)])

    def end() -> bool:
        next(presses, int)()
        time.sleep(0.05)
        return False

    return end


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        (unplugged, 1, "no microphone can be heard (device unavailable): connect one, or pipe sound to --stdin"),
        (lambda: True, 1, "faster than it is transcribed, and some was lost: take a smaller model"),
        (interrupting(), 0, ""),
    ],
)
def test_microphone(typed: Any, whole: Any, end: Any, code: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came before an error, or Ctrl-C, is transcribed."""
    library = SimpleNamespace(InputStream=lambda **_: Microphone(end), PortAudioError=PortAudioError)
    monkeypatch.setitem(sys.modules, "sounddevice", library)
    ended, out, err = typed(b"", "--microphone")
    assert (ended, out) == (code, whole["text"].strip() + "\n")
    assert words in err


def test_microphone_without_its_library(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told before the model is loaded, and how to get it."""
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    code, out, err = typed(b"", "--microphone")
    assert (code, out, "listening" in err) == (1, "", False)
    assert "--microphone needs sounddevice: pip install -c constraints.txt -e '.[microphone]'" in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rate", 8000], "--rate is of the raw sound that --stdin reads: pass --stdin"),
        (["--stdin", "talk.wav"], "leave one of them out"),
        (["--stdin", "--microphone"], "--stdin and --microphone are sound that comes: leave one of them out"),
        (["--stdin", "--demo"], "--demo is for whole recordings: leave it out, or --stdin"),
        (["--stdin", "--chunk-length", 1], "--chunk-length is for whole recordings"),
        (["--stdin", "--rate", 0], "--rate"),
    ],
)
def test_contradictions(typed: Any, flags: list[Any], words: str) -> None:
    """They are told before the model is loaded."""
    code, out, err = typed(b"", *flags)
    assert (code, out) == (2, "")
    assert words in err
    assert "listening" not in err
