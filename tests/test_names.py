"""A public class or function stands once in the package, so that a name means one thing."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import specdec

ROOT = Path(specdec.__file__).parent
# The loop in small has names of the engine's parts, and a command has the name of what it runs.
NAMESAKES = {"accept", "generate", "serve"}


def test_public_names_are_unique() -> None:
    """Once three classes were called Request, and five functions load."""
    homes = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                homes[node.name].append(file)
    assert {name: files for name, files in homes.items() if len(files) > 1 and name not in NAMESAKES} == {}


def test_the_glossary_names_what_the_code_has() -> None:
    """A word of the glossary stands beside its class or function, or an attribute of a class."""
    names = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                parts = [getattr(part, "name", getattr(getattr(part, "target", 0), "id", "")) for part in node.body]
                names |= {node.name, *(f"{node.name}.{part}" for part in parts)}
    page = Path(__file__).parents[1] / "docs" / "glossary.md"
    glossary = re.findall(r"</a>[^|`]*, `([\w.]+)` \|", page.read_text("utf-8"))
    assert len(glossary) > 30
    assert {name for name in glossary if name not in names} == set()
