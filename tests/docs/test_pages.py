"""The README and every page: their blocks run as printed, one after the other, and print what the pages say."""

import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import soundfile
import yaml
from huggingface_hub import constants
from typer.main import get_command

from specdec.cli.commands import app
from specdec.cli.transcribe import choose_model
from specdec.core.draft_schedules import SCHEDULES
from specdec.decoding import strategies
from specdec.options.fields import SAMPLING
from specdec.options.load import QUANTIZATIONS
from specdec.proposers import DRAFTS
from tests.docs.hub import fill, write_files
from tests.docs.pages import PAGES, ROOT, blocks, commands, run_python, run_shell, same
from tests.server.process import started
from tests.speech import RATE, speech

# Pages whose code takes little time; the others are slow tests, which CI runs, too.
QUICK = {
    *("docs/guides/constraints.md", "docs/guides/drafts.md", "docs/guides/hidden-drafts.md", "docs/how/loop.md"),
    *("docs/migrating/transformers.md", "docs/migrating/vllm.md", "docs/start/your-models.md"),
}
REGISTRIES: list[dict[str, Any]] = [DRAFTS, SCHEDULES, QUANTIZATIONS, SAMPLING]
SERVING = ROOT / "docs" / "guides" / "serving.md"
SERVED = "served"  # what stands before a block that a server answers
FILES = {
    "request.txt": "# The same with docstrings:\n",
    "old.py": "def area(width, height):\n    return width * height\n",
    "report.txt": "The cat sat. It was warm. It slept.\n",
    "notes.txt": "One line. Another line.\n",
    "reports/one.txt": "The dog ran. It was cold. It came back.\n",
    "function.py": "def add(first, second):\n    return first + second\n",
    "prompts.jsonl": '{"prompt": "What is a cat?"}\n{"prompt": "Name a colour."}\n' * 12,
    "corpus.txt": "A cat is an animal. " * 60,
}


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the hub with tiny models under the names of real ones."""
    return tmp_path_factory.mktemp("hub")


@pytest.fixture
def reader(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files that pages name, in which their code runs; what it registers is undone."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(strategies, "STRATEGIES", strategies.STRATEGIES)
    own = next(block for block in blocks(ROOT / "docs" / "guides" / "comparing.md") if block.language == "python")
    Path(tmp_path, "my_draft.py").write_text(own.code, encoding="utf-8")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    Path("reports").mkdir()
    for name, text in FILES.items():
        Path(name).write_text(text, encoding="utf-8")
    soundfile.write("talk.mp3", speech(1.5), RATE)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    with contextlib.ExitStack() as stack:
        for table in REGISTRIES:
            stack.enter_context(patch.dict(table))
        yield tmp_path
    sys.modules.pop("my_draft", None)


def name_of(page: Path) -> str:
    """A page's path from the root."""
    return page.relative_to(ROOT).as_posix()


RUN = [page for page in PAGES if any(block.language in ("python", "bash") for block in blocks(page))]


@pytest.mark.parametrize("page", [page for page in PAGES if "specdec " in page.read_text("utf-8")], ids=name_of)
def test_every_command_exists(page: Path) -> None:
    """With its flags, where nothing runs it too. (A guide named a model in the place of a recording.)"""
    for block in blocks(page):
        for words in commands(block) if block.language == "bash" else ():
            group = get_command(app)
            if not words or words[0].startswith("-") or words == ["…"]:
                continue
            with group.commands[words[0]].make_context(words[0], words[1:]) as context:
                if words[0] == "transcribe":
                    choose_model(context.params["model"], demo=context.params["demo"])


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=name_of(page), marks=[] if name_of(page) in QUICK else [pytest.mark.slow]) for page in RUN],
)
def test_a_page_runs(page: Path, reader: Path, cache: Path) -> None:
    """As a reader would type it, each page by itself."""
    fill(cache, page.read_text(encoding="utf-8"))
    write_files(reader, page.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "page"}
    printed: str | None = None
    for block in blocks(page):
        if not block.is_run or block.mark == SERVED:
            printed = None
        elif block.language == "python":
            printed = run_python(block, page, names)
        elif block.language == "bash":
            printed = run_shell(block)
        elif block.language == "text" and block.mark != "for example":
            assert printed is not None, f"{name_of(page)}:{block.line}: nothing was printed before"
            assert same(printed, block.code), f"{name_of(page)}:{block.line}: it printed\n{printed}"


def test_every_registry_has_an_example() -> None:
    lines = [line for block in blocks(ROOT / "docs" / "extending.md") for line in block.code.splitlines()]
    assert sum(line.endswith("  # the line") for line in lines) == 4


def test_every_block_is_run_or_says_why() -> None:
    """A language that nothing runs is data; what is not run has its reason before it."""
    assert {name_of(page) for page in RUN} > QUICK
    for page in PAGES:
        found = blocks(page)
        fences = re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.M)
        assert len(fences) == 2 * len(found), name_of(page)  # one without a language is found by nobody
        for block in found:
            where = f"{name_of(page)}:{block.line}"
            assert block.language in ("python", "bash", "text", "yaml"), where
            assert block.is_run or len(block.mark) > len("not run: because"), where
            if block.language == "yaml":
                yaml.safe_load(block.code)


@pytest.mark.slow
def test_a_server_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients of the guide, asking a server as it says: `specdec serve --demo`."""
    monkeypatch.chdir(tmp_path)
    soundfile.write("talk.mp3", speech(1.5), RATE)
    served = [block for block in blocks(SERVING) if block.mark == SERVED]
    assert [block.language for block in served] == ["bash", "python", "bash"]
    with started("--demo", "--port", "0", folder=tmp_path) as server:
        for block in served:
            code = re.sub(r"(http://)?(127\.0\.0\.1|localhost):8000", server.url, block.code)
            if block.language == "bash":
                lines = code.strip().splitlines()
                out = [subprocess.check_output(["bash", "-c", f"{line} -sSf"], text=True) for line in lines]
                assert all(out)
            elif find_spec("openai"):
                with contextlib.redirect_stdout(io.StringIO()) as printed:
                    exec(code, {"__name__": "client"})
                assert float(printed.getvalue().split()[-1]) >= 1
    assert json.loads(out[0])["choices"][0]["text"] in ("yes", "no")
