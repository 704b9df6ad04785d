"""The README and every page: their blocks run as printed, one after the other, and print what the pages say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import soundfile
import yaml
from huggingface_hub import constants

from specdec import SpecGenerator
from tests.docs.hub import MODELS, fill
from tests.docs.pages import PAGES, ROOT, Block, blocks, run_python, run_shell, same
from tests.speech import RATE, speech

# Pages that take longer than the default tests may; CI runs them, too.
SLOW: set[str] = set()
RUN = [page for page in PAGES if any(block.language in ("python", "bash") for block in blocks(page))]
FILES = {
    "request.txt": "# The same with docstrings:\n",
    "old.py": "def area(width, height):\n    return width * height\n",
    "report.txt": "The cat sat. It was warm. It slept.\n",
    "notes.txt": "One line. Another line.\n",
    "summary.txt": "The cat slept.\n",
    "function.py": "def add(first, second):\n    return first + second\n",
    "prompts.jsonl": '{"prompt": "What is a cat?"}\n{"prompt": "Name a colour."}\n' * 12,
    "corpus.txt": "A cat is an animal. " * 60,
}


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the hub with tiny models under the names of real ones."""
    return tmp_path_factory.mktemp("hub")


@pytest.fixture
def reader(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that pages name, in which their code runs."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text, encoding="utf-8")
    soundfile.write("talk.mp3", speech(1.5), RATE)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    return tmp_path


def name_of(page: Path) -> str:
    """A page's path from the root."""
    return page.relative_to(ROOT).as_posix()


def pages() -> list[Any]:
    """Every page with code."""
    return [
        pytest.param(page, id=name_of(page), marks=[pytest.mark.slow] if name_of(page) in SLOW else []) for page in RUN
    ]


@pytest.mark.parametrize("page", pages())
def test_a_page_runs(page: Path, reader: Path, cache: Path) -> None:
    """As a reader would type it, each page by itself."""
    fill(cache, page.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "page"}
    printed: str | None = None
    for block in blocks(page):
        if not block.is_run:
            printed = None
        elif block.language == "python":
            printed = run_python(block, page, names)
        elif block.language == "bash":
            printed = run_shell(block)
        elif block.language == "text" and block.mark != "for example":
            assert printed is not None, f"{name_of(page)}:{block.line}: nothing was printed before"
            assert same(printed, block.code), f"{name_of(page)}:{block.line}: it printed\n{printed}"
