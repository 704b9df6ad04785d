"""`specdec transcribe`, as it is typed."""

import io
import json
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import soundfile

from specdec import Transcriber
from specdec.cli.commands import run_command
from specdec.options import bundled_models
from specdec.pipelines.speech.windows import Listener
from tests.folders import saved_model
from tests.speech import RATE, processor, speech, whisper


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its draft, and recordings of one and of three windows."""
    root = tmp_path_factory.mktemp("speech")
    parts = processor()
    for name, seed in (("model", 3), ("draft", 1)):
        model = whisper(seed)
        model.generation_config.language = "en"
        model.save_pretrained(root / name)
        parts.save_pretrained(root / name)
    for name, seconds in (("short", 0.8), ("long", 2.6)):
        soundfile.write(root / f"{name}.wav", speech(seconds), RATE, subtype="FLOAT")
    return root


@pytest.fixture
def typed(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `specdec transcribe` on files of the folder, or others: exit code, stdout, stderr in one line."""

    def call(*arguments: Any, draft: bool = True) -> tuple[int, str, str]:
        named = [str(folder / one) if one in ("short.wav", "long.wav") else str(one) for one in arguments]
        beside = ["--draft", str(folder / "draft")] if draft else []
        code = run_command(["transcribe", *named, "--model", str(folder / "model"), *beside, "--max-new-tokens", "12"])
        out, err = capsys.readouterr()
        return code, out, " ".join(err.split())

    return call


def expected(folder: Path, name: str, **options: Any) -> Any:
    return Transcriber.from_pretrained(folder / "model")(folder / name, max_new_tokens=12, **options)


def test_text(folder: Path, typed: Any) -> None:
    """One file's text alone; several under headings; the same with a draft, and progress elsewhere."""
    text = expected(folder, "short.wav")["text"].strip()
    for draft in (True, False):
        code, out, err = typed("short.wav", draft=draft)
        assert (code, out) == (0, text + "\n")
        assert "0.8 s of sound" in err
        assert " times real time)" in err
        assert err.endswith(" s of them to load")  # nothing told this time
        assert ("mean acceptance length" in err) == draft
    code, out, err = typed("short.wav", "long.wav", "--batch-size", "2", "--quiet")
    assert (code, err) == (0, "")
    assert out.splitlines()[:2] == [f"── {folder / 'short.wav'} ──", *text.splitlines()[:1]]


def test_json(folder: Path, typed: Any) -> None:
    """A line per file, with segments or words."""
    files = [str(folder / "short.wav"), str(folder / "long.wav")]
    code, out, _ = typed(*files, "--format", "json")
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["file"] for line in lines] == files
    for line, name in zip(lines, ("short.wav", "long.wav"), strict=True):
        whole = expected(folder, name, return_timestamps=True)
        assert (line["text"], line["language"]) == (whole["text"], "english")
        assert line["chunks"] == json.loads(json.dumps(whole["chunks"]))
        assert line["finish_reasons"] == whole.finish_reasons
        assert line["real_time_factor"] == pytest.approx(line["seconds"] / line["duration"], rel=0.05)
    assert "segments" not in lines[0]
    line = json.loads(typed(files[1], "--format", "json", "--prompt", "aeb", "--quiet")[1])
    assert line["text"] == expected(folder, "long.wav", return_timestamps=True, prompt="aeb")["text"]
    line = json.loads(typed(files[1], "--format", "json", "--words", "--quiet")[1])
    words = [word for segment in line["segments"] for word in segment["words"]]
    assert [word["word"] for word in words] == [chunk["text"] for chunk in line["chunks"]] != []
    for one in line["segments"]:
        assert one["text"] == "".join(word["word"] for word in one["words"])
        assert (one["start"], one["end"]) == (one["words"][0]["start"], one["words"][-1]["end"])


@pytest.mark.parametrize("kind", ["srt", "vtt", "text"])
def test_files_of_their_own(kind: str, tmp_path: Path, typed: Any) -> None:
    """--output-dir holds one file per recording, and nothing goes to standard output."""
    flags = ["--format", kind, "--output-dir", tmp_path / "out", "--quiet"]
    assert typed("short.wav", "long.wav", *flags) == (0, "", "")
    ending = {"text": "txt"}.get(kind, kind)
    found = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "out").iterdir()}
    assert sorted(found) == [f"long.{ending}", f"short.{ending}"]
    begins = {"srt": "1\n00:00:0", "vtt": "WEBVTT\n\n00:00:0", "text": ""}[kind]
    assert found[f"long.{ending}"].startswith(begins)
    if kind != "text":
        assert " --> " in found[f"long.{ending}"]


def test_several_formats_of_one_run(folder: Path, tmp_path: Path, typed: Any) -> None:
    """Subtitles in srt and vtt, and json beside them, took three transcriptions."""
    flags, into = ["--format", "srt", "--format", "vtt", "--format", "json"], ["--output-dir", tmp_path]
    assert typed("long.wav", *flags, *into)[0] == 0
    files = {path.suffix: path.read_text("utf-8") for path in tmp_path.iterdir()}
    assert files.keys() == {".srt", ".vtt", ".json"}
    cues = len(json.loads(files[".json"])["chunks"])
    assert cues == files[".srt"].count(" --> ") == files[".vtt"].count(" --> ") > 1
    (tmp_path / "long.vtt").unlink()
    assert "0 of 1 recordings are done already" in typed("long.wav", *flags, *into, "--resume")[2]
    assert "1 of 1 recordings are done already" in typed("long.wav", *flags, *into, "--resume")[2]
    code, _, err = typed("long.wav", *flags)
    assert (code, "--format srt and vtt and json make a file each: pass --output-dir" in err) == (2, True)


def test_a_folder_keeps_its_subfolders(folder: Path, tmp_path: Path, typed: Any) -> None:
    """Recordings of one name in two subfolders were an error, and --resume finds the files again."""
    for place, name in (("a", "short.wav"), ("b/c", "short.wav"), ("", "long.wav")):
        (tmp_path / "in" / place).mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "short.wav", tmp_path / "in" / place / name)
    shutil.copy(folder / "short.wav", tmp_path / "other.wav")
    arguments = [tmp_path / "in", tmp_path / "other.wav", "--output-dir", tmp_path / "out", "--quiet"]
    assert typed(*arguments) == (0, "", "")
    found = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*"))
    assert found == ["a/short.txt", "b/c/short.txt", "long.txt", "other.txt"]
    (tmp_path / "out/b/c/short.txt").unlink()
    assert "3 of 4 recordings are done already" in typed(*arguments[:-1], "--resume")[2]
    assert (tmp_path / "out/b/c/short.txt").exists()
    both = [tmp_path / "in" / place / "short.wav" for place in ("a", "b/c")]
    assert "name a folder above both, whose subfolders stay" in typed(*both, "--output-dir", tmp_path / "out")[2]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--language", "klingon"], "`language`"),
        (["--chunk-length", "100"], "`chunk_length_s`"),
        (["--num-draft-tokens", "0"], "`num_assistant_tokens`"),
        (["--set", "num_bems=5"], "did you mean `num_beams`?"),
        (["--set", "num_beams=0"], "`num_beams`"),
        (["--set", "temperature=-1"], "`temperature`"),
    ],
)
def test_options_are_checked_before_loading(
    flags: list[str], words: str, typed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model was loaded first."""
    monkeypatch.setattr("specdec.generator.generator.load_model", lambda *_, **__: pytest.fail("it was loaded"))
    code, _, err = typed("short.wav", *flags)
    assert (code, words in err) == (2, True), err


@pytest.mark.parametrize("package", ["soundfile", "soxr"])
def test_a_missing_reader(package: str, typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named before the model is loaded. (It was named afterwards, for each recording.)"""
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("specdec.generator.generator.load_model", lambda *_, **__: pytest.fail("it was loaded"))
    code, _, err = typed("short.wav")
    assert (code, f"needs {package}: pip install" in err) == (1, True), err


def test_standard_input_and_the_rest(folder: Path, typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """- reads stdin; --fallback, --context, --chunk-length, --set and --stats reach the call."""
    content = (folder / "short.wav").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert typed("-", "--quiet")[1].strip() == expected(folder, "short.wav")["text"].strip()
    more = ["--fallback", "--context", "--set", "num_assistant_tokens=2", "--stats", "--set", "logprob_threshold=-2.0"]
    code, _, err = typed("long.wav", *more)
    assert code == 0
    assert "acceptance histogram" in err
    chunked = expected(folder, "long.wav", chunk_length_s=1, task="translate")
    assert typed("long.wav", "--chunk-length", "1", "--task", "translate")[1].strip() == chunked["text"].strip()


def test_demo(called: Any) -> None:
    """The package's own recordings, read by its own models, are nearly understood."""
    out, err = called("transcribe", "--demo", "--format", "json")
    lines = [json.loads(line) for line in out.splitlines()]
    recordings = bundled_models.recordings()
    assert len(lines) == len(recordings) > 1
    for line, (_, said) in zip(lines, recordings, strict=True):
        heard = line["text"].split()
        assert sum(word in heard for word in said.split()) > 0.7 * len(said.split())
        assert line["chunks"]
    assert "mean acceptance length" in err


def test_recordings_need_a_speech_model(folder: Path, tmp_path: Path, called: Any) -> None:
    """(The package's own, of 299 words, answered nonsense; a text model was asked for its `processor=`.)

    Errors name the flag, and openai-whisper's names of models. (They named `target`, after a search on the hub.)
    """
    text = ["--demo", "--model", saved_model(tmp_path / "llama")]
    way = "there is no such folder; for the hub's model pass openai/whisper"
    for arguments, words in (
        ([str(folder / "short.wav")], "no model was named: pass --model, for example --model openai/whisper-base"),
        (text, "--model must be a Whisper model"),
        (["--demo", "--model", "large-v3"], f"--model large-v3: {way}-large-v3"),
        (["--demo", "--draft", "tiny.en"], f"--draft tiny.en: {way}-tiny.en"),
        (["--demo", "--model", "./nowhere"], "--model must be a hub id"),
        (text, "is of the kind 'llama'"),
    ):
        out, err = called("transcribe", *arguments, code=2)
        assert (out, words in err) == ("", True)


def test_folders_are_the_recordings_in_them(folder: Path, tmp_path: Path, typed: Any) -> None:
    """Those of folders inside too, in order, and nothing else. (There was no such file.)"""
    inside = tmp_path / "rec" / "more"
    inside.mkdir(parents=True)
    for path in (inside.parent / "b.wav", inside.parent / "a.WAV", inside / "c.wav"):
        path.write_bytes((folder / "short.wav").read_bytes())
    (inside / "notes.txt").write_text("no sound")
    code, out, _ = typed(inside.parent, "short.wav", "--format", "json", "--quiet")
    assert code == 0
    files = [json.loads(line)["file"] for line in out.splitlines()]
    assert [Path(file).name for file in files] == ["a.WAV", "b.wav", "c.wav", "short.wav"]


@pytest.mark.parametrize("batch_size", ["1", "3"])
def test_one_bad_recording(batch_size: str, folder: Path, tmp_path: Path, typed: Any) -> None:
    """It is told and left out, the others go on, and the exit code is 1. (It ended them all.)"""
    bad = tmp_path / "bad.wav"
    bad.write_text("no sound")
    good = [str(folder / "short.wav"), str(folder / "long.wav")]
    flags = ["--format", "json", "--batch-size", batch_size]
    code, out, err = typed(good[0], bad, "nowhere.wav", good[1], *flags)
    assert code == 1
    assert [json.loads(line)["file"] for line in out.splitlines()] == good
    assert "bad.wav is not sound" in err
    assert "error: `FILE` must be the name of a sound file, got 'nowhere.wav': there is no such file" in err
    assert all(name in part for name, part in zip(good, err.split(" s of sound in "), strict=False))
    assert typed(bad, "--quiet")[:2] == (1, "")


def test_cues_are_cut_as_asked(folder: Path, typed: Any) -> None:
    """--max-words-per-line times words by itself; --max-line-width breaks lines; neither is for text."""
    out = typed("long.wav", "--format", "srt", "--max-words-per-line", "1", "--quiet")[1]
    words = expected(folder, "long.wav", return_timestamps="word")["chunks"]
    assert out.count(" --> ") == sum(bool(word["text"].strip()) for word in words) > 1
    assert "> --" not in (vtt := typed("long.wav", "--format", "vtt", "--words", "--quiet")[1])
    assert "<00:00:0" in vtt
    lines = typed("long.wav", "--format", "vtt", "--max-line-width", "1", "--quiet")[1].splitlines()
    assert all(" " not in line for line in lines if " --> " not in line)
    code, _, err = typed("long.wav", "--max-line-width", "40")
    assert (code, "--max-line-width is for subtitles: pass --format srt or vtt" in err) == (2, True)
    code, _, err = typed("long.wav", "--words")
    assert (code, "--words gives times, which text has not: pass --format json, srt or vtt" in err) == (2, True)


def test_lines_of_decoder_libraries_stay_off_the_screen(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """mpg123 wrote `Note: Illegal Audio-MPEG-Header` about text and `Warning: Xing stream size` about a cut file."""
    cut, text = tmp_path / "cut.mp3", tmp_path / "text.mp3"
    soundfile.write(cut, speech(3.0), RATE)
    cut.write_bytes(cut.read_bytes()[:3000])
    text.write_text("no sound " * 200)
    model = ["--model", str(folder / "model"), "--max-new-tokens", "12"]
    assert run_command(["transcribe", str(cut), str(text), *model]) == 1
    err = capfd.readouterr().err
    assert "text.mp3 is not sound" in err
    assert re.search(r"\d of 2 recordings could not be read", err)
    assert "s of sound in" in err
    assert not [line for line in err.splitlines() if "Header" in line or "Xing" in line]


@pytest.mark.parametrize("kind", ["srt", "json"])
def test_what_was_heard_stays(
    kind: str, folder: Path, tmp_path: Path, typed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM in the first window of a long file leaves that window's text. (All of it was lost.)"""
    listen = Listener._round

    def stopped(*arguments: Any) -> None:
        listen(*arguments)
        signal.raise_signal(signal.SIGTERM)

    flags = ["--format", kind, "--output-dir", tmp_path, "--resume"]
    whole = len(expected(folder, "long.wav", return_timestamps=True)["chunks"])
    with monkeypatch.context() as patch:
        patch.setattr(Listener, "_round", stopped)
        code, _, err = typed("short.wav", "long.wav", *flags)
        assert code == 130
        assert "stopping after these windows" in err
        assert "1 of 2 recordings are done; run the same command again to resume" in err
        code, _, err = typed("long.wav", *flags)
        part = tmp_path / f"long.part.{kind}"
        assert (code, f"long.wav what was heard until now is in {part}" in err) == (130, True)
    text = part.read_text("utf-8")
    assert 0 < (text.count(" --> ") if kind == "srt" else len(json.loads(text)["chunks"])) < whole
    assert ("stopped" in text) == (kind == "json")
    assert sorted(path.name for path in tmp_path.iterdir()) == [part.name, f"short.{kind}"]
    assert typed("long.wav", *flags)[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"long.{kind}", f"short.{kind}"]


def test_progress_names_the_recording(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seconds are of that recording. ("2/5, 44 of 44 s of sound" seemed to tell of all.)"""
    monkeypatch.setattr("specdec.cli.terminal._SECONDS", -1.0)
    err = typed("short.wav", "long.wav")[2]
    assert ": 1 of 1 s of recording 1 of 2" in err
    assert ": 3 of 3 s of recording 2 of 2" in err
    assert " s of recordings 1 to 2 of 2" in typed("short.wav", "long.wav", "--batch-size", "2")[2]


def test_what_goes_wrong_is_told(folder: Path, tmp_path: Path, typed: Any) -> None:
    """One red line, the file's name in it, and exit code 2."""
    short = "short.wav"
    for arguments, words in (
        ([], "--demo"),
        ([short, "--demo"], "--demo"),
        ([short, "--max-line-count", "2", "--format", "srt"], "pass --max-line-width"),
        ([short, short, "--format", "srt"], "--output-dir"),
        ([short, short, "--output-dir", tmp_path], "short twice, of "),
        (["nowhere.wav", "none.wav"], "there is no file nowhere.wav"),  # (The model was loaded first.)
        ([short, "--output-dir", folder / "model" / "config.json"], "--output-dir"),
        ([short, "--language", "klingon"], "language"),
        ([short, "--task", "translate", "--set", "task=transcribe"], "set by its flag and by --set"),
        ([folder / "model"], "has no wav, flac, mp3 or ogg file (a model is named with --model)"),
    ):
        code, _, err = typed(*arguments)
        assert code == 2
        assert words in err
