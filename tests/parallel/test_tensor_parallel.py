"""Jobs of two processes under torchrun that share one model."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from specdec import SpecGenerator
from tests import job
from tests.folders import saved_model

ROOT = Path(__file__).parents[2]
SOON = 25.0  # seconds, on a busy machine


@contextmanager
def torchrun(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Two processes that run this; they are gone afterwards."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        launch, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            yield running
        finally:
            running.terminate()  # it ends the two


def finished(*command: str) -> dict[str, Any]:
    """What the job printed as JSON."""
    with torchrun("-m", "tests.job", *command) as running:
        out, err = running.communicate(timeout=200)
    assert running.returncode == 0, err
    found = [line for line in out.splitlines() if line.startswith("{")]
    assert len(found) == 1, out  # of rank 0 alone
    return json.loads(found[0])


@pytest.mark.slow
def test_a_server_whose_target_is_shared(tmp_path: Path) -> None:
    """One process listens, and its answers are those of one process alone."""
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    folder, port = saved_model(tmp_path), "18931"
    url = f"http://127.0.0.1:{port}"
    asked = {"model": tmp_path.name, "prompt": "abc", "max_tokens": 12, "temperature": 0}
    with torchrun(
        "-m", "specdec", "serve", folder, "--tp-plan", "auto", "--draft", "suffix", "--port", port
    ) as running:
        until = time.monotonic() + 4 * SOON
        while not ready(url):
            assert running.poll() is None, running.communicate()[1]
            assert time.monotonic() < until
            time.sleep(0.2)
        body = Request(f"{url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"})
        with urlopen(body, timeout=SOON) as answer:
            found = json.load(answer)
    expected = SpecGenerator.from_pretrained(folder).generate("abc", max_new_tokens=12).texts
    assert [choice["text"] for choice in found["choices"]] == expected


def ready(url: str) -> bool:
    """Whether a server decodes."""
    try:
        with urlopen(f"{url}/ready", timeout=SOON) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.slow
def test_the_command_line_prints_the_text_of_one_process_once(tmp_path: Path) -> None:
    """The other process says nothing; the prompt comes from standard input, which both have."""
    folder = saved_model(tmp_path)
    options = ["--max-new-tokens", "12", "--temperature", "0.7", "--seed", "5"]
    with torchrun("-m", "specdec", "generate", folder, "--tp-plan", "auto", "-p", "abc", *options) as running:
        out, err = running.communicate(timeout=100)
    assert running.returncode == 0, err
    gen = SpecGenerator.from_pretrained(folder, "suffix")
    expected = gen.generate("abc", max_new_tokens=12, do_sample=True, temperature=0.7, seed=5).texts
    assert out.rstrip("\n") == expected[0].rstrip("\n")


@pytest.mark.slow
def test_texts_are_those_of_one_process(tmp_path: Path) -> None:
    """With every draft, by every strategy, whatever the head is tied to, and whenever calls arrive."""
    job.save(tmp_path)
    expected = job.texts(tmp_path)
    assert len(expected) == 4 * 10 + 1
    found = finished("texts", str(tmp_path))
    assert {name for name in expected if found[name] != expected[name]} == set()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_ends_the_job(killed: int, tmp_path: Path) -> None:
    """Within seconds, and where it was not the one that leads, with a line that says so.

    torchrun ends whoever is left a tenth of a second later, with a report of its own: on a busy machine it is first.
    """
    with torchrun("-m", "tests.job", "command", saved_model(tmp_path)) as running:
        assert running.stderr is not None
        assert running.stdout.read(8)  # text comes
        os.kill(int((tmp_path / str(killed)).read_text()), signal.SIGKILL)
        began = time.monotonic()
        _, err = running.communicate(timeout=SOON)
    assert time.monotonic() - began < SOON
    assert running.returncode != 0
    if killed:
        ours = re.search(r"^error: a process of this job ended.*start the job again", err, re.MULTILINE)
        assert ours or re.search(r"rank +: 1 .*\n.*SIGKILL|Signal 9 \(SIGKILL\)", err)
