"""The folders are layers, and so are the files of each: imports point upwards in this list, nowhere in a circle."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import specdec

ROOT = Path(specdec.__file__).parent
# A folder imports itself and what stands above it.
LAYERS = [
    *("errors", "core", "options", "kernels", "models", "decoding", "proposers", "engine", "generator"),
    *("pipelines", "integrations", "bench", "server", "batch", "cli"),
]
# Programs do not import each other, nor do strategies import models: what stands here does not import what follows.
APART = {"decoding": {"models"}, "server": {"bench"}, "batch": {"bench"}}
MODULES = {
    ".".join(("specdec", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}


@cache
def imports(module: str) -> set[str]:
    """The modules of the package that one imports: in functions, for type hints and as text, too."""
    imported = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= {name if name in MODULES else node.module for name in names}
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "import_module":
            imported |= modules_of_text(ast.unparse(node.args[0]).strip("f'"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and ":" in node.value:
            path = node.value.partition(":")[0]
            imported |= {path, f"{home(module)}.{path}"}
    return imported & MODULES.keys() - {module, "specdec"}


def modules_of_text(text: str) -> set[str]:
    """The modules that `import_module` may import for a text; of an f-string, all that begin as it does."""
    begin, brace, _ = text.partition("{")
    return {name for name in MODULES if name.startswith(begin)} if brace and begin else {text}


def home(module: str) -> str:
    """The folder of a module."""
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


def folder(module: str) -> str:
    return module.split(".")[1]


def test_a_folder_imports_what_stands_above_it() -> None:
    for module in sorted(MODULES.keys() - {"specdec", "specdec.__main__"}):
        own = folder(module)
        for other in {folder(name) for name in imports(module)} - {own}:
            assert LAYERS.index(other) < LAYERS.index(own), f"{module} imports {other}"
            assert other not in APART.get(own, ()), f"{module} imports {other}"


def test_there_are_no_circles() -> None:
    TopologicalSorter({module: imports(module) for module in MODULES}).prepare()  # raises for one


@pytest.mark.parametrize("folder", sorted({home(module) for module in MODULES}))
def test_files_and_folders_of_a_folder_are_layers(folder: str) -> None:
    """Once `models/` was no tower: its caches imported backends, and its backends caches."""
    entries: dict[str, set[str]] = {}
    for module in MODULES:
        if entry := entry_of(folder, module):
            entries.setdefault(entry, set()).update(entry_of(folder, other) for other in imports(module))
    for entry, others in entries.items():
        others -= {entry, ""}
    TopologicalSorter(entries).prepare()  # raises for a circle


def entry_of(folder: str, module: str) -> str:
    """The file or folder in `folder` that has the module, or "" for a module elsewhere."""
    return module.removeprefix(f"{folder}.").split(".")[0] if module.startswith(f"{folder}.") else ""


def test_imports_as_text_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a text hid that a task of batches imports a module that imports the tasks."""
    texts = ['import_module("specdec.batch.run").run', 'import_module(f"specdec.proposers.{name}")', '"eagle3:load"']
    (tmp_path / "texts.py").write_text("\n".join(texts))
    monkeypatch.setitem(MODULES, "specdec.proposers.heads.texts", tmp_path / "texts.py")
    expected = {"specdec.batch.run", "specdec.proposers.ngram", "specdec.proposers.heads.eagle3"}
    assert expected <= imports("specdec.proposers.heads.texts")


def test_the_top_has_folders_and_little_else() -> None:
    entries = {path.name for path in ROOT.iterdir() if path.name != "__pycache__"}
    assert entries == {"__init__.py", "__main__.py", "errors.py", "py.typed", "zoo", *LAYERS[1:]}


def test_pyarrow_is_imported_where_it_is_used() -> None:
    for path in (ROOT / "batch").rglob("*.py"):
        assert not re.search(r"^(import|from) pyarrow\b", path.read_text(), re.MULTILINE), path
