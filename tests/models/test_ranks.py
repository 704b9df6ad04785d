"""Processes that share a model: what rank 0 does all do, in one process here, where every part is a whole model."""

import gc
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import EngineError, LoadError, OptionError, SpecGenerator, UnsupportedError
from specdec.core.tree import Tree
from specdec.core.work import Work
from specdec.models import LanguageModel
from specdec.models.backends.kv_session import KvSession
from specdec.models.loading.placement import parts
from specdec.parallel.ranks import Follower, RankGroup, Ranks
from specdec.parallel.sharded import LedSession, ShardedModel
from tests.heads import eagle_folder
from tests.matrix import endless
from tests.tiny import tiny

IDS = [[5, 6, 7, 8, 9, 5, 6], [3, 4, 5]]
RUN = endless(10)
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 3, "temperature": 0.8},
    "rejection": {"do_sample": True, "seed": 3, "sampling": "rejection"},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "branches": {"num_assistant_branches": 2},
    "contrastive": {"penalty_alpha": 0.5, "top_k": 3, "assistant_model": "none"},
    "hidden": {"output_hidden_states": True, "output_scores": True},
}


class Beside(RankGroup):
    """Another process in this one, which hears every message at once; `sent` are all that there were."""

    def __init__(self) -> None:
        self.reports: list[str | None] = []
        self.other, self.sent = Follower(self.reports.append), list[bytes]()

    def send(self, message: bytes) -> None:
        self.sent.append(message)
        with torch.no_grad():
            self.other.run(message)

    def gather(self, outcome: str | None) -> Sequence[str | None]:
        return [outcome, self.reports.pop()]


def made(seed: int, fails: str = "") -> ShardedModel:
    """A part that is the whole."""
    made.count += 1  # type: ignore[attr-defined]
    if fails and made.count % 2:  # type: ignore[attr-defined]
        raise LoadError(fails)
    return ShardedModel(tiny("llama", seed=seed, num_hidden_layers=3), backend="eager")


made.count = 0  # type: ignore[attr-defined]


@pytest.fixture
def line() -> Beside:
    return Beside()


@pytest.fixture
def shared(line: Beside) -> ShardedModel:
    ranks = Ranks(line)
    number, part = ranks.load(made, 0)
    return part.lead(ranks, number)


@pytest.fixture
def session(shared: ShardedModel) -> LedSession:
    """With one row, 1."""
    made = shared.session()
    assert made.add() == 1
    return made


def draft_of(kind: str, folder: Path) -> Any:
    if kind == "model":
        return tiny("llama", seed=1)
    return eagle_folder(folder) if kind == "head" else kind


def sessions(line: Beside) -> list[KvSession]:
    return [thing for thing in line.other._things.values() if isinstance(thing, KvSession)]


@pytest.mark.parametrize("draft", ["suffix", "model", "head", "early_exit:1"])
def test_texts_are_those_of_one_process(draft: str, line: Beside, shared: ShardedModel, tmp_path: Path) -> None:
    """Of every strategy; the other process holds the same keys and values afterwards, of whatever was kept too."""
    plain = SpecGenerator(tiny("llama", num_hidden_layers=3), draft_of(draft, tmp_path), **RUN)
    gen = SpecGenerator(shared, draft_of(draft, tmp_path), **RUN)
    for name, call in CALLS.items():
        if name == "branches" and draft == "suffix":
            continue
        theirs, ours = plain.generate(IDS, **call), gen.generate(IDS, **call)
        assert torch.equal(theirs.sequences, ours.sequences), name
    own = gen.engine.session
    assert isinstance(own, LedSession)
    texts = [[*IDS[0], *IDS[1]] * 2, [*IDS[0], *IDS[1]] * 2 + [4]]
    for text in texts:  # the second one continues what was kept of the first
        assert torch.equal(plain.generate([text]).sequences, gen.generate([text]).sequences)
    assert own.run([]) == []  # tells what the others were not told yet
    like = own.own.buffers._written, own.own.passes
    held = next(one for one in sessions(line) if (one.buffers._written, one.passes) == like)
    for mine, theirs in zip(own.own.buffers.pairs(), held.buffers.pairs(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_what_a_draft_thinks_of_its_guesses_stays_here(line: Beside, session: LedSession) -> None:
    """Distributions over the vocabulary are many times as large as what the others need to know."""
    tree = Tree.chain([4, 5, 6], [0.5] * 3, torch.rand(3, 100_000))
    session.run([Work(1, tree, 3)])
    assert len(line.sent[-1]) < 2000
    session.commit([1], [[0, 1]])
    assert (session.length(1), session.own.passes) == (2, 1)


def test_wrong_arguments_leave_the_processes_in_step(session: LedSession) -> None:
    """Every process raises the same before it begins anything."""
    with pytest.raises(OptionError, match="rows of this session"):
        session.run([Work.text(2, [4])])
    assert session.run([Work.text(1, [4])])[0].logits.shape == (1, 64)


def test_a_lost_process_is_an_error_at_once_and_ever_after(line: Beside, shared: ShardedModel) -> None:
    """Nothing can be done without it."""
    gen = SpecGenerator(shared, **RUN)

    def gone(message: bytes) -> None:
        raise RuntimeError("connection reset by peer\nstack")

    line.send = gone  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(EngineError, match=r"a process of this job ended.*reset by peer\): start the job"):
            gen.generate(IDS)


def test_a_pass_that_fails_here_alone_breaks_the_job(
    line: Beside, session: LedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others may wait in the middle of it."""
    monkeypatch.setattr(line, "send", lambda _: None)
    monkeypatch.setattr(KvSession, "run", boom)
    with pytest.raises(EngineError, match="a process of this job ended, or failed in a pass"):
        session.run([Work.text(1, [4])])
    monkeypatch.undo()
    with pytest.raises(EngineError, match="no memory"):
        session.add()


def boom(*_: Any, **__: Any) -> None:
    raise RuntimeError("no memory")


def test_the_others_say_what_they_could_not_load(line: Beside) -> None:
    """The one that leads raises it, though it has its own part; the job goes on."""
    ranks = Ranks(line)
    made.count = 0  # type: ignore[attr-defined]
    with pytest.raises(LoadError, match="process 1: the disk is full"):
        ranks.load(made, 0, "the disk is full")
    number, part = ranks.load(made, 0)
    assert SpecGenerator(part.lead(ranks, number), **RUN).generate(IDS).sequences.shape == (2, 17)


def test_what_nobody_needs_any_more_is_forgotten_everywhere(line: Beside, shared: ShardedModel) -> None:
    """With the next message."""
    for _ in range(3):
        session = shared.session()
        session.run([])
    gc.collect()
    session.run([])
    assert len(sessions(line)) == 1


def test_a_shared_model_runs_through_sessions_alone(shared: ShardedModel) -> None:
    """A pass of one process would wait for the others for ever."""
    with pytest.raises(EngineError, match="use it through SpecGenerator"):
        shared.model(torch.tensor([[3]]))
    with pytest.raises(UnsupportedError, match="output_attentions"):
        SpecGenerator(shared, **RUN).generate(IDS, output_attentions=True)


def test_the_end_is_told_once(line: Beside, shared: ShardedModel) -> None:
    assert line.other.run(b"")  # a sign of life
    shared.ranks.end()
    shared.ranks.end()
    assert not line.other.run(line.sent[-1])
    with pytest.raises(EngineError, match="the job was ended"):
        shared.session()


def test_other_layers_of_the_checkpoint_are_not_shared(shared: ShardedModel) -> None:
    """Multi-token prediction is refused by name; a model of one process is as it was."""
    shared.config.num_mtp_layers = 1
    with pytest.raises(UnsupportedError, match="tp_plan"):
        SpecGenerator(shared, "mtp")
    assert not LanguageModel(tiny("llama")).is_sharded


@pytest.mark.parametrize(
    ("name", "options", "plan", "why"),
    [
        ("llama", {"num_key_value_heads": 1}, "auto", "num_key_value_heads"),
        ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}, "auto", "has 3 heads"),
        ("gpt2", {}, "auto", "has no plan to share 'gpt2'"),
        ("t5", {}, {"lm_head": "colwise_gather_output"}, "has an encoder"),
    ],
)
def test_models_that_cannot_be_shared_are_refused(
    name: str, options: dict[str, Any], plan: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedError, match=why):
        parts(tiny(name, **options).config, plan, name)


def slow(part: list[threading.Thread], ranks: Ranks) -> list[threading.Thread]:
    """A part that takes as long as a sign of life may come in between."""
    part.append(threading.Thread(target=ranks.beat, args=(0.0,)))
    part[-1].start()
    part[-1].join(0.05)
    return part


def test_no_sign_of_life_comes_between_loading_and_its_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others gather then, and hear nothing else: both sides waited for ever."""
    sent: list[bytes] = []
    job = RankGroup.__new__(RankGroup)
    monkeypatch.setattr(job, "send", sent.append, raising=False)
    monkeypatch.setattr(job, "gather", lambda outcome: sent.append(b"gathered") or [outcome, None], raising=False)
    ranks, begun = Ranks(job), list[threading.Thread]()
    monkeypatch.setattr("specdec.parallel.ranks._packed", lambda command: b"loading")
    ranks.load(slow, begun, ranks)
    for thread in begun:
        thread.join()
    assert sent == [b"loading", b"gathered", b""]
