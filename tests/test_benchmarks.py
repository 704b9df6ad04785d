"""Benchmarks and scripts of the documentation run on names that exist; one measures a server."""

import ast
import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec import SpecGenerator
from tests.server.process import started

ROOT = Path(__file__).parent.parent
FILES = sorted([*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("docs/**/*.py")])
assert len(FILES) > 20


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "specdec":
            module = importlib.import_module(node.module)
            for name in node.names:
                found = hasattr(module, name.name) or importlib.util.find_spec(f"{node.module}.{name.name}")
                assert found, f"{node.module} has no {name.name}"


def test_a_synthetic_draft_pays_for_its_passes(folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass per level, over the nodes that it continues."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from synthetic_draft import Oracle, SyntheticDraft

    widths: list[int] = []
    target = SpecGenerator.from_pretrained(folders[0])
    plain = target.generate("abab", max_new_tokens=12, eos_token_id=[])
    draft = SyntheticDraft([0.5, 0.3], widths.append)
    draft.oracle = Oracle(plain.new_tokens(), draft.rates, 50)
    gen = SpecGenerator(target.target, draft, tokenizer=target.tokenizer, schedule="constant")
    tree = {"num_assistant_tokens": 3, "num_assistant_branches": 2}
    out = gen.generate("abab", max_new_tokens=5, eos_token_id=[], **tree)
    assert out.sequences[0].tolist() == plain.sequences[0].tolist()[: out.sequences.shape[1]]
    assert widths[:3] == [1, 2, 2]
    assert out.stats.per_round_drafted[0] == 6


@pytest.fixture(scope="module")
def url(folders: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of the tiny model."""
    with started(folders[0], "--schedule", "constant", "--port", "0", folder=tmp_path_factory.mktemp("log")) as server:
        yield server.url


def server_load(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What `benchmarks/server_load.py` prints."""
    command = [sys.executable, str(ROOT / "benchmarks" / "server_load.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_server_load(url: str, tmp_path: Path) -> None:
    """Every request of every load is counted once, with its tokens and latencies; plain loads draft nothing."""
    (tmp_path / "prompts.txt").write_text("abab abab\n\nxyz\n")
    given = ["--prompts", str(tmp_path / "prompts.txt"), "--json", str(tmp_path / "load.json"), "--beside-plain"]
    size = ["--requests", "4", "--tokens", "8", "--repeats", "2"]
    done = server_load(f"{url}/v1", *given, *size, "--concurrency", "1", "3", "--rate", "50")
    assert done.returncode == 0, done.stderr
    assert "| 3 at a time, plain |" in done.stdout
    loads = json.loads((tmp_path / "load.json").read_text())["loads"]
    assert [load["requests"] for load in loads] == [8, 8, 12, 12, 8, 8]
    for load in loads:
        assert load["errors"] == 0, load["first_error"]
        assert 0 < load["first_token_ms"]["p50"] <= load["request_ms"]["p50"] <= load["request_ms"]["p99"]
        assert load["requests_per_second"] < load["tokens_per_second"] <= 8 * load["requests_per_second"]
        assert (load["mean_acceptance_length"] is None) == load["plain"]


@pytest.mark.slow
def test_server_load_tells_a_refusal(url: str) -> None:
    done = server_load(url, "--model", "no-such-model")
    assert done.returncode == 1
    assert "refused the first request: 404" in done.stderr
