"""The presets in configs/: each names its source, is understood, and runs."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specdec.decoding.strategies import STRATEGIES, Greedy
from specdec.options.generate import Options
from specdec.options.resolve import read_yaml, resolve

PRESETS = sorted((Path(__file__).parents[2] / "configs" / "strategies").glob("*.yaml"))


def options(path: Path) -> Options:
    """What a preset asks of the library."""
    return resolve({name: value for name, value in read_yaml(path).items() if name != "draft"})


def test_every_strategy_has_a_preset() -> None:
    """One each; greedy decoding needs none, and two presets are variants of a strategy."""
    variants = ("beam-sample", "sample-and-rank")
    kinds = [next(kind for kind in STRATEGIES if kind.serves(options(p))) for p in PRESETS if p.stem not in variants]
    assert Counter(kinds) == Counter(set(STRATEGIES) - {Greedy})


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_runs(path: Path, folders: tuple[str, str], called: Any) -> None:
    """Its comment says who published the setting, and a tiny model decodes with it."""
    assert "et al." in " ".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    asked = ["-p", "ab", "--config", path, "--max-new-tokens", "4", "--seed", "1", "--quiet"]
    assert called("generate", folders[0], *asked).out
