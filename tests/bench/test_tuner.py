"""What the tuner tries, how long it takes, and what it advises, with a clock and models made by hand."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec import LanguageModel, SpecGenerator
from specdec.bench import tuner
from specdec.bench.parts import Mode
from specdec.bench.tuner import (
    Skipped,
    TimedAnswer,
    Trial,
    Tuner,
    best,
    comparable,
    drafts_to_try,
    further_modes,
    prompts_for,
)
from specdec.core.stats import Stats
from tests.folders import WIDTH, byte_tokenizer
from tests.tiny import tiny

PLAIN, EIGHT, FOUR = Mode(), Mode(quantization="int8-weight"), Mode(quantization="int4-weight")


@dataclass
class World:
    """Models that take `load` seconds to load, `read` to read a prompt, and by mode and draft so many for a token.

    Draft models take `load_draft` seconds.
    """

    load: float = 10.0
    load_draft: float = 0.0
    read: float = 1.0
    token: Mapping[tuple[str, str], float] = field(default_factory=dict)
    now: float = 0.0
    alive: int = 0
    loaded: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    exactness: dict[str, str] = field(default_factory=dict)

    def clock(self) -> float:
        return self.now

    def systems(self, target: str, mode: Mode, **_: Any) -> Any:
        """As `Systems`: one model at a time."""
        assert self.alive == 0
        self.now += self.load
        self.loaded.append(mode.label)
        world, weight = self, SimpleNamespace(weight_bytes=0)

        class Fake:
            plain = SimpleNamespace(target=weight)

            def __init__(self) -> None:
                world.alive += 1
                self.drafts = list[str]()

            def close(self) -> None:
                world.closed += self.drafts

            def __del__(self) -> None:
                world.alive -= 1

            def generator(self, _: str, cell: Any) -> Any:
                draft = "none" if cell is None else cell.draft
                if draft == "model:broken":
                    raise ValueError("it is broken")
                self.drafts.append(draft)
                world.now += world.load_draft if "d" in draft.split(":") else 0.0
                return SimpleNamespace(
                    **{"mode": mode.label, "tokenizer": None, "generate": lambda *_, **__: None},
                    draft="suffix" if draft == "auto" else draft,
                    target=SimpleNamespace(exactness=world.exactness.get(mode.label, "exact")),
                )

        return Fake()

    def measure(self, generator: Any, call: Mapping[str, Any]) -> Any:
        """As `measure`: a token at a time until all or the time is over."""
        each = self.token.get((generator.mode, generator.draft), 0.1)
        if each < 0:
            raise ValueError("it does not run")
        most, seconds = call["max_new_tokens"], call["max_time"] or float("inf")
        count = 1
        while count < most and self.read + (count - 1) * each < seconds:
            count += 1
        took = self.read + (count - 1) * each
        self.now += took
        if most > tuner._FEW:
            self.answers.append(generator.draft)
        times = {"seconds": took, "first_token_seconds": self.read}
        stats = Stats(
            num_new_tokens=count,
            num_target_passes=count,
            finish_reasons=("length" if count == most else "time",),
            **times,
        )
        out = SimpleNamespace(stats=stats, new_tokens=lambda: [list(range(count))])
        gaps = [each * (1 + 1e-9 * number) for number in range(1, count - 1)]
        gaps.insert(len(gaps) // 2, 9 * each)  # one round is slow, and does not count
        return out, {"gaps": gaps if count > 2 else gaps[: count - 1], "first_token": self.read, "seconds": took}


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a tuner in a world, whose modes are three; returns its events."""

    def run(world: World, drafts: list[str], seconds: float) -> list[Any]:
        monkeypatch.setattr(tuner, "Systems", world.systems)
        monkeypatch.setattr(tuner, "measure", world.measure)
        monkeypatch.setattr(tuner, "further_modes", lambda *_: [EIGHT, FOUR])
        monkeypatch.setattr(tuner, "prompts_for", lambda *_: [("code", {}), ("question", {}), ("edit", {})])
        monkeypatch.setattr(tuner, "memory_bandwidth", lambda: 1.0)
        monkeypatch.setattr(tuner, "gc", SimpleNamespace(collect=lambda: None))  # a slow look at the tests' objects
        events = [*Tuner("t", drafts, PLAIN, seconds, clock=world.clock).run()]
        return [event for event in events if isinstance(event, Trial | Skipped)]

    return run


def test_every_draft_in_every_mode(tuned: Any) -> None:
    """In turn, and one model in memory at a time; the fastest is the advice."""
    times = {("int8-weight", "none"): 0.05, ("int8-weight", "suffix"): 0.02, ("int4-weight", "none"): 0.04}
    world = World(load=2.0, token=times)
    trials = tuned(world, ["none", "suffix"], 120.0)
    assert [(trial.mode, trial.draft) for trial in trials] == [
        (mode, draft) for mode in (PLAIN, EIGHT, FOUR) for draft in ("none", "suffix")
    ]
    assert world.answers == ["none", "suffix"] * (len(world.answers) // 2)
    chosen, *_ = best(trials)
    assert (chosen.mode, chosen.draft, round(chosen.speedup, 3)) == (EIGHT, "suffix", 2.5)
    assert len(chosen.answers) == 3
    assert (chosen.ms, chosen.first_token) == (pytest.approx(20), 1.0)


@pytest.mark.parametrize("load", [1.0, 5.0, 12.0, 20.0])
@pytest.mark.parametrize("token", [0.01, 0.1, 1.0])
def test_the_time_is_kept(load: float, token: float, tuned: Any) -> None:
    """Modes for which no time is left are named, and answers become shorter. (A pair took 389 seconds.)"""
    drafts = ["none", "suffix", "model:d", "suffix+d"]
    times = {(mode.label, draft): token for mode in (PLAIN, EIGHT, FOUR) for draft in drafts}
    world = World(load=load, read=0.5, token=times)
    events = tuned(world, drafts, 60.0)
    longest = token + 0.5  # that the last answer goes on
    assert world.now <= 60.0 + longest
    skipped = [event for event in events if isinstance(event, Skipped)]
    assert len(world.loaded) + sum(event.draft is None for event in skipped) == 3
    assert all("are left" in event.why for event in skipped)
    assert len(world.loaded) >= (3 if load < 10 and token < 1 else 1)
    trials = [event for event in events if isinstance(event, Trial)]
    assert {len(trial.answers) for trial in trials} <= {1, 2, 3}


@pytest.mark.parametrize(("load", "load_draft"), [(100.0, 0.0), (40.0, 30.0), (10.0, 100.0)])
def test_however_long_loading_takes(load: float, load_draft: float, tuned: Any) -> None:
    """Every draft that was named answers in a few words; an automatic one and further weights wait for more time.
    (A pair that was the fastest was not measured, and "no draft makes it faster".)
    """
    world = World(load=load, load_draft=load_draft, read=0.5)
    events = tuned(world, ["none", "suffix", "model:d", "auto"], 60.0)
    late, *modes = (event for event in events if isinstance(event, Skipped))
    assert [event.draft for event in events if isinstance(event, Trial)] == ["none", "suffix", "model:d"]
    assert (late.draft, late.seconds, [event.mode for event in modes]) == ("auto", 0.0, [EIGHT, FOUR])
    assert all("s are left" in event.why for event in (late, *modes))
    assert min(event.seconds for event in modes) >= load
    assert world.now <= max(load + load_draft + 10.0, 60.0 + 1.0)


def test_passes_that_take_for_ever(tuned: Any) -> None:
    """The answers in a few words count. (Nothing did, after 150 seconds.)"""
    times = {("as loaded", draft): 0.8 for draft in ("none", "suffix", "model:d")}
    world = World(load=30.0, read=3.0, token=times)
    events = tuned(world, ["none", "suffix", "model:d"], 64.0)
    assert [event.draft for event in events if isinstance(event, Trial)] == ["none", "suffix", "model:d"]
    assert world.now <= 64.0 + 3.0 + 0.8


def test_time_that_is_left(tuned: Any) -> None:
    """All prompts are answered, and then again: other programs slow an answer, and the fastest counts. (With 150 of
    250 seconds left, two of three prompts had one answer.)
    """
    world = World(load=1.0, read=4.0)
    slow, measure = [0.4, 0.4], world.measure

    def disturbed(generator: Any, call: Mapping[str, Any]) -> Any:
        world.token = {("as loaded", "none"): slow.pop() if slow else 0.05}
        return measure(generator, call)

    world.measure = disturbed  # type: ignore[method-assign]
    trials = [event for event in tuned(world, ["none"], 250.0) if event.mode == PLAIN]
    [trial] = trials
    assert len(trial.answers) == 3
    assert trial.ms == pytest.approx(50)


def test_the_fastest_in_further_modes(tuned: Any) -> None:
    """None, the fastest, and what was named. (A model that a busy second made slow was not tried with fewer bits.)"""
    drafts = ["none", "ngram", "suffix", "suffix+d"]
    times = {("as loaded", draft): each for draft, each in zip(drafts, (0.1, 0.07, 0.05, 0.2), strict=True)}
    events = tuned(World(load=1.0, token=times), drafts, 60.0)
    assert [(event.mode, event.draft) for event in events] == [
        *((PLAIN, draft) for draft in drafts),
        *((mode, draft) for mode in (EIGHT, FOUR) for draft in ("none", "suffix", "suffix+d")),
    ]


@pytest.mark.parametrize(("each", "further"), [(0.07, "ngram"), (0.04, "auto")])
def test_an_automatic_draft_in_further_modes(each: float, further: str, tuned: Any) -> None:
    """Only where it was the fastest, as it takes seconds to make."""
    times = {("as loaded", "ngram"): 0.05, ("as loaded", "suffix"): each}  # a generator's automatic draft is "suffix"
    events = tuned(World(load=1.0, token=times), ["none", "ngram", "auto"], 60.0)
    assert [event.draft for event in events if event.mode == EIGHT] == ["none", further]


def test_a_draft_that_does_not_load(tuned: Any) -> None:
    """It is told once, and the others are measured."""
    events = tuned(World(load=1.0), ["none", "model:broken"], 60.0)
    assert events[0] == Skipped(PLAIN, events[0].why, failed=True)
    assert "it is broken" in events[0].why
    assert [event.draft for event in events[1:]] == ["none"] * 3


def test_an_automatic_draft_that_is_measured_anyway(tuned: Any) -> None:
    """It has a line that says which it is. (It had none, and a person looked for it.)"""
    world = World(load=1.0)
    events = tuned(world, ["none", "suffix", "auto"], 60.0)
    assert events[0] == Skipped(PLAIN, "it is suffix for this target", draft="auto")
    assert [event.draft for event in events[1:]] == ["none", "suffix"] * 3
    assert world.closed[:3] == ["none", "suffix", "auto"]


@pytest.mark.parametrize("mode", [PLAIN, EIGHT])
def test_a_draft_that_does_not_run(mode: Mode, tuned: Any) -> None:
    """The mode is left out with the reason, and its drafts are closed. (The error ended the examination.)"""
    world = World(load=1.0, token={(mode.label, "suffix"): -1.0})
    events = tuned(world, ["none", "suffix"], 60.0)
    assert [event for event in events if event.mode == mode] == [
        Skipped(mode, next(event.why for event in events if isinstance(event, Skipped)), failed=mode == PLAIN)
    ]
    assert len([event for event in events if isinstance(event, Trial)]) == 4
    assert world.closed == ["none", "suffix"] * 3


def test_an_examination_that_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its drafts are closed. (They stayed open where the reader of the findings stopped.)"""
    world = World()
    monkeypatch.setattr(tuner, "Systems", world.systems)
    monkeypatch.setattr(tuner, "measure", world.measure)
    monkeypatch.setattr(tuner, "further_modes", lambda *_: [])
    monkeypatch.setattr(tuner, "prompts_for", lambda *_: [("code", {})])
    events = Tuner("t", ["none", "suffix"], PLAIN, 60.0, clock=world.clock).run()
    next(events)
    del events
    assert world.closed == ["none", "suffix"]


@pytest.mark.parametrize(
    ("draft", "spellings"),
    [
        ("none", ["none", "suffix", "auto"]),
        ("suffix", ["none", "suffix", "auto"]),
        ("ngram", ["none", "suffix", "ngram", "auto"]),
        ("some/model", ["none", "suffix", "suffix+some/model", "auto"]),
        ("model:some/model", ["none", "suffix", "model:some/model", "suffix+some/model", "auto"]),
        ("ngram+zoo:python-code", ["none", "ngram", "ngram+zoo:python-code", "auto"]),
    ],
)
def test_what_is_tried(draft: str, spellings: list[str]) -> None:
    """None, copies, the model with them, and what comes by itself. (Who named a draft never heard of the fastest.)"""
    assert drafts_to_try(draft) == spellings


def test_modes_in_which_a_pass_reads_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large model in floats on a CPU, and of a mode that says nothing; the dtype where it is half."""
    model = LanguageModel(tiny("llama"))
    assert further_modes(model, PLAIN) == []
    monkeypatch.setattr(tuner, "_LARGE", 0)
    monkeypatch.setattr("specdec.kernels.available", lambda: True)
    named = Mode(trust_remote_code=True)
    words = [{"dtype": "bfloat16"}, {"quantization": "int8-weight"}, {"quantization": "int4-weight"}]
    assert [mode.loading for mode in further_modes(model, named)] == [
        {**one, "trust_remote_code": True} for one in words
    ]
    half = LanguageModel(tiny("llama").to(torch.bfloat16))
    assert further_modes(half, PLAIN) == [EIGHT, FOUR]
    for chosen in (Mode(dtype="float32"), EIGHT, Mode(gguf_file="a.gguf"), Mode(backend="eager")):
        assert further_modes(model, chosen) == []


def test_memory_without_room(tuned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode is not loaded into memory that it would fill."""
    monkeypatch.setattr(tuner, "free_bytes", lambda _: -1)
    events = tuned(World(load=1.0), ["none"], 60.0)
    assert [event.why for event in events[1:]] == ["not tried: loading it takes 0.0 GiB, and -0.0 GiB are free"] * 2


def made(*ms: float, draft: str = "none", mode: Mode = PLAIN, stats: Stats | None = None) -> Trial:
    plain = Stats(num_target_passes=11, verify_seconds=2.0, first_token_seconds=1.0, finish_reasons=("length",))
    answers = {at: TimedAnswer(each, 0.5, [], stats or Stats()) for at, each in enumerate(ms)}
    return Trial(mode, draft, answers, dict.fromkeys(answers, TimedAnswer(100.0, 0.5, [], plain)), "exact")


def test_the_simplest_of_equals() -> None:
    """What is faster by chance brings no model along, and no other weights."""
    plain, copies, both = made(100.0), made(50.0, draft="suffix"), made(49.0, draft="suffix+d")
    assert best([plain, copies, both]) == [copies, both]
    assert best([plain, copies, made(40.0, draft="suffix+d")])[0].draft == "suffix+d"
    assert best([plain, made(99.0, draft="suffix")])[0] is plain
    assert best([copies, made(60.0, mode=EIGHT), made(49.0, draft="suffix", mode=EIGHT)])[0] is copies
    assert best([copies, made(60.0, mode=EIGHT), made(40.0, draft="suffix", mode=EIGHT)])[0].mode == EIGHT


def test_only_the_same_prompts_are_compared() -> None:
    """A prompt that one mode answered alone does not count. (Modes with fewer prompts won by easier ones.)"""
    floats, eight = made(10.0, 90.0), made(40.0, mode=EIGHT)
    assert [one.ms for one in comparable([floats, eight])] == [10.0, 40.0]
    assert best(comparable([floats, eight]))[0].mode == PLAIN
    other = replace(eight, answers={2: eight.answers[0]}, plain={2: eight.plain[0]})
    assert comparable([floats, other]) == [floats]


def test_why_a_draft_does_not_pay() -> None:
    """Its acceptance and its cost, in passes."""
    counts = {"num_draft_tokens": 40, "num_accepted_draft_tokens": 30, "num_target_passes": 6, "draft_seconds": 1.4}
    stats = Stats(**counts, verify_seconds=1.65, first_token_seconds=1.0, finish_reasons=("length",))
    assert made(110.0, draft="model:d", stats=stats).reason == (
        "75% of 40 guesses were right, a guess took 0.35 of a pass, reading prompts included, "
        "and a pass over guesses 1.30 of a plain one"
    )
    assert made(110.0, draft="suffix").reason == "it guessed nothing, as these texts repeat nothing"


def test_prompts(tmp_path: Any) -> None:
    """Three kinds of text, as messages for a model that chats, or those of a file."""
    tokenizer = byte_tokenizer()
    generator = SpecGenerator(tiny("llama", vocab=WIDTH), tokenizer=tokenizer)
    calls = prompts_for(generator, None)
    assert [(kind, *call) for kind, call in calls] == [("code", "prompt"), ("text", "prompt"), ("copy", "prompt")]
    (tmp_path / "mine.txt").write_text("one\n\ntwo")
    mine = str(tmp_path / "mine.txt")
    assert prompts_for(generator, mine) == [("mine", {"prompt": "one"}), ("mine", {"prompt": "two"})]
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    calls = prompts_for(generator, None)
    assert [(kind, *call) for kind, call in calls] == [
        ("edit", "messages"),
        ("question", "messages"),
        ("code", "prompt"),
    ]
    assert prompts_for(generator, mine)[1] == ("mine", {"messages": [{"role": "user", "content": "two"}]})
