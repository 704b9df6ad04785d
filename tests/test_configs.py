"""The presets in configs/: each names its source, is understood, and runs or says why it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec.cli.commands import run
from specdec.config import read_yaml, resolve
from tests.folders import saved_model

PRESETS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
LATER = {"meena-sample-and-rank", "lamda"}
IDS: dict[str, Any] = {"ids": lambda path: path.stem}


def test_all_presets_are_there() -> None:
    """The folder holds what the documentation lists."""
    expected = {"gpt2-greedy", "gpt3-top-p", "llama-greedy", "lamda", "meena-sample-and-rank"}
    assert {path.stem for path in PRESETS} == expected


@pytest.mark.parametrize("path", PRESETS, **IDS)
def test_a_preset_names_its_source(path: Path) -> None:
    """The first line is a comment, and the comment says who published the setting."""
    comment = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert path.read_text().startswith("#")
    assert "et al." in " ".join(comment)


@pytest.mark.parametrize("path", [p for p in PRESETS if p.stem not in LATER], **IDS)
def test_a_preset_runs(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its keys are options of the library, and a tiny model decodes with it."""
    resolve(read_yaml(path))
    model = saved_model(tmp_path / "model")
    arguments = ["generate", model, "-p", "ab", "--config", str(path), "--max-new-tokens", "4", "--seed", "1"]
    assert run([*arguments, "--quiet"]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("path", [p for p in PRESETS if p.stem in LATER], **IDS)
def test_sample_and_rank_is_refused(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A strategy of a later release is refused before anything is loaded, never replaced by plain sampling."""
    assert run(["generate", "no-such-model", "-p", "ab", "--config", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: sample-and-rank is not available yet")
