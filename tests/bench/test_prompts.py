"""Prompt sets of the package, and files in other benchmarks' formats."""

import json
from pathlib import Path

import pytest

from specdec.bench.prompts import SETS, PromptText, batches, pick_prompts, spread
from specdec.errors import OptionError


@pytest.mark.parametrize("name", SETS)
def test_the_packages_sets(name: str) -> None:
    prompts = pick_prompts(name, 5)
    assert len({prompt.text for prompt in prompts}) == 5
    assert all(prompt.text.strip() and prompt.category for prompt in prompts)


def test_copies_begin_anew() -> None:
    """What the prompt ends with is how it begins."""
    for prompt in pick_prompts("copy", 3):
        first, _, again = prompt.text.rpartition("\n\n\n")
        assert again
        assert first.startswith(again.rstrip("\n"))


def test_formats(tmp_path: Path) -> None:
    """Spec-Bench's first turn with its category, HumanEval's prompt, GSM8K's question, paragraphs of a text."""
    lines = {
        "spec.jsonl": [{"question_id": 1, "category": "qa", "turns": ["first", "second"]}],
        "human.jsonl": [{"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "pass"}],
        "gsm.jsonl": [{"question": "How many?", "answer": "3"}],
    }
    for name, entries in lines.items():
        (tmp_path / name).write_text("\n".join(map(json.dumps, entries)) + "\n\n")
    (tmp_path / "text.txt").write_text("one\nline\n\n\n  \n\ntwo\n")
    found = {path.stem: pick_prompts(str(path), 9) for path in tmp_path.iterdir()}
    assert found["spec"] == [PromptText("first", "qa")]
    assert found["human"] == [PromptText("def f():\n", "human")]
    assert found["gsm"] == [PromptText("How many?", "gsm")]
    assert found["text"] == [PromptText("one\nline", "text"), PromptText("two", "text")]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"text": "x"}\n{"te', "line 2 is not JSON"),
        ("a.jsonl", '{"answer": "x"}', "line 1 has no text"),
        ("a.jsonl", '{"turns": []}', "line 1 has no text"),
        ("a.jsonl", "[1]", "line 1 has no text"),
        ("a.txt", " \n\n ", "a file with prompts in it"),
        ("nowhere.txt", None, "code, copy, text or a readable file"),
    ],
)
def test_bad_files(name: str, content: str | None, words: str, tmp_path: Path) -> None:
    """An error names the file and the line; the sets of the package are the way out."""
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(OptionError, match=words):
        pick_prompts(str(tmp_path / name), 3)


def test_categories_are_mixed_and_batches_are_not() -> None:
    """A few prompts are of many kinds; a batch is of one."""
    prompts = [PromptText(str(i), kind) for i, kind in enumerate("aaaabbc")]
    mixed = list(spread(prompts, 5))
    assert [prompt.category for prompt in mixed] == ["a", "b", "c", "a", "b"]
    found = batches(prompts, 2)
    assert [[prompt.text for prompt in batch] for batch in found] == [["0", "1"], ["2", "3"], ["4", "5"], ["6"]]
