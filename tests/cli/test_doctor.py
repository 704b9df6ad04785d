"""`specdec doctor`: findings in words, their way out, exit codes."""

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec import SpecGenerator, kernels
from specdec.bench.machine import waiting_threads
from specdec.cli import doctor
from specdec.core.stats import Stats
from specdec.kernels import Lack
from tests.folders import WIDTH, byte_tokenizer
from tests.tiny import tiny

NEEDED = ["torch<9,>=2.11", "transformers<5.99,>=5.17", 'gguf<1,>=0.17; extra == "gguf"']
"""What an installation says of itself, which may be older than this folder."""


def test_machine_and_installation(monkeypatch: pytest.MonkeyPatch, called: Any) -> None:
    """What is here, what is not, and the command that installs it; nothing is wrong where only extras are missing."""
    known = doctor._version
    monkeypatch.setattr(doctor, "_requirements", lambda: NEEDED)
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "gguf" else known(name))
    out = called("doctor").out
    assert "\x1b" not in out
    assert "GB/s" in out
    assert re.search(r"^  · \[gguf\] +GGUF files: no gguf$", out, re.MULTILINE)
    assert "→ pip install -e '.[gguf]'" in out


@pytest.mark.parametrize(("share", "state"), [(0.97, "good"), (0.64, "note")])
def test_threads_that_wait(share: float, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where other programs use the cores, with the way out. (One neighbour made passes ten times slower, unsaid.)"""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    clock = {"seconds": 0.0}

    def passes(step: float) -> float:
        clock["seconds"] += step
        return clock["seconds"]

    monkeypatch.setattr(time, "perf_counter", lambda: passes(0.001))
    monkeypatch.setattr(time, "process_time", lambda: passes(0) * 2 * share)
    [threads] = [one for one in doctor.machine() if one.name == "threads"]
    assert threads.state == state
    assert ("got 64% of the cores" in threads.text) == (threads.remedy is not None) == (state == "note")
    assert state == "good" or threads.remedy.startswith("OMP_NUM_THREADS=1, or fewer threads")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert waiting_threads() is None  # one waits for no other


def test_an_untested_version_is_wrong(monkeypatch: pytest.MonkeyPatch, called: Any) -> None:
    """Packages that the others need more of than they promise; exit code 1, and the command that mends it."""
    monkeypatch.setattr(doctor, "_requirements", lambda: NEEDED)
    monkeypatch.setattr(doctor, "_version", lambda name: "99.0" if name == "transformers" else "1.0")
    lack = Lack("there is no C++ compiler (c++)", "apt install g++, or name one in CXX")
    monkeypatch.setattr(kernels, "lack", lambda: lack)
    out = called("doctor", code=1).out
    for words in ("✗ packages", "→ pip install 'torch", "transformers<5.", "✗ kernels", "→ apt install g++"):
        assert words in out


def test_a_pair(folders: tuple[str, str], called: Any) -> None:
    """Backends and why, whether they fit, and an estimate that says when a draft does not pay."""
    flags = ["--draft", folders[1], "-p", "def f", "--seconds", "0.1", "--json", "--quiet"]
    findings = json.loads(called("doctor", folders[0], *flags).out)["findings"]
    found = {(one["section"], one["name"]): one for one in findings}
    assert found["models", "target"]["text"].startswith("LlamaForCausalLM, 2 layers, float32")
    assert found["models", "target's backend"]["text"].startswith(("eager: ", "packed: "))
    assert found["models", "fit"]["text"].startswith("one vocabulary of 259 tokens")
    assert "1 of your prompts, greedy" in found["estimate", "speed"]["text"]
    assert found["estimate", "texts"]["text"] == "the same with the draft and without"


@pytest.mark.parametrize("busy", [True, False])
def test_a_busy_machine_promises_nothing(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gain that was 0.68x a minute later had a check mark, and the prompt was code whatever the model."""
    monkeypatch.setattr("specdec.bench.machine.waiting_threads", lambda: "they wait" if busy else None)
    monkeypatch.setattr("specdec.bench.machine.Watch.busy", False)
    monkeypatch.setattr("specdec.bench.duel.prompts", lambda: ["def f():\n"])
    one = SimpleNamespace(speedup=3.28, plain_rate=1.0, assisted_rate=3.28, difference=None)
    one.assisted = SimpleNamespace(stats=Stats(num_spec_steps=1, num_accepted_draft_tokens=3))

    def duels(*given: Any) -> list[Any]:
        given[-1].look()
        return [one]

    monkeypatch.setattr(doctor, "_duels", duels)
    speed, *_ = doctor.estimate(SpecGenerator(tiny("llama", vocab=WIDTH), "suffix", tokenizer=byte_tokenizer()), ())
    assert (speed.state, "quiet machine" in (speed.remedy or "")) == ("note" if busy else "good", busy)
    assert "held-out code (-p" in speed.text


def test_a_pair_that_does_not_fit(folders: tuple[str, str], tmp_path: Path, called: Any) -> None:
    """The error of loading is a finding, with its way out, and exit code 1."""
    tiny("llama", vocab=64).save_pretrained(tmp_path)
    out = called("doctor", folders[0], "--draft", tmp_path, "--quiet", code=1).out
    assert re.search(r"✗ loading .*draft='suffix'", out)


def test_models_without_a_draft_and_with_words() -> None:
    """A draft that copies fits any target; without one there is nothing to estimate."""
    model = tiny("llama")
    found = {one.name: one for one in doctor.check_models(SpecGenerator(model, "suffix"))}
    assert found["fit"].text.endswith("reads the text alone and fits any target")
    found = {one.name: one for one in doctor.check_models(SpecGenerator(model))}
    assert found["draft"].state == "note"
    assert list(doctor.estimate(SpecGenerator(model), ())) == []
    [only] = doctor.estimate(SpecGenerator(tiny("whisper"), tiny("whisper", seed=1)), ())
    assert only.text.startswith("measured for models that read text")
