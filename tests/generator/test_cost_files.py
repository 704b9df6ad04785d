"""What schedules learned is there in the next program: it begins without trials, and no file changes a text."""

import gc
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers

from specdec import SpecGenerator
from specdec.core.draft_schedules.cost import Cost
from specdec.core.draft_schedules.estimates import Acceptance, LinearFit
from specdec.core.drafts import Draft
from specdec.errors import EngineError
from specdec.generator import cost_files
from specdec.models import LanguageModel
from specdec.proposers import FunctionDraft, HybridDraft, SuffixDraft
from specdec.proposers.form import FormDraft
from tests.heads import eagle_folder, target
from tests.matrix import slow
from tests.tiny import tiny

CALL = {"max_new_tokens": 32, "eos_token_id": None, "schedule": "cost"}
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
    """Each program measured passes anew, in drafted and plain rounds of its first text.

    Seconds of an earlier program soon count little. (Costs of a busy machine had the weight of twenty passes.)
    """
    with generator(folders) as first:
        assert not learned(first).is_measured
        text = first.generate(PROMPT, **CALL).sequences
        before, odds = learned(first), first.draft.odds  # type: ignore[union-attr]
    [file] = folder.glob("*-*.json")
    assert file.stat().st_size < 4096
    with generator(folders) as second:
        after = learned(second)
        assert after.is_measured
        assert after.acceptance == before.acceptance
        assert after.seconds.drafts.keys() == before.seconds.drafts.keys()
        lines = [after.seconds.passes, after.seconds.plain, *after.seconds.drafts.values()]
        assert max(line.weight for line in lines) < 1.6 < before.seconds.passes.weight
        line, mean = after.seconds.passes, before.seconds.passes.seconds / before.seconds.passes.weight
        assert line.seconds / line.weight == pytest.approx(mean)
        slope = before.seconds.passes.slope / mean
        assert line.steepness == pytest.approx(min(slope, (0.02 * slope) ** 0.5))  # (a busy hour's was kept for ever)
        assert second.draft.odds.acceptance == odds.acceptance  # type: ignore[union-attr]
        assert second.generate(PROMPT, **CALL).sequences.equal(text)


def test_what_costs_differently_is_kept_apart(
    folder: Path, folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another kind of call, backend, draft and target begin afresh."""
    with generator(folders) as first:
        first.generate(PROMPT, **CALL)
        assert not learned(first, do_sample=True).is_measured
        with monkeypatch.context() as patch:
            patch.setattr(LanguageModel, "backend", "other")
            assert not learned(first).is_measured
        assert learned(first).is_measured
    for other in (generator(folders, "model:{}"), generator(folders[::-1])):
        with other:
            assert not learned(other).is_measured


def test_a_generator_that_is_dropped_keeps_what_it_learned(folder: Path, folders: tuple[str, str]) -> None:
    dropped = generator(folders)
    dropped.generate(PROMPT, **CALL)
    del dropped
    gc.collect()
    assert len(list(folder.glob("*-*.json"))) == 1


def test_names_of_files(folder: Path, tmp_path: Path) -> None:
    """A model without a name leaves no file; a head has its folder for a name."""
    with SpecGenerator(tiny("llama"), tiny("llama", seed=1)) as unnamed:
        unnamed.generate(PROMPT, **CALL)
    assert not folder.exists()
    model = target()
    model.config.name_or_path = "target"
    with SpecGenerator(model, str(eagle_folder(tmp_path / "head"))) as first:
        first.generate(PROMPT, **CALL)
    assert len(list(folder.glob("*-*.json"))) == 1


@pytest.fixture(scope="module")
def written(folders: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The name and the text of the file that a program leaves."""
    root = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_PROBES", str(root))
        with generator(folders) as first:
            first.generate(PROMPT, **CALL)
    [file] = root.glob("costs/*-*.json")
    return file.name, file.read_text()


def _changed(text: str, value: Any) -> str:
    data = json.loads(text)
    data[0]["levels"] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    "broken",
    [
        lambda text: text[:-9], lambda text: "[]", lambda text: _changed(text, float("nan")),
        lambda text: text.replace('"bins":[[', '"bins":[[1,1,1],['), slow(lambda text: "{}"), slow(lambda text: "\0"),
        slow(lambda text: _changed(text, -1)), slow(lambda text: _changed(text, "many")),
    ],
)  # fmt: skip
def test_a_broken_file_is_ignored(
    folder: Path, folders: tuple[str, str], written: tuple[str, str], broken: Any
) -> None:
    name, text = written
    folder.mkdir()
    (file := folder / name).write_text(broken(text))
    with generator(folders) as second:
        assert not learned(second).is_measured
        second.generate(PROMPT, **CALL)
    assert json.loads(file.read_text())[0]["levels"] > 0


def test_the_oldest_files_go(folder: Path, folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_files, "_MOST", 3)
    folder.mkdir()
    for age in range(1, 6):
        (folder / f"{age}.json").write_text("{}")
        os.utime(folder / f"{age}.json", (1000 - age, 1000 - age))
    with generator(folders) as first:
        first.generate(PROMPT, **CALL)
    assert "1.json" in {file.name for file in folder.iterdir()}
    assert len(list(folder.iterdir())) == 3


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path, folders: tuple[str, str]) -> None:
    folder.write_text("")
    with generator(folders) as first:
        first.generate(PROMPT, **CALL)
    assert folder.read_text() == ""


class Foreign(SuffixDraft):
    """A caller's draft whose `repr` is that of another one."""


@pytest.mark.parametrize(
    "draft", [FunctionDraft(lambda tokens, k: []), Foreign(), HybridDraft(Foreign(), SuffixDraft())]
)
def test_the_draft_of_a_caller_leaves_no_file(folder: Path, folders: tuple[str, str], draft: Draft) -> None:
    """Two functions with one name, and classes with one `repr`, took each other's costs."""
    with SpecGenerator.from_pretrained(folders[0], dtype="float32") as plain:
        assert cost_files.place(plain.target, draft, "greedy") is None
        assert cost_files.place(plain.target, FormDraft(), "greedy") is not None


def test_a_file_is_of_one_device_and_release(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs on one GPU were another one's, and those of offloaded or strict models or older releases were others'."""
    model = LanguageModel(tiny("llama"))
    monkeypatch.setattr(model.model.config, "name_or_path", "target")

    def file() -> Path | None:
        cost_files._machine.cache_clear()
        return cost_files.place(model, SuffixDraft(), "greedy")

    files = [file()]
    for name, value in (("is_offloaded", True), ("is_strict", True), ("device", torch.device("cuda"))):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "one")
        monkeypatch.setitem(vars(model), name, value)
        files.append(file())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")
    files.append(file())
    monkeypatch.setattr(transformers, "__version__", "0")
    files.append(file())
    cost_files._machine.cache_clear()
    assert len(set(files)) == len(files)


def test_a_relative_path_is_a_name_in_its_folder_alone(
    folder: Path, folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models at `./model` in two folders shared a file."""
    with SpecGenerator.from_pretrained(folders[0], dtype="float32") as plain:
        before = cost_files.place(plain.target, SuffixDraft(), "greedy")
        monkeypatch.chdir(Path(folders[0]).parent)
        plain.target.model.config.name_or_path = Path(folders[0]).name
        assert cost_files.place(plain.target, SuffixDraft(), "greedy") == before


def test_a_file_is_named_once(folder: Path, folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call walked over all modules of the models."""
    monkeypatch.setattr(cost_files, "place", place := Mock(wraps=cost_files.place))
    with generator(folders) as first:
        first.generate(PROMPT, **CALL)
        first.generate(PROMPT, **CALL)
    place.assert_called_once()


def test_kinds_of_call_share_the_odds(folder: Path, folders: tuple[str, str]) -> None:
    """Each kind's file held a copy of a hybrid's odds, and an old copy came back."""
    with generator(folders) as first:
        first.generate(PROMPT, **CALL)
    with generator(folders) as second:
        second.generate(PROMPT, **CALL, do_sample=True, seed=1)
        odds = second.draft.odds  # type: ignore[union-attr]
    assert len(list(folder.iterdir())) == 3
    with generator(folders) as third:
        learned(third)
        assert third.draft.odds.acceptance == odds.acceptance  # type: ignore[union-attr]


def test_a_poor_draft_is_tried_again_in_the_next_program(folder: Path, folders: tuple[str, str]) -> None:
    """What 200 guesses of other texts, and reading in a busy hour, had taught kept the model from reading for ever."""
    with generator(folders) as first:
        first.generate(PROMPT, **CALL)
        first.draft.odds.acceptance = Acceptance().after([(0.8, False)] * 200, 200)  # type: ignore[union-attr]
        first.draft.odds.reading = 60.0  # type: ignore[union-attr]
        for _ in range(100):
            first.draft.odds.passes = first.draft.odds.passes.add(1, 60.0)  # type: ignore[union-attr]
    with generator(folders) as second:
        learned(second)
        odds = second.draft.odds  # type: ignore[union-attr]
        assert odds.reading is None
        assert odds.passes.weight < 5  # so that few new passes tell how long one takes
        assert 0.1 < odds.acceptance.mean < odds.acceptance.hoped - 0.1


def test_what_cannot_be_written_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A failed write left a temporary file, and another error than OSError ended `close`."""
    line = LinearFit(2.0, 2.0, 2.0, 2.0, 2.0)
    cost = Cost(seconds=cost_files.Seconds(drafts={"suffix": line}))
    lost = Cost(seconds=cost_files.Seconds(drafts={"suffix": "no line"}))  # type: ignore[dict-item]
    monkeypatch.setattr(Cost, "is_measured", True)
    paths = [folder / "a-a.json", folder / "b-b.json", folder / "c-c.json"]
    paths[1].mkdir(parents=True)
    last = {path: (path, SimpleNamespace(schedule=one)) for path, one in zip(paths, (lost, cost, cost), strict=True)}
    cost_files.write_costs(last, None)  # type: ignore[arg-type]
    assert sorted(folder.iterdir()) == paths[1:]
    assert not last


def test_drafts_of_calls_are_kept_when_the_generator_closes(folder: Path, folders: tuple[str, str]) -> None:
    """Only the generator's own draft was."""
    with SpecGenerator.from_pretrained(folders[0], dtype="float32") as first:
        first.generate(PROMPT, **CALL, prompt_lookup_num_tokens=3)
        first._form_draft._last["form"] = (
            folder / "form-form.json",
            next(iter(first._drafts.of_calls[0]._last.values()))[1],
        )
    assert len(list(folder.iterdir())) == 2


def test_a_generator_that_cannot_close_keeps_what_it_learned(folder: Path, folders: tuple[str, str]) -> None:
    """It kept nothing; and what it learns afterwards, it keeps when it closes at last."""
    first = generator(folders)
    first.generate(PROMPT, **CALL)

    def closing(ids: Any, logits: Any) -> Any:
        with pytest.raises(EngineError):
            first.close()
        return logits

    first.generate(PROMPT, **{**CALL, "max_new_tokens": 2}, logits_processor=[closing])
    [file] = folder.glob("*-*.json")
    file.unlink()
    first.generate(PROMPT, **CALL)
    first.close()
    assert file.exists()
