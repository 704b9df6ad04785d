"""`specdec doctor`: findings in words, their way out, exit codes."""

import json
import re
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import SpecGenerator, kernels
from specdec.bench.machine import waiting_threads
from specdec.bench.parts import Mode
from specdec.bench.tuner import Skipped, TimedAnswer, Trial, Tuner
from specdec.cli import doctor
from specdec.cli.request import CommandRequest
from specdec.core.stats import Stats
from specdec.kernels import Lack
from tests.folders import WIDTH, byte_tokenizer
from tests.tiny import tiny

NEEDED = ["torch<9,>=2.11", "transformers<5.99,>=5.17", 'llguidance<2,>=1.3; extra == "structured"']
"""What an installation says of itself, which may be older than this folder."""


def test_machine_and_installation(monkeypatch: pytest.MonkeyPatch, called: Any) -> None:
    """What is here, what is not, and the command that installs it; nothing is wrong where only extras are missing."""
    known = doctor._version
    monkeypatch.setattr(doctor, "_requirements", lambda: NEEDED)
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "llguidance" else known(name))
    out = called("doctor").out
    assert "\x1b" not in out
    assert "GB/s" in out
    assert re.search(r"^  · \[structured\] +answers in a form: .*: no llguidance$", out, re.MULTILINE)
    assert "→ pip install -c constraints.txt -e '.[structured]'" in out


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
    assert state == "good" or threads.remedy.startswith("passes run on fewer threads meanwhile; OMP_NUM_THREADS=")
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


def test_a_pair(folders: tuple[str, str], tmp_path: Path, called: Any) -> None:
    """Backends and why, whether they fit, what each draft brings, and the command that is the fastest."""
    target, draft = folders
    (tmp_path / "mine.txt").write_text("def f")
    flags = ["--draft", draft, "--prompts", tmp_path / "mine.txt", "--json", "--quiet"]
    flags += ["--draft-quantization", "none", "--trust-remote-code"]
    findings = json.loads(called("doctor", target, *flags).out)["findings"]
    found = {(one["section"], one["name"]): one for one in findings}
    assert found["models", "target"]["text"].startswith("LlamaForCausalLM, 2 layers, float32")
    assert found["models", "target's backend"]["text"].startswith(("eager: ", "packed: "))
    assert found["models", "fit"]["text"].startswith("one vocabulary of 259 tokens")
    figures = {one["name"]: one["figures"] for one in findings if one["figures"]}
    assert [*figures] == ["no draft", "suffix", "model and suffix"]
    assert all(one["ms"] > 0 and one["answers"] == 1 and one["different"] == 0 for one in figures.values())
    best = min(figures.values(), key=lambda one: one["ms"])
    words = shlex.split(found["best", "command"]["text"])
    assert words[:4] == ["specdec", "generate", target, "--draft"]
    assert words[5:] == ["--trust-remote-code", "--draft-quantization", "none", "-p", "YOUR PROMPT"]
    chosen = next(one for one in figures.values() if one["draft"] == words[4])
    assert chosen["ms"] * 0.97 <= best["ms"]
    assert found["best", "texts"]["text"] == "the same with the drafts and without"


def trial(draft: str, ms: float, mode: Mode, stats: Stats, *, different: int = 0, exactness: str = "exact") -> Trial:
    plain = Stats(num_target_passes=11, verify_seconds=2.0, first_token_seconds=1.0, finish_reasons=("length",))
    answers = {at: TimedAnswer(ms, 0.5, [int(at < different)], stats, "code") for at in range(3)}
    return Trial(mode, draft, answers, dict.fromkeys(range(3), TimedAnswer(100.0, 0.5, [0], plain)), exactness)


@pytest.mark.parametrize("busy", [True, False])
def test_advice(busy: bool, monkeypatch: pytest.MonkeyPatch, called: Any) -> None:
    """Each draft's line, why one does not pay, the fastest command, and the fastest whose texts are the same; a busy
    machine promises nothing. (A gain that was 0.68x a minute later had a check mark.)
    """
    counts = {"num_draft_tokens": 40, "num_accepted_draft_tokens": 30, "num_target_passes": 6, "draft_seconds": 1.4}
    floats, eight = (Stats(**counts, settings={"weight_kind": kind}) for kind in ("float32", "int8"))
    lines = [("none", 100.0), ("suffix", 50.0), ("model:d", 110.0), ("suffix+d", 60.0), ("auto", 70.0)]
    trials = [trial(draft, ms, Mode(), floats) for draft, ms in lines]
    trials.append(trial("suffix", 20.0, Mode(quantization="int8-weight"), eight))
    auto = trials[-2].answers
    trials[-2] = replace(trials[-2], answers={**auto, 2: replace(auto[2], ms=25.0, kind="edit")})
    generator = SpecGenerator(tiny("llama", vocab=WIDTH), "suffix", tokenizer=byte_tokenizer())

    def run(self: Tuner) -> Any:
        self.watch.look()
        return iter([generator, *trials, Skipped(Mode(quantization="int4-weight"), "not tried: no time")])

    monkeypatch.setattr(Tuner, "run", run)
    monkeypatch.setattr(Tuner, "num_prompts", 5 if busy else 3)
    prompts = "3 of 5 prompts" if busy else "3 prompts"
    monkeypatch.setattr("specdec.bench.machine.waiting_threads", lambda: "they wait" if busy else None)
    monkeypatch.setattr("specdec.bench.machine.Watch.busy", False)
    out = called("doctor", "zoo:python-code", "-q").out
    for words in (
        "· no draft         100.0 ms per token, first token 0.50 s\n",
        "✓ suffix           50.0 ms per token, first token 0.50 s; 2.00×\n",
        "· model alone      110.0 ms per token, first token 0.50 s; 0.91×, it does not pay: 75% of 120 guesses were",
        "✓ model and suffix 60.0 ms",
        "✓ auto             55.0 ms per token, first token 0.50 s; 1.82× (code 1.43×, edit 4.00×)\n",
        "int8 weights\n  ✓ suffix ",
        "· all drafts       not tried: no time",
        "✓ command          specdec generate zoo:python-code --draft suffix --quantization int8-weight -p 'YOUR",
        f"→ 20.0 ms per token on {prompts}, 5.00× as fast as float32 weights without a draft; fewer bits write other "
        "texts\n",
        "✓ same weights     specdec generate zoo:python-code --draft suffix -p 'YOUR PROMPT'\n"
        f"                     → 50.0 ms per token on {prompts}, 2.00× as fast as float32 weights without a draft\n",
    ):
        assert words in out, words
    assert ("measure again on a quiet machine" in out) == busy


def test_no_draft_pays(monkeypatch: pytest.MonkeyPatch, called: Any) -> None:
    """The advice says so. (It was "1.00x as fast as" itself.)"""
    stats = Stats(num_target_passes=6, settings={"weight_kind": "Q4_K"})
    generator = SpecGenerator(tiny("llama", vocab=WIDTH), "suffix", tokenizer=byte_tokenizer())

    def run(self: Tuner) -> Any:
        self.watch.look()
        return iter([generator, trial("none", 100.0, Mode(), stats), trial("suffix", 99.0, Mode(), stats)])

    monkeypatch.setattr(Tuner, "run", run)
    out = called("doctor", "zoo:python-code", "-q").out
    assert (
        "--draft none -p 'YOUR PROMPT'\n"
        "                     → 100.0 ms per token on 3 prompts, and no draft that was measured is faster\n" in out
    )
    assert out.index("· machine ") < out.index("✓ command ")


def test_stages(monkeypatch: pytest.MonkeyPatch, called: Any) -> None:
    """Each is named as it begins, without a terminal too, and no draft is advised where none was measured. (Nothing was
    printed for a minute and more.)
    """

    def run(self: Tuner) -> Any:
        for doing in ("loading it", "loading it", "first passes"):
            self._say(doing)
            yield Skipped(Mode(quantization="int8-weight"), "not tried: no time", seconds=20.0)

    monkeypatch.setattr(Tuner, "run", run)
    printed = called("doctor", "zoo:python-code")
    assert [line.split(": ")[-1] for line in printed.err.splitlines()] == ["loading it", "first passes"]
    assert "· all drafts       not tried: no time" in printed.out
    assert re.search(r"· time +too little for int8-weight\n +→ --seconds 40\n", printed.out)
    assert any("machine: " in line for line in printed.out.splitlines()[-4:])


@pytest.mark.parametrize(
    ("wrong", "texts"),
    [
        ({}, {"the same with the drafts and without": "good"}),
        ({"int8": 1}, {"1 of 3 part at a near-tie": "note"}),
        ({"float32": 2}, {"2 of 6 part, which is a bug": "bad"}),
        ({"float32": 1, "int8": 1}, {"1 of 6 part, which is a bug": "bad", "1 of 3 part at a near-tie": "note"}),
    ],
)
def test_texts_that_part(wrong: dict[str, int], texts: dict[str, str]) -> None:
    """Each mode is judged by its promise. (Near-ties of fewer bits were a bug of the floats, and exit code 1.)"""
    eight, kinds = Mode(quantization="int8-weight"), {"exactness": "rounding"}
    trials = [
        trial("none", 9.0, Mode(), Stats()),
        trial("suffix", 9.0, Mode(), Stats(), different=wrong.get("float32", 0)),
        trial("model:d", 9.0, Mode(), Stats()),
        trial("none", 9.0, eight, Stats(), **kinds),
        trial("suffix", 9.0, eight, Stats(), different=wrong.get("int8", 0), **kinds),
    ]
    assert {one.text: one.state for one in doctor._compared(trials)} == texts
    assert [*doctor._compared(trials[:1])] == []


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["./nowhere"], "there is no such folder"),
        (["TARGET", "--draft", "./nowhere"], "there is no such folder"),
        (["TARGET", "--draft", "sufix"], "did you mean 'suffix'"),
        (["TARGET", "--prompts", "nowhere.txt"], "`prompts` must be"),
    ],
)
def test_names_are_checked_first(
    words: list[str], error: str, folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch, called: Any
) -> None:
    """Before the machine is looked at and a model is loaded."""
    monkeypatch.setattr(doctor, "machine", lambda: pytest.fail("it took time"))
    words = [folders[0] if word == "TARGET" else word for word in words]
    assert error in called("doctor", *words, code=2).err


def test_a_pair_that_does_not_fit(folders: tuple[str, str], tmp_path: Path, called: Any) -> None:
    """The error of loading is a finding, with its way out, and exit code 1."""
    tiny("llama", vocab=64).save_pretrained(tmp_path)
    out = called("doctor", folders[0], "--draft", tmp_path, "--seconds", "2", "--quiet", code=1).out
    assert re.search(r"✗ failure .*draft='suffix'", out)


def test_models_without_a_draft_and_with_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that copies fits any target; of a model that hears nothing is measured."""
    model = tiny("llama")
    found = {one.name: one for one in doctor.check_models(SpecGenerator(model, "suffix"))}
    assert found["fit"].text.endswith("reads the text alone and fits any target")
    found = {one.name: one for one in doctor.check_models(SpecGenerator(model))}
    assert found["draft"].state == "note"
    monkeypatch.setattr(Tuner, "run", lambda _: iter([SpecGenerator(tiny("whisper"), tiny("whisper", seed=1))]))
    *_, last = doctor.tune(CommandRequest("t", "suffix", {}, {}), None, 0.0)
    assert last.text.startswith("measured for models that read text")
