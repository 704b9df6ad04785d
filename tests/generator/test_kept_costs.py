"""What schedules learned is there in the next program: it begins without trials, and no file changes a text."""

import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest

from specdec import SpecGenerator
from specdec.core.draft_schedules.cost import Cost
from specdec.generator import kept_costs
from tests.heads import eagle_folder, target
from tests.tiny import tiny

CALL = {"max_new_tokens": 48, "eos_token_id": None, "schedule": "cost"}
PROMPT = [[5, 9, 20, 31, 5, 9, 20, 31, 5, 9]]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SPECDEC_PROBES", str(tmp_path))
    return tmp_path / "costs"


def generator(folders: tuple[str, str], draft: str = "suffix+{}") -> SpecGenerator:
    large, small = folders
    return SpecGenerator.from_pretrained(large, draft.format(small), dtype="float32")


def learned(generator: SpecGenerator, **call: Any) -> Cost:
    """The schedule with which a call of this generator would begin."""
    options = generator.options(**{**CALL, **call})
    schedule = generator._scheduled.pacing(options).schedule
    assert isinstance(schedule, Cost)
    return schedule


def test_the_next_program_begins_with_what_was_learned(folder: Path, folders: tuple[str, str]) -> None:
    """Each program measured passes anew, in drafted and plain rounds of its first text."""
    with generator(folders) as first:
        assert not learned(first).is_measured
        text = first.generate(PROMPT, **CALL).sequences
        before, odds = learned(first), first.draft.odds  # type: ignore[union-attr]
    [file] = folder.iterdir()
    assert file.stat().st_size < 4096
    with generator(folders) as second:
        after = learned(second)
        assert after.is_measured
        assert after.acceptance == before.acceptance
        assert after.seconds.drafts == before.seconds.drafts
        assert second.draft.odds == odds  # type: ignore[union-attr]
        assert second.generate(PROMPT, **CALL).sequences.equal(text)


def test_what_costs_differently_is_kept_apart(folder: Path, folders: tuple[str, str]) -> None:
    with generator(folders) as first:
        first.generate(PROMPT, **CALL)
        assert learned(first).is_measured
        assert not learned(first, do_sample=True).is_measured
    for other in (generator(folders, "model:{}"), generator(folders[::-1])):
        with other:
            assert not learned(other).is_measured


def test_a_generator_that_is_dropped_keeps_what_it_learned(folder: Path, folders: tuple[str, str]) -> None:
    dropped = generator(folders)
    dropped.generate(PROMPT, **CALL)
    del dropped
    gc.collect()
    assert len(list(folder.iterdir())) == 1


def test_a_head_has_its_folder_for_a_name(folder: Path, tmp_path: Path) -> None:
    model = target()
    model.config.name_or_path = "target"
    with SpecGenerator(model, str(eagle_folder(tmp_path / "head"))) as first:
        first.generate(PROMPT, **CALL)
    assert len(list(folder.iterdir())) == 1


def test_a_model_without_a_name_leaves_no_file(folder: Path) -> None:
    with SpecGenerator(tiny("llama"), tiny("llama", seed=1)) as unnamed:
        unnamed.generate(PROMPT, **CALL)
    assert not folder.exists()


def _changed(text: str, value: Any) -> str:
    data = json.loads(text)
    data[0]["levels"] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    "broken",
    [
        lambda text: text[:-9],
        lambda text: "{}",
        lambda text: "[]",
        lambda text: "\0",
        lambda text: _changed(text, float("nan")),
        lambda text: _changed(text, -1),
        lambda text: _changed(text, "many"),
        lambda text: text.replace('"bins":[[', '"bins":[[1,1,1],['),
    ],
)
def test_a_broken_file_is_ignored(folder: Path, folders: tuple[str, str], broken: Any) -> None:
    with generator(folders) as first:
        first.generate(PROMPT, **CALL)
    [file] = folder.iterdir()
    file.write_text(broken(file.read_text()))
    with generator(folders) as second:
        assert not learned(second).is_measured
        second.generate(PROMPT, **CALL)
    assert json.loads(file.read_text())[0]["levels"] > 0


def test_the_oldest_files_go(folder: Path, folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_costs, "_MOST", 3)
    folder.mkdir()
    for age in range(1, 6):
        (folder / f"{age}.json").write_text("{}")
        os.utime(folder / f"{age}.json", (1000 - age, 1000 - age))
    with generator(folders) as first:
        first.generate(PROMPT, **CALL)
    assert {"1.json", "2.json"} < {file.name for file in folder.iterdir()}
    assert len(list(folder.iterdir())) == 3


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path, folders: tuple[str, str]) -> None:
    folder.write_text("")
    with generator(folders) as first:
        first.generate(PROMPT, **CALL)
    assert folder.read_text() == ""
