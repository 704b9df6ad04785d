"""Pages of the documentation as programs: their blocks of code, and a shell that knows one command."""

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from specdec.cli.commands import run_command

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^>]+?) -->\n+)?(?P<indent> *)```(?P<info>.+)\n(?P<code>(?:.*\n)*?)(?P=indent)```\n"
)


def read(path: str) -> str:
    """A text file of the repository."""
    return (ROOT / path).read_text(encoding="utf-8")


class Block(NamedTuple):
    """A block of code: its language, its text, the line it begins at, and what a comment before it says of it."""

    language: str
    code: str
    line: int
    mark: str

    @property
    def is_run(self) -> bool:
        """Whether a test runs it; a comment gives the reason where none does."""
        return not self.mark.startswith("not run: ")


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        indent, code = match["indent"], match["code"]
        code = "".join(line.removeprefix(indent) for line in code.splitlines(keepends=True))
        line = text.count("\n", 0, match.start("info")) + 1
        found.append(Block(match["info"].split()[0], code, line, match["mark"] or ""))
    return found


def run_python(block: Block, page: Path, names: dict[str, Any]) -> str:
    """Runs a block of Python as it is printed, and returns what it prints."""
    code = compile("\n" * block.line + block.code, str(page), "exec", dont_inherit=True)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, names)
    return printed.getvalue()


def run_shell(block: Block) -> str:
    """Runs a block of commands, one a line, and returns what they print; other programs than specdec are not run."""
    printed = ""
    for line in block.code.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            text = re.sub(r"\$\(cat (\S+)\)", lambda match: Path(match[1]).read_text(encoding="utf-8"), line)
            printed += run_line(text)
    return printed


def run_line(line: str) -> str:
    """One line: `specdec …`, with a file or another command before it, a file after it, and more lines behind &&."""
    printed = ""
    for part in _split(shlex.split(line, comments=True), "&&"):
        given = ""
        for words in _split(part, "|"):
            command, *into = _split(words, ">")
            given = run_words(command, given)
            for [name] in into:
                Path(name).write_text(given, encoding="utf-8")
                given = ""
        printed += given
    return printed


def commands(block: Block) -> Iterator[list[str]]:
    """The words behind `specdec` of every command of a block, run or not."""
    for line in block.code.replace("\\\n", " ").splitlines():
        if "specdec " not in line:
            continue
        words = shlex.split(line, comments=True)
        for part in (one for some in _split(words, "&&") for one in _split(some, "|")):
            command, *_ = _split(part, ">")
            if "specdec" in command:
                yield command[command.index("specdec") + 1 :]


MOST = {"--count": 2, "--max-new-tokens": 16, "--repeats": 1}  # of a measurement in a test


def run_words(words: list[str], given: str) -> str:
    """What one command prints; a command that fails fails the test."""
    if words[0] == "cat":
        return "".join(Path(name).read_text(encoding="utf-8") for name in words[1:])
    if words[:2] == ["printf", "%s\\n"]:
        return "".join(f"{word}\n" for word in words[2:])
    if words[0] != "specdec" or words[1:] == ["--install-completion"]:  # it asks which shell its parent is
        return ""
    if words[1] == "bench":  # with smaller numbers than a reader should take
        pairs = zip(["", *words], words, strict=False)
        words = [str(min(int(word), MOST[before])) if before in MOST else word for before, word in pairs]
    piped = io.TextIOWrapper(io.BytesIO(given.encode()))
    with contextlib.redirect_stdout(io.StringIO()) as printed, mock.patch.object(sys, "stdin", piped):
        code = run_command(words[1:])
    assert code == 0, f"exit code {code}: {shlex.join(words)}"
    return printed.getvalue()


def _split(words: list[str], mark: str) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word == mark:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def same(printed: str, shown: str) -> bool:
    """Whether this is what a page shows, in which … stands for anything."""
    parts = [re.escape(part) for part in shown.strip().split("…")]
    return re.fullmatch(".*".join(parts), printed.strip(), re.S) is not None
