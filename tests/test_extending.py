"""docs/extending.md: every example runs as it is printed, and adds to a registry what it says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.core.draft_schedules import SCHEDULES
from specdec.decoding import strategies
from specdec.options.fields import DRAFT_WORDS, SAMPLING
from specdec.options.load import QUANTIZATIONS
from specdec.proposers import DRAFTS

DOCS = (Path(__file__).parent.parent / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"## A (\w+)\n(?:(?!\n## ).)*?```python\n(.*?)```", DOCS, re.S)
OBJECTS = re.findall(r"### A ([^\n]*)\n(?:(?!\n##).)*?```python\n(.*?)```", DOCS, re.S)
TABLES: dict[str, dict[str, Any]] = {
    "draft": DRAFTS,
    "schedule": SCHEDULES,
    "quantization": QUANTIZATIONS,
}
BEFORE = {kind: {**table} for kind, table in [*TABLES.items(), ("sampling", SAMPLING)]}, strategies.STRATEGIES


def names(kind: str) -> set[str]:
    """The names in one registry."""
    return {strategy.name for strategy in strategies.STRATEGIES} if kind == "strategy" else {*TABLES[kind]}


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """Gives back all registries as they were."""
    yield
    for kind, table in [*TABLES.items(), ("sampling", SAMPLING)]:
        table.clear()
        table.update(BEFORE[0][kind])
    strategies.STRATEGIES = BEFORE[1]


@pytest.mark.parametrize(("kind", "code"), BLOCKS, ids=[kind for kind, _ in BLOCKS])
def test_an_example_runs(kind: str, code: str) -> None:
    """In a namespace of its own; afterwards its name is in the registry."""
    before = names(kind)
    exec(compile(code, f"docs/extending.md ({kind})", "exec", dont_inherit=True), {"__name__": f"extending_{kind}"})
    assert len(names(kind) - before) == 1
    assert "# the line" in code
    assert code.count("assert ") >= 3


@pytest.mark.parametrize(("title", "code"), OBJECTS, ids=[title for title, _ in OBJECTS])
def test_an_example_of_an_object_runs(title: str, code: str) -> None:
    """It needs no registry."""
    exec(compile(code, f"docs/extending.md ({title})", "exec", dont_inherit=True), {"__name__": "extending_object"})
    assert code.count("assert ") >= 2


def test_registries_are_as_they_were() -> None:
    """No example is left in them."""
    found = {kind: {**table} for kind, table in [*TABLES.items(), ("sampling", SAMPLING)]}
    assert (found, strategies.STRATEGIES) == BEFORE
    assert {*DRAFTS} == {*DRAFT_WORDS}


def test_every_kind_has_an_example() -> None:
    """One each, and nothing that looks like code is left out."""
    assert [kind for kind, _ in BLOCKS] == ["draft", "strategy", "schedule", "quantization"]
    assert [title for title, _ in OBJECTS] == ["draft that reads hidden states"]
    assert DOCS.count("```python") == len([*BLOCKS, *OBJECTS])
    for table in ("DRAFT_WORDS", "STRATEGIES", "SCHEDULES", "QUANTIZATIONS"):
        assert f"`{table}` in `specdec/" in DOCS
