"""`specdec bench`: flags, files, exit codes, and where output goes."""

import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from specdec.bench import runner
from specdec.cli.bench import suite_keys
from specdec.cli.terminal import Bar, duration
from specdec.proposers import DRAFTS
from tests.bench.fakes import lie


@pytest.fixture
def arguments(folders: tuple[str, str], tmp_path: Path) -> list[str]:
    """A benchmark of a moment."""
    (tmp_path / "p.txt").write_text("abab\n\nxyxy")
    shared = ["--prompts", str(tmp_path / "p.txt"), "--max-new-tokens", "5", "--repeats", "1", "--quiet"]
    return ["bench", folders[0], "--draft", "suffix", *shared, "--out", str(tmp_path / "out")]


def params(**given: Any) -> dict[str, Any]:
    """Parameters of `bench`, as if nothing but `given` had been passed."""
    return {**dict.fromkeys(("config", "schedule", "num_draft_tokens", "count")), **given}


OWN = 'from specdec.proposers import DRAFTS\nDRAFTS["echo"] = lambda tokens, k: tokens[-1:] * k\n'


def test_a_draft_of_ones_own(
    arguments: list[str], tmp_path: Path, called: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module registers it before the suite is read; samples of other code are not continued."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(DRAFTS, "echo", DRAFTS["suffix"])  # what the module sets is undone
    Path("own_echo.py").write_text(OWN)
    arguments += ["--draft", "echo", "--import", "own_echo"]
    assert re.search(r"echo, auto +\d+\.\d\d ms per token", called(*arguments).out)
    assert DRAFTS["echo"].__module__ == "own_echo"
    Path("own_echo.py").write_text(f"{OWN}# better")
    assert "another configuration" in called(*arguments, code=2).err
    del sys.modules["own_echo"]


def test_bench(arguments: list[str], tmp_path: Path, called: Any) -> None:
    """The outcome in words on stdout, all figures in the folder, and the same again from its samples."""
    arguments += ["--schedule", "constant"]  # which drafts however slow the machine is
    out, err = called(*arguments)
    assert re.search(r"suffix, constant +\d+\.\d\d ms per token  eager.*  acceptance length \d\.\d\d\n", out)
    assert "2 of 2 assisted texts are identical" in out
    assert err == f"all figures: {tmp_path / 'out' / 'results.json'}\n"
    [group] = json.loads((tmp_path / "out" / "results.json").read_text())["groups"]
    for system in group["systems"]:
        assert sum(system["split_ms_per_token"].values()) == pytest.approx(system["ms_per_token"])
    assert called(*arguments).out == out


@pytest.mark.parametrize("extra", [[], ["--restart"]])
def test_ctrl_c_tells_how_to_go_on(
    extra: list[str], arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, called: Any
) -> None:
    """The same command resumes, which only the help said."""
    monkeypatch.setattr("specdec.bench.run", Mock(side_effect=KeyboardInterrupt))
    err = called(*arguments, *extra, code=130).err
    without = " without --restart" if extra else ""
    assert f"run the same command{without} to resume" in err
    assert str(tmp_path / "out") in err


def test_the_bar_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Percentage and time left are there, whatever is being done."""
    out = Console(width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr("specdec.cli.terminal.Console", lambda **_: out)
    bar = Bar()
    bar(12, 48, "a long description " * 8)
    with out.capture() as captured:
        out.print(bar.get_renderable())
    [line] = captured.get().splitlines()
    assert line.startswith(" 25% ")
    assert "-:--:-- left a long description" in line
    assert len(line) <= 80
    with out.capture() as captured:
        out.print(Bar("loading").get_renderable())
    assert "left" not in captured.get()  # of no time


PACES = [  # the times that a clock shows, what was done by then of how much; the lines
    (
        [(1, 40, 100), (31, 60, 100), (40, 61, 100), (61, 70, 100), (62, 3, 9), (82, 4, 9), (83, 0, 6), (103, 1, 6)],
        [
            f"{share}%, about {left} left: it"
            for share, left in ((60, "1:00"), (70, "1:00"), (44, "1:40"), (17, "1:40"))
        ],
    ),
    ([(1, 10, 10), (31, 40, 70), (61, 70, 90)], ["57%, about 0:30 left: it", "78%, about 0:20 left: it"]),
]


@pytest.mark.parametrize(("steps", "lines"), PACES, ids=["parts", "one that grows"])
def test_a_piped_run_gives_signs_of_life(
    steps: Any, lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A line now and then; what an earlier run had measured, or another part of this one, does not set the pace.

    As recordings are opened one after the other, what is known of the work grows with what is done.
    """
    now = 0
    monkeypatch.setattr("rich.console.monotonic", lambda: now)
    bar = Bar(grows=len(steps) == 3)
    for time, done, total in steps:
        now = time
        bar(done, total, "it")
    assert capsys.readouterr().err.splitlines() == lines
    assert duration(3723) == "1:02:03"


def test_a_mismatch_is_exit_code_3(arguments: list[str], monkeypatch: pytest.MonkeyPatch, called: Any) -> None:
    monkeypatch.setattr(runner, "measure", lie)
    out, err = called(*arguments, code=3)
    assert "2 DIFFER" in out
    assert "error: mismatch in " in err
    assert "new token 2 of request 0, row 0" in err
    assert "apart there (1 more)" in err


def test_a_failure_is_exit_code_1(arguments: list[str], called: Any) -> None:
    out, err = called(*arguments, "--draft", "early_exit:99", code=1)
    assert "suffix, auto" in out
    assert re.search(r"  early_exit:99, auto +not measured: OptionError: ", out)
    assert "early_exit:99, auto: OptionError: " in err


def test_another_configuration_and_restart(arguments: list[str], tmp_path: Path, called: Any) -> None:
    """Samples of other settings are only forgotten when told so. A file is no folder. (It was a FileExistsError.)"""
    (tmp_path / "out").write_text("mine")
    assert "`out` must be a folder" in called(*arguments, "--restart", code=2).err
    (tmp_path / "out").unlink()
    called(*arguments)
    assert "--restart" in called(*arguments, "--seed", "5", code=2).err
    called(*arguments, "--seed", "5", "--restart")


WRONG = [("--schedule", "fast", "`schedule`"), ("--repeats", "0", "--repeats")]
WRONG += [("--prompts", "nowhere.txt", "nowhere.txt"), ("--config", "nowhere.yaml", "nowhere.yaml")]


def test_usage_errors(arguments: list[str], called: Any) -> None:
    for *flag, words in WRONG:
        assert words in called(*arguments, *flag, code=2).err
    assert "pass TARGET" in called("bench", code=2).err


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
