"""The folders are layers: imports point upwards in this list, and nowhere in a circle."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import specdec

ROOT = Path(specdec.__file__).parent
# A folder imports itself and what stands above it.
LAYERS = [
    *("errors", "core", "options", "kernels", "models", "decoding", "proposers", "engine", "parallel", "generator"),
    *("pipelines", "integrations", "bench", "distill", "server", "batch", "cli"),
]
# Programs do not import each other, nor do strategies import models: what stands here does not import what follows.
APART = {
    "decoding": {"models"},
    "distill": {"bench"},
    "server": {"bench", "distill"},
    "batch": {"bench", "distill"},
}
MODULES = {
    ".".join(("specdec", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}


def imports(module: str) -> set[str]:
    """The modules of the package that one imports: in functions and for type hints, too."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & MODULES.keys() - {module, "specdec"}


IMPORTS = {module: imports(module) for module in MODULES}


def folder(module: str) -> str:
    return module.split(".")[1]


@pytest.mark.parametrize("module", sorted(MODULES.keys() - {"specdec", "specdec.__main__"}))
def test_a_folder_imports_what_stands_above_it(module: str) -> None:
    own = folder(module)
    for other in {folder(name) for name in IMPORTS[module]} - {own}:
        assert LAYERS.index(other) < LAYERS.index(own), f"{module} imports {other}"
        assert other not in APART.get(own, ()), f"{module} imports {other}"


def test_there_are_no_circles() -> None:
    TopologicalSorter(IMPORTS).prepare()  # raises for one


def test_the_top_has_folders_and_little_else() -> None:
    entries = {path.name for path in ROOT.iterdir() if path.name != "__pycache__"}
    assert entries == {"__init__.py", "__main__.py", "errors.py", "py.typed", "zoo", *LAYERS[1:]}


def test_ray_and_pyarrow_are_imported_where_they_are_used() -> None:
    for path in (ROOT / "batch").rglob("*.py"):
        assert not re.search(r"^(import|from) (ray|pyarrow)\b", path.read_text(), re.MULTILINE), path
