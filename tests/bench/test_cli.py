"""`specdec bench`: flags, files, exit codes, and where output goes."""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specdec.bench import runner
from specdec.cli.bench import bench, suite_keys
from specdec.cli.commands import run
from specdec.cli.terminal import Heartbeat, duration, progress_bar
from specdec.proposers import DRAFTS
from tests.bench.fakes import lie
from tests.folders import saved_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target's folder."""
    return saved_model(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture
def arguments(target: str, tmp_path: Path) -> list[str]:
    """A benchmark of a moment."""
    (tmp_path / "p.txt").write_text("abab\n\nxyxy")
    shared = ["--prompts", str(tmp_path / "p.txt"), "--max-new-tokens", "5", "--repeats", "1", "--quiet"]
    return ["bench", target, "--draft", "suffix", *shared, "--out", str(tmp_path / "out")]


@pytest.fixture
def by_no_clock(arguments: list[str]) -> list[str]:
    """The same with a schedule that drafts however slow the machine is."""
    return [*arguments, "--schedule", "constant"]


def params(**given: Any) -> dict[str, Any]:
    """Parameters of `bench`, as if nothing but `given` had been passed."""
    return {**dict.fromkeys(inspect.signature(bench).parameters), **given}


OWN = """
from specdec.proposers import DRAFTS, FunctionDraft

class Echo(FunctionDraft):
    @classmethod
    def of(cls, target, argument, name="draft"):
        return cls(lambda tokens, k: tokens[-1:] * k)

DRAFTS["echo"] = Echo
"""


def test_a_draft_of_ones_own(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module registers it before the suite is read; samples of other code are not continued."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(DRAFTS, "echo", DRAFTS["suffix"])  # what the module sets is undone
    Path("own_echo.py").write_text(OWN)
    arguments += ["--draft", "echo", "--import", "own_echo"]
    assert run(arguments) == 0
    assert re.search(r"echo, auto +\d+\.\d\d ms per token", capsys.readouterr().out)
    assert DRAFTS["echo"].__module__ == "own_echo"
    Path("own_echo.py").write_text(f"{OWN}# better")
    assert run(arguments) == 2
    assert "another configuration" in capsys.readouterr().err
    del sys.modules["own_echo"]


def test_bench(by_no_clock: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The outcome in words on stdout, the report in the folder, and the same again from its samples."""
    assert run(by_no_clock) == 0
    out, err = capsys.readouterr()
    assert re.search(r"suffix, constant +\d+\.\d\d ms per token  eager.*  acceptance length \d\.\d\d\n", out)
    assert "2 of 2 assisted texts are identical" in out
    assert err == f"report: {tmp_path / 'out' / 'report.html'}\n"
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"samples.jsonl", "results.json", "results.csv"}
    assert run(by_no_clock) == 0
    assert capsys.readouterr().out == out


@pytest.mark.parametrize("extra", [[], ["--restart"]])
def test_ctrl_c_tells_how_to_go_on(
    extra: list[str], arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The same command resumes, which only the help said."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specdec.bench.run", interrupted)
    assert run([*arguments, *extra]) == 130
    err = capsys.readouterr().err
    without = " without --restart" if extra else ""
    assert f"run the same command{without} to resume" in err
    assert str(tmp_path / "out") in err


def test_the_bar_fits_80_columns() -> None:
    """Percentage and time left are there, whatever is being done."""
    out = Console(width=80, force_terminal=True, color_system=None)
    bar = progress_bar(out)
    bar.update(bar.add_task("", total=None), completed=12, total=48, description="a long description " * 8)
    with out.capture() as captured:
        out.print(bar.get_renderable())
    [line] = captured.get().splitlines()
    assert line.startswith(" 25% ")
    assert "-:--:-- left a long description" in line
    assert len(line) <= 80
    waits = progress_bar(out)
    waits.add_task("loading", total=None)
    with out.capture() as captured:
        out.print(waits.get_renderable())
    assert "left" not in captured.get()  # of no time


def test_a_piped_run_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A line now and then; what an earlier run had measured, or another part of this one, does not set the pace."""
    clock = iter([0.0, 1.0, 31.0, 40.0, 61.0, 62.0, 82.0])
    monkeypatch.setattr("specdec.cli.terminal.time.monotonic", lambda: next(clock))
    beat = Heartbeat(quiet=False)
    for done in (40, 60, 61, 70):
        beat(done, 100, "greedy")
    for done in (3, 4):
        beat(done, 9, "sampled")
    assert capsys.readouterr().err.splitlines() == [
        "60%, about 1:00 left: greedy",
        "70%, about 1:00 left: greedy",
        "44%, about 1:40 left: sampled",
    ]
    assert duration(3723) == "1:02:03"


def test_the_pace_outlasts_a_total_that_grows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As recordings are opened one after the other, what is known of the work grows with what is done."""
    clock = iter([0.0, 1.0, 31.0, 61.0])
    monkeypatch.setattr("specdec.cli.terminal.time.monotonic", lambda: next(clock))
    beat = Heartbeat(quiet=False, grows=True)
    for done, known in ((10, 30), (40, 70), (70, 90)):
        beat(done, known, "speech.wav")
    assert capsys.readouterr().err.splitlines() == [
        "57%, about 0:30 left: speech.wav",
        "78%, about 0:20 left: speech.wav",
    ]


def test_a_mismatch_is_exit_code_3(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report is written all the same, and the error says where."""

    monkeypatch.setattr(runner, "measure", lie)
    assert run(arguments) == 3
    out, err = capsys.readouterr()
    assert "2 DIFFER" in out
    assert "error: mismatch in " in err
    assert "new token 2 of request 0, row 0" in err
    assert "apart there (1 more)" in err


def test_a_failure_is_exit_code_1(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What could be measured is shown."""
    assert run([*arguments, "--draft", "early_exit:99"]) == 1
    out, err = capsys.readouterr()
    assert "suffix, auto" in out
    assert re.search(r"  early_exit:99, auto +not measured: OptionError: ", out)
    assert "early_exit:99, auto: OptionError: " in err


def test_another_configuration_and_restart(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples of other settings are only forgotten when told so. A file is no folder. (NotADirectoryError.)"""
    (tmp_path / "out").write_text("mine")
    assert run([*arguments, "--restart"]) == 2
    assert "`out` must be a folder" in capsys.readouterr().err
    (tmp_path / "out").unlink()
    assert run(arguments) == 0
    assert run([*arguments, "--seed", "5"]) == 2
    assert "--restart" in capsys.readouterr().err
    assert run([*arguments, "--seed", "5", "--restart"]) == 0


WRONG = [("--schedule", "fast", "`schedule`"), ("--repeats", "0", "--repeats")]
WRONG += [("--prompts", "nowhere.txt", "nowhere.txt"), ("--config", "nowhere.yaml", "nowhere.yaml")]


def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 before anything is loaded, with the way out."""
    for *flag, words in WRONG:
        assert run([*arguments, *flag]) == 2
        assert words in capsys.readouterr().err
    assert run(["bench"]) == 2
    assert "pass TARGET" in capsys.readouterr().err


def test_flags_over_a_file(tmp_path: Path) -> None:
    """What a flag says replaces the file's key; a count reaches the file's own prompt sets."""
    file = tmp_path / "mine.yaml"
    file.write_text("targets: a\nrepeats: 7\nschedules: [cost]\nprompts: [text, {source: code, chat: true}]\n")
    assert suite_keys(params(config=file)) == {
        **{"targets": "a", "repeats": 7, "schedules": ["cost"], "name": "mine"},
        "prompts": ["text", {"source": "code", "chat": True}],
    }
    given = params(config=file, count=3, repeats=2, num_draft_tokens=[1, 2], dtype="bfloat16", schedule=["heuristic"])
    assert suite_keys(given) == {
        **{"targets": "a", "repeats": 2, "name": "mine", "modes": [{"dtype": "bfloat16"}]},
        "schedules": ["heuristic", {"schedule": "constant", "num_assistant_tokens": [1, 2]}],
        "prompts": [{"source": "text", "count": 3}, {"source": "code", "chat": True, "count": 3}],
    }


@pytest.mark.parametrize("sets", ["text", "{source: text}", "[text]"])
def test_a_count_of_one_set(sets: str, tmp_path: Path) -> None:
    """A file may name a set without a list. (Its letters were taken for sets.)"""
    (tmp_path / "mine.yaml").write_text(f"targets: a\nprompts: {sets}\n")
    assert suite_keys(params(config=tmp_path / "mine.yaml", count=3))["prompts"] == [{"source": "text", "count": 3}]


@pytest.mark.slow
def test_the_quick_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The package's own pair, as the README runs it: all texts are the target's own."""
    config = Path(__file__).parents[2] / "configs" / "bench" / "quick.yaml"
    assert run(["bench", "--config", str(config), "--out", str(tmp_path / "out"), "--quiet"]) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert all(s["identical"] == s["compared"] for group in found["groups"] for s in group["systems"])
