"""Imports point downwards, and rooms of one rank do not import each other."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import specdec

ROOT = Path(specdec.__file__).parent
RANKS = {
    "errors": 0,
    "zoo": 0,
    "core": 1,
    "kernels": 1,
    "options": 2,
    "decoding": 3,
    "models": 3,
    "parallel": 4,
    "proposers": 4,
    "engine": 5,
    "generator": 6,
    "bench": 7,
    "integrations": 7,
    "pipelines": 7,
    "distill": 8,
    "server": 8,
    "batch": 9,
    "cli": 10,
}
# The public front door and its entry point import whatever they show.
FREE = {"__init__", "__main__"}
FILES = sorted(p for p in ROOT.rglob("*.py") if p.relative_to(ROOT).parts[0].removesuffix(".py") not in FREE)


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "specdec" else [f"specdec.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("specdec.")}
    return rooms


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    """A file imports only rooms below its own, and its own."""
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for room in imported_rooms(path) - {own} - set(specdec.__all__) - {"__version__"}:
        assert RANKS[room] < RANKS[own], f"{own} (rank {RANKS[own]}) imports {room} (rank {RANKS[room]})"


def test_options_load_without_torch() -> None:
    """The names of schedules are among them, and what `specdec --help` shows."""
    modules = "specdec.options.generate, specdec.core.draft_schedules, specdec.cli.commands"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, check=False).returncode == 0


def test_config_and_cli_never_import_torch() -> None:
    """Options and the command line load without torch."""
    for path in (ROOT / "errors.py", *sorted((ROOT / "options").glob("*.py")), *sorted((ROOT / "cli").glob("*.py"))):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                assert not any(n.split(".")[0] in ("torch", "transformers") for n in names), path


def test_ray_and_pyarrow_are_imported_where_they_are_asked_for() -> None:
    """Nor is the server, but by the two files that are about it."""
    for path in sorted((ROOT / "batch").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                assert not any(n.split(".")[0] in ("ray", "pyarrow") for n in names), path
                about = path.name in ("serve.py", "openai_files.py")
                assert about or not any(n.startswith("specdec.server") for n in names), path
