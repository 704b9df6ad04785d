"""A run on tiny models: what is measured, kept, compared and resumed."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
from huggingface_hub.errors import EntryNotFoundError

from specdec import LanguageModel, SpecGenerator
from specdec.bench import exit_state, read_suite, results, run, runner
from specdec.bench.machine import provenance
from specdec.bench.results import Speedup, summary
from specdec.bench.samples import Store
from specdec.bench.systems import measure
from specdec.errors import OptionError, SpecdecError
from specdec.options import bundled_models, versions
from tests.bench.fakes import lie, reported
from tests.folders import saved_model


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_all_systems_in_turn(keys: dict[str, Any], tmp_path: Path) -> None:
    """Every system runs every prompt every time, another one first each time; all texts are the target's."""
    heard: list[tuple[int, int, str]] = []
    outcome = run(read_suite(keys), tmp_path / "out", lambda *news: heard.append(news))
    samples = [line for line in lines(tmp_path / "out") if line["kind"] == "sample"]
    systems = ["plain", f"{keys['drafts'][0]}, constant 2", "suffix, constant 2"]
    assert len(samples) == 3 * 2 * 2
    for turn in range(4):
        names = [s["system"] for s in samples[3 * turn : 3 * turn + 3]]
        assert names == systems[turn % 3 :] + systems[: turn % 3]
        assert {(s["repeat"], s["batch"]) for s in samples[3 * turn : 3 * turn + 3]} == {divmod(turn, 2)}
    assert {len(s["tokens"][0]) for s in samples} == {6}
    assert all(s["first_token"] <= s["seconds"] and len(s["gaps"]) < 6 for s in samples)
    assert heard[-1][:2] == (11, 12)
    found = results(outcome)
    assert [s["identical"] for s in found["groups"][0]["systems"]] == [0, 4, 4]
    assert exit_state(found) == "ok"
    assert found["mismatches"] == found["failures"] == []


def test_a_killed_run_goes_on(keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured before the kill stays, what a kill cut in two is measured again, the rest is added."""
    killed = Mock(wraps=measure, side_effect=[*[DEFAULT] * 5, KeyboardInterrupt, *[DEFAULT] * 8])
    monkeypatch.setattr(runner, "measure", killed)
    folder = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(read_suite(keys), folder)
    before = (folder / "samples.jsonl").read_bytes()
    assert before.count(b'"kind": "sample"') == 5
    cut = before.rstrip(b"\n").rpartition(b"\n")
    (folder / "samples.jsonl").write_bytes(cut[0] + b"\n" + cut[2][:40])
    outcome = run(read_suite(keys), folder)
    assert killed.call_count == 6 + 8  # of 12 samples, four were whole
    assert (folder / "samples.jsonl").read_bytes().startswith(cut[0] + b"\n")
    assert [line["kind"] for line in lines(folder)].count("sample") == 12
    assert len(results(outcome)["runs"]) == 2


@pytest.mark.parametrize("text", ["not json\n", "[1]\n", '{"kind": "sample"}\n', '{"kind": \n'])
def test_a_foreign_file_is_refused(text: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """Samples of something else are not touched, and the error says what to do. (JSONDecodeError, AttributeError.)"""
    (tmp_path / "samples.jsonl").write_text(text)
    with pytest.raises(OptionError, match="--restart"):
        run(read_suite(keys), tmp_path)
    assert (tmp_path / "samples.jsonl").read_text() == text


def test_an_empty_file_is_a_beginning(tmp_path: Path) -> None:
    """A kill within the first line leaves nothing to go on with."""
    (tmp_path / "samples.jsonl").write_text('{"kind": "bench')
    Store(tmp_path, read_suite({"targets": "t"}), "mark")
    assert lines(tmp_path) == [{"kind": "benchmark", "fingerprint": "mark"}]


def test_another_configuration_is_refused(keys: dict[str, Any], folders: tuple[str, str], measured: Any) -> None:
    """Samples of other prompts or weights are never mixed in."""
    measured(drafts="suffix")
    Path(keys["prompts"]).write_text("other")
    with pytest.raises(OptionError, match=r"another configuration.*--restart"):
        measured(drafts="suffix")
    Path(keys["prompts"]).write_text("abab\n\nxyzxyz")
    measured(drafts="suffix")
    (Path(folders[0]) / "config.json").touch()
    with pytest.raises(OptionError, match="other models"):
        measured(drafts="suffix")


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("drafts", ["zoo:python-code", "suffix+zoo:python-code"])
def test_a_pair_that_was_trained_again(
    role: str, drafts: Any, folders: tuple[str, str], measured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New weights under an old name are noticed. (Only folders were looked at, and `zoo:` names were taken for ids.)"""
    monkeypatch.setattr(bundled_models, "_ROOT", tmp_path)
    folder = tmp_path / "python_code"
    for name, model in zip(("target", "draft"), folders, strict=True):
        shutil.copytree(model, folder / name)
    (folder / "card.json").write_text("{}")
    suite = {"targets": "zoo:python-code", "drafts": drafts, "repeats": 1}
    assert exit_state(measured(**suite)) == "ok"
    measured(**suite)
    (folder / role / "model.safetensors").touch()
    with pytest.raises(OptionError, match="other models"):
        measured(**suite)


def test_a_liar_is_found(folders: tuple[str, str], measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The position, both tokens, and how far the target's two best logits are apart there."""
    monkeypatch.setattr(runner, "measure", lie)
    found = measured(drafts="suffix")
    assert exit_state(found) == "mismatch"
    assert len(found["mismatches"]) == 4
    assert found["groups"][0]["systems"][1]["identical"] == 0
    assert "4 DIFFER" in " ".join(found["summary"])
    plain = SpecGenerator.from_pretrained(folders[0])
    out = plain.generate("abab", max_new_tokens=6, eos_token_id=[], output_logits=True)
    best, second = out.logits[3][0].topk(2).values.tolist()
    mismatch = found["mismatches"][0]
    token = out.new_tokens()[0][3]
    assert (mismatch["row"], mismatch["position"], mismatch["plain"], mismatch["other"]) == (0, 3, token, token + 1)
    assert mismatch["gap"] == pytest.approx(best - second, abs=1e-5)


@pytest.mark.parametrize(
    ("exactness", "told"), [("exact", "near-ties"), ("row-dependent", "4 part where the target is row-dependent")]
)
def test_what_may_differ(exactness: str, told: str, measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near-ties where asked, and texts of a target that is row-dependent, are counted and shown: no mismatch."""
    monkeypatch.setattr(LanguageModel, "exactness", exactness)
    monkeypatch.setattr(runner, "measure", lie)
    found = measured(near_tie=1e6, drafts="suffix")
    assert exit_state(found) == "ok"
    assert {m["excuse"] for m in found["mismatches"]} == {"near-tie" if exactness == "exact" else exactness}
    assert [s["exactness"] for s in found["groups"][0]["systems"]] == [exactness] * 2
    assert found["groups"][0]["systems"][1]["forgiven"] == 4
    assert told in " ".join(found["summary"])


def test_beams_trees_batches_and_rejection(keys: dict[str, Any], measured: Any) -> None:
    """A search is compared too; its tokens come at the end. Rejection follows the
    target's law alone, and says so.
    """
    law = {"name": "law", "do_sample": True, "sampling": "rejection"}
    tree = {"schedule": "constant", "num_assistant_tokens": 3, "num_assistant_branches": 2}
    both = {"drafts": keys["drafts"][:1], "schedules": [*keys["schedules"], tree]}
    found = measured(**both, strategies=["greedy", {"num_beams": 2}, law], batches=[2])
    assert exit_state(found) == "ok"
    greedy, beams, drawn = (group["systems"] for group in found["groups"])
    assert [s["name"].endswith("constant 3 branches 2") for s in greedy] == [False, False, True]
    assert [s["identical"] for s in greedy] == [s["identical"] for s in beams] == [0, 4, 4]
    assert [s["requests"] for s in beams] == [1, 1, 1]
    assert beams[1]["speedup"]["low"] is None
    assert [s["compared"] for s in drawn] == [0, 0, 0]
    assert "they are not compared" in " ".join(found["summary"])


def test_every_figure_is_explained(measured: Any) -> None:
    """The guide names all fields of a system, and no field that is not in the results."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "comparing.md").read_text(encoding="utf-8")
    lines = page.partition("## Read the results")[2].splitlines()
    shown = {name for line in lines if line.startswith("| `") for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    [group] = measured(drafts="suffix")["groups"]
    system = group["systems"][1]
    assert {*system} <= shown <= {*group, *system}


def test_failures_are_listed(measured: Any, tmp_path: Path) -> None:
    """A draft and a mode that do not load leave the others alone, and are tried again."""
    modes = [{"name": "good"}, {"name": "bad", "gguf_file": str(tmp_path / "broken.gguf")}]
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "none"}')
    for _ in range(2):
        found = measured(drafts=["suffix", str(tmp_path / "empty")], modes=modes)
        assert exit_state(found) == "failed"
        systems = [[s["name"] for s in group["systems"]] for group in found["groups"]]
        assert systems == [["plain", "suffix, constant 2"], []]
        assert [failure["system"] for failure in found["failures"]] == [f"{tmp_path / 'empty'}, constant 2", "plain"]
        assert "broken.gguf" in found["failures"][1]["error"]


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"targets": "./nowhere"}, "`target` must be .* there is no such folder"),
        ({"targets": "some/one"}, "`target` 'some/one' cannot be loaded"),
        ({"drafts": ["suffix", "./nowhere"]}, "`draft` must be .* there is no such folder"),
        ({"drafts": "model:some/one"}, "`draft` 'some/one' cannot be loaded"),
        ({"modes": [{}, {"gguf_file": "nowhere.gguf"}]}, "`gguf_file`"),
        ({"modes": [{"draft_options": {"gguf_file": "nowhere.gguf"}}]}, "`gguf_file`"),
        ({"prompts": ["code", "nowhere.txt"]}, "`prompts`"),
    ],
)
def test_names_are_checked_first(
    others: dict[str, Any], words: str, measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is loaded before the last name is known. (A misspelt target was found after an hour of another one.)"""
    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", Mock(side_effect=EntryNotFoundError("404")))
    monkeypatch.setattr(SpecGenerator, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(SpecdecError, match=words):
        measured(**others)


def test_a_large_model_is_named_as_it_drafts(
    keys: dict[str, Any], measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It copies from the text besides, and its name says so. (It stood there as if it drafted alone.)"""
    monkeypatch.setattr("specdec.generator.drafts_by_name._DEAR", 0)
    draft = keys["drafts"][0]
    found = measured(drafts=[draft, f"model:{draft}"])
    names = [system["name"] for system in found["groups"][0]["systems"]]
    assert names == ["plain", f"suffix+{draft}, constant 2", f"model:{draft}, constant 2"]


def test_a_draft_with_another_tokenizer(measured: Any, tmp_path: Path) -> None:
    """It goes over the text bridge, as in the library."""
    found = measured(drafts=saved_model(tmp_path / "other", backwards=True))
    assert exit_state(found) == "ok"
    assert found["groups"][0]["systems"][1]["identical"] == 4


def settings(*speedups: Speedup) -> dict[str, Any]:
    """Results of one group with these speedups."""
    common = {"compared": 1, "identical": 1, "acceptance_length_by_repeat": [2]}
    systems = [{**common, "name": f"draft {i}", "speedup": reported(found)} for i, found in enumerate(speedups)]
    group = {"label": "g", "comparable": True, "systems": systems}
    return {"groups": [group], "mismatches": [], "failures": [{"group": "g", "system": "d", "error": "e"}]}


SURE, UNSURE, LOSS = Speedup(1.5, 1.2, 1.9), Speedup(2.29, 0.59, 3.14), Speedup(0.5, 0.4, 0.6)


def test_the_summary() -> None:
    """It names the best of those that are clearly faster, and says of none that there is none. (The highest was named,
    whatever its interval; and "1 settings", "0 SLOWER".)
    """
    assert summary(settings(SURE, UNSURE)) == [
        "2 assisted settings: 1 faster than plain decoding, 1 without a clear difference.",
        "Best: draft 0 (g), 1.50× faster than plain decoding (95% interval 1.20 to 1.90).",
        "Median speedup: 1.90×.",
        "2 of 2 assisted texts are identical to plain decoding's.",
        "1 setting could not be measured.",
    ]
    assert summary(settings(UNSURE, LOSS, Speedup(3.0)))[:2] == [
        "3 assisted settings: 1 SLOWER, 1 without a clear difference, 1 of one request, without an interval.",
        "None is clearly faster than plain decoding.",
    ]
    assert summary(settings(Speedup(3.0), Speedup(2.0)))[1] == (
        "One request does not say which is faster: give more prompts."
    )
    assert summary(settings(Speedup(3.0)))[:2] == [
        "draft 0 (g), 3.00× plain decoding's speed (one request, no interval).",
        "1 of 1 assisted text is identical to plain decoding's.",
    ]
    words = "no clear difference from plain decoding: 2.29× (95% interval 0.59 to 3.14)"
    assert summary(settings(UNSURE))[0] == f"draft 0 (g), {words}."


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a checkout, with a mark where files differ; an installed package has none."""
    monkeypatch.setattr(versions, "__file__", str(tmp_path / "specdec" / "options" / "versions.py"))
    assert versions.commit() is None
    assert provenance()["commit"] is None
    (tmp_path / "file").write_text("one")
    who = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "file"], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    found = provenance()["commit"]
    assert re.fullmatch("[0-9a-f]{40}", found)
    (tmp_path / "file").write_text("two")
    assert versions.commit() == f"{found}-dirty"
