"""A running server under load: counts, times and the report; what the flags refuse."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from specdec.bench.remote import Load, Workload, measure, models_of
from specdec.bench.remote_report import remote_lines, remote_results, write_remote_report
from specdec.cli.commands import run as specdec
from specdec.errors import SpecdecError
from tests.server.served import app, model_of

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of the tiny model, in a thread."""
    application = app(model_of("suffix"))
    server = uvicorn.Server(uvicorn.Config(application, port=0, log_config=None, ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)


def test_loads(url: str, tmp_path: Path) -> None:
    """Closed and open loops, with and without the draft: every request is counted once, with its tokens and times."""
    loads = [Load(concurrency=1), Load(concurrency=3), Load(concurrency=3, plain=True), Load(rate=50.0)]
    workload = Workload(url, "text", ["abab abab", "xyz"], loads, max_new_tokens=8, requests=4, key="secret")
    measured = measure(workload)
    assert [len(one.answers) for one in measured] == [4, 6, 6, 4]
    for one in measured:
        assert all(answer.error is None and 1 <= answer.tokens <= 8 for answer in one.answers)
        assert all(answer.began < answer.pieces[0] <= answer.pieces[-1] <= answer.ended for answer in one.answers)
    assert measured[1].drafted > 0
    assert measured[2].drafted == 0
    found = remote_results(workload, measured)
    assert [load["errors"] for load in found["loads"]] == [0] * 4
    assert all(load["first_token_ms"]["p50"] > 0 for load in found["loads"])
    assert len(remote_lines(found)) == 5
    page = write_remote_report(found, tmp_path).read_text()
    assert "3 at a time, plain" in page
    assert found["summary"][-1] == "All 20 requests were answered."
    ratio = found["loads"][1]["tokens_per_second"] / found["loads"][2]["tokens_per_second"]
    assert found["summary"][1].endswith(f": {ratio:.2f}× with 3 at a time.")
    assert all(sentence in page for sentence in found["summary"])
    assert "<svg" in page
    assert "secret" not in page + (tmp_path / "results.json").read_text()


def test_the_command(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It finds the server's only model, prints a line for each load, and writes the report."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\n\ndef\n")
    arguments = ["--url", f"{url}/v1", "--prompts", str(prompts), "--max-new-tokens", "4", "--requests", "2", "--chat"]
    assert specdec(["bench", *arguments, "--concurrency", "2", "--out", str(tmp_path / "out"), "--quiet"]) == 0
    assert "2 at a time" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "results.json").read_text())["loads"][0]["requests"] == 4


def test_errors_are_counted(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server that refuses is told at once; nobody there is too."""
    with pytest.raises(SpecdecError, match="refused the first request"):
        measure(Workload(url, "no-such-model", ["a"], [Load(concurrency=1)]))
    with pytest.raises(SpecdecError, match="is a server running"):
        models_of("http://127.0.0.1:9", None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["zoo:python-code", "--concurrency", "2"], "--concurrency"),
        (["zoo:python-code", "--url", "http://x"], "--target"),
        (["--url", "http://x", "--draft", "suffix"], "--draft"),
        (["--url", "ftp://x"], "--url"),
    ],
)
def test_flags_of_the_other_kind(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They are refused, and not ignored."""
    assert specdec(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err
