"""Functions of the standard library with what they do: the data of the summary recipe."""

from __future__ import annotations

import ast
import io
import re
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from specdec.bench.prompts import is_held_out, source_files

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# What torch and transformers bring with them: code of other hands, which the standard library alone has too little of.
PACKAGES = ("fsspec", "huggingface_hub", "jinja2", "networkx", "numpy", "sympy", "torch", "transformers")
_ALIKE = 3  # so many functions at most share a sentence
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Example:
    """A definition without its docstring, its signature on one line, and the docstring's first sentence or None."""

    source: str
    signature: str
    sentence: str | None

    @property
    def summary(self) -> str:
        """The signature, and below it the sentence."""
        return f"{self.signature}\n{self.sentence}"


def training_examples() -> Iterator[Example]:
    """Yields the documented functions and classes of all training modules and of the standard library's own tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = [text for _, text in source_files(held_out=False)]
    for folder in ("test", "idlelib/idle_test", "lib2to3"):
        for path in sorted((root / folder).rglob("*.py")):
            if not is_held_out(path.relative_to(root).as_posix()):
                texts.append(path.read_text(encoding="utf-8", errors="replace"))
    yield from (e for text in texts for e in examples(text, _DEFINITIONS) if e.sentence is not None)


def installed_examples() -> Iterator[Example]:
    """Yields documented functions and classes of `PACKAGES` as they are installed, none of the held-out ones."""
    held_out = {e.source for e in held_out_examples()}
    said: Counter[str | None] = Counter()
    for text in _texts_of_packages():
        for example in examples(text, _DEFINITIONS):
            said[example.sentence] += 1
            if example.sentence is not None and said[example.sentence] <= _ALIKE and example.source not in held_out:
                yield example


def _texts_of_packages() -> Iterator[str]:
    for name in PACKAGES:
        spec = find_spec(name)
        for place in (spec and spec.submodule_search_locations) or ():
            for path in sorted(Path(place).rglob("*.py")):
                yield path.read_text(encoding="utf-8", errors="replace")


def held_out_examples() -> list[Example]:
    """The documented functions of the held-out modules, each once."""
    found = [e for _, text in source_files(held_out=True) for e in examples(text, _DEFINITIONS[:2])]
    return list({e.source: e for e in found if e.sentence is not None}.values())


def examples(text: str, kinds: tuple[type[ast.AST], ...]) -> Iterator[Example]:
    """Yields the definitions of these kinds in a module's text; nothing where it does not parse."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, _DEFINITIONS) and isinstance(node, kinds):
            example = _example(node, lines)
            if example is not None:
                yield example


def _example(node: _Definition, lines: list[str]) -> Example | None:
    own = lines[node.lineno - 1 : node.end_lineno]
    docstring = ast.get_docstring(node)
    if docstring is not None:
        if len(node.body) == 1 or node.body[0].lineno == node.lineno:
            return None  # nothing would be left to summarise
        begin, end = node.body[0].lineno, node.body[0].end_lineno or 0
        own = lines[node.lineno - 1 : begin - 1] + lines[end : node.end_lineno]
    source = _dedent(own)
    signature = _signature(source)
    sentence = first_sentence(docstring) if docstring else _opening_comment(own, lines[: node.lineno - 1])
    return Example(source, signature, sentence) if signature else None


def _dedent(lines: list[str]) -> str:
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "".join(line[indent:] if not line[:indent].strip() else line for line in lines).rstrip() + "\n"


def _signature(source: str) -> str | None:
    """All up to the colon that opens the body, on one line."""
    depth = 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            depth += (token.string in ("(", "[", "{")) - (token.string in (")", "]", "}"))
            if token.string == ":" and token.type == tokenize.OP and depth == 0:
                line, column = token.end
                head = "".join(source.splitlines(keepends=True)[:line])
                tail = len(source.splitlines(keepends=True)[line - 1]) - column
                return re.sub(r"\s+", " ", head[: len(head) - tail])
    except (tokenize.TokenError, IndentationError):
        pass
    return None


def _opening_comment(own: list[str], before: list[str]) -> str | None:
    """What a comment right above or right below the first line of a definition says, where it reads as a sentence."""
    below = []
    for line in own[1:]:
        if not line.lstrip().startswith("#"):
            break
        below.append(line.strip().lstrip("# "))
    above: list[str] = []
    for line in reversed(before):
        if not line.lstrip().startswith("#"):
            break
        above.insert(0, line.strip().lstrip("# "))
    sentence = first_sentence("\n".join(below or above))
    return sentence if sentence and re.match(r"[A-Z][a-z]+ \w+ \w+", sentence) else None


def first_sentence(docstring: str) -> str | None:
    """The first sentence of the first paragraph, on one line; None where there is none of 2 to 30 words."""
    paragraph = " ".join(re.split(r"\n\s*\n", docstring.strip())[0].split())
    sentence = re.split(r"(?<!e\.g\.)(?<!i\.e\.)(?<=[.!?])\s", paragraph)[0]
    return sentence if 2 <= len(sentence.split()) <= 30 and sentence.isascii() else None
