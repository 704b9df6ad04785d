"""Benchmarks and scripts of the documentation run on names that there are."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted([*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("docs/**/*.py")])


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports(file: Path) -> None:
    """What is imported of this package is there."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "specdec":
            module = importlib.import_module(node.module)
            for name in node.names:
                found = hasattr(module, name.name) or importlib.util.find_spec(f"{node.module}.{name.name}")
                assert found, f"{node.module} has no {name.name}"


def test_there_are_some() -> None:
    """The folders are where they are looked for."""
    assert len(FILES) > 20
