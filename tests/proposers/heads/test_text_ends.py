"""Features at the ends of texts: whatever happened to a text, a head guesses as if it had read all of it at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from specdec import SpecGenerator
from specdec.core.budget import Budget
from specdec.core.drafts import Commit, Hidden, SequenceView
from specdec.core.outcome import Round
from specdec.proposers.heads import proposer as module
from specdec.proposers.heads.proposer import HeadDraft, HeadProposer
from tests.heads import IDS, RUN, Proposals, states_of
from tests.matrix import slow
from tests.proposers.fakes import FakeSequence

LIMIT = 3
Make = Callable[[str], tuple[Any, Any]]
KINDS = ["eagle", "mtp", "anchor", *map(slow, ("two", "dflash", "gemma4"))]


def guesses_anew(draft: Any, tokens: Sequence[int], states: Tensor) -> list[int]:
    """What a new session guesses after a text that it reads at once; `states` of all tokens but the last."""
    session, seq = draft.start(64), FakeSequence(list(tokens))
    session.update([Commit(seq, [], 0, Hidden(0, 0, states[: len(tokens) - 1].unbind(1)))])
    tokens = session.propose([seq], [Budget.sure(LIMIT)])[0].tokens
    assert tokens
    return tokens


@torch.no_grad()
def check(draft: Any, model: Any, proposals: Proposals) -> None:
    """The proposals are what new sessions guess after the same texts."""
    for text, tree in list(proposals):
        assert guesses_anew(draft, text, states_of(model, text, draft.hidden_layers))[: len(tree)] == tree.tokens


@dataclass
class Played:
    """A sequence whose text grows as if the target wrote `whole`; `fed`: tokens whose states the head got."""

    seq: FakeSequence
    whole: list[int]
    states: Tensor
    fed: int = 0

    @property
    def ready(self) -> bool:
        return 0 < self.fed == len(self.seq.tokens) - 1

    def commit(self, accepted: int, chunk: int) -> Commit:
        """A round: a chunk of the prompt, or the last token and `accepted` nodes of some draft."""
        first, length = self.fed, len(self.seq.tokens)
        if length - first > chunk:
            self.fed += chunk
            return Commit(self.seq, [], 0, Hidden(first, 0, self.states[first : self.fed].unbind(1)))
        self.seq.tokens += self.whole[length : length + accepted + 1]
        self.fed = len(self.seq.tokens) - 1
        return Commit(
            self.seq, list(range(accepted)), accepted, Hidden(first, 0, self.states[first : self.fed].unbind(1))
        )


@dataclass
class Play:
    """Sequences that come, fork, end and go on in a session of `draft`, at random."""

    model: Any
    draft: Any
    rng: random.Random
    played: list[Played] = field(default_factory=list)
    compared: int = 0
    forked: int = 0

    def __post_init__(self) -> None:
        self.session, self.count, self.saved = self.draft.start(64), 0, list[tuple[list[int], Any]]()

    def add(self, beginning: Sequence[int], source: Any = None, length: int = 0) -> None:
        """A sequence whose text begins like another one, whose `source` it may fork."""
        whole = [*beginning, *(self.rng.randrange(3, 60) for _ in range(80 - len(beginning)))]
        self.count += 1
        seq = FakeSequence(whole[: max(length + 1, self.rng.randrange(1, 12))], self.count)
        one = Played(seq, whole, states_of(self.model, whole, self.draft.hidden_layers))
        if source is not None:
            one.fed = self.session.fork(seq, source, length)
            assert one.fed <= length
            self.forked += one.fed > 0
        self.played.append(one)

    def round(self) -> None:
        """A round of all sequences, in which only some ask this head, and any draft's nodes may be accepted."""
        asked = [one for one in self.played if self.rng.random() < 0.6]
        limits = [self.rng.choice([0, LIMIT, LIMIT]) for _ in asked]
        trees = (
            self.session.propose([one.seq for one in asked], [Budget.sure(limit) for limit in limits]) if asked else []
        )
        for one, limit, tree in zip(asked, limits, trees, strict=True):
            if not (limit and one.ready):
                assert not tree.tokens
                continue
            assert tree.tokens == guesses_anew(self.draft, one.seq.tokens, one.states)[: len(tree)]
            assert len(tree) == limit
            self.compared += 1
        chunk = self.rng.randint(1, 8)
        self.session.update([one.commit(self.rng.randint(0, 4), chunk) for one in self.played])

    def change(self) -> None:
        """A sequence ends and is saved, or others fork a running or a saved one."""
        while len(self.played) < 2:
            self.add([])
        for one in [one for one in self.played if len(one.seq.tokens) > 55 or self.rng.random() < 0.2]:
            # no more states, then its state is saved
            self.session.update([Commit(one.seq, [], 0)])
            saved = self.session.save(one.seq, self.rng.randint(1, max(one.fed, 1)))
            if saved is not None:
                self.saved.append((one.whole, saved))
            self.session.drop([one.seq.id])
            self.played.remove(one)
        if self.saved and self.rng.random() < 0.5:
            whole, saved = self.rng.choice(self.saved)
            length = self.rng.randint(1, saved.length)
            self.add(whole[:length], saved, length)
        elif self.played and self.rng.random() < 0.5:
            one = self.rng.choice(self.played)
            length = self.rng.randint(0, one.fed)
            self.add(one.whole[:length], one.seq.id, length)


@pytest.mark.parametrize("kind", KINDS)
def test_guesses_do_not_depend_on_the_way(kind: str, made: Make) -> None:
    """Chunks, rejections, rounds of other drafts, ends, forks of running sequences and of saved ones, in any order."""
    model, draft = made(kind)
    play = Play(model, SpecGenerator(model, draft).draft, random.Random(kind))
    with torch.no_grad():
        for _ in range(30):
            play.change()
            for _ in range(3):
                play.round()
    assert play.compared > 20
    assert play.forked > 3


@dataclass(frozen=True)
class Late:
    """Drafts nothing before a text has so many tokens."""

    length: int
    max_tokens: ClassVar[int] = 3
    max_branches: ClassVar[int] = 1

    def budgets(self, rows: Sequence[SequenceView]) -> list[Budget]:
        return [Budget.sure(3 if len(row.tokens) >= self.length else 0) for row in rows]

    def after(self, round: Round) -> Late:
        return self


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_sleep(kind: str, made: Make, proposals: Proposals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not asked for twenty rounds, a head reads nothing; then it guesses what one guesses that was always asked.

    What slept to the end of its text goes on from it in the next request. (A head read along in every round.)
    """
    model, draft = made(kind)
    generator = SpecGenerator(model, draft, prefix_cache=True)
    head, awake = generator.draft, proposals
    assert head is not None
    run, prompt = {**RUN, "max_new_tokens": 30}, [(7 * i) % 50 + 5 for i in range(20)]
    constant = {"schedule": "constant", "num_assistant_tokens": LIMIT}
    SpecGenerator(model, head, prefix_cache=False).generate([prompt], **run, **constant)
    always = {tuple(text): tree.tokens for text, tree in awake}
    awake.clear()
    heard: list[int] = []
    features = HeadDraft.features
    monkeypatch.setattr(HeadDraft, "features", lambda *given: heard.append(len(awake)) or features(*given))
    generator.generate([prompt], **run, schedule=Late(41))
    woken = {tuple(text): tree.tokens for text, tree in awake}
    assert min(map(len, woken)) == 41
    assert len(heard) <= 10  # once for all of the text until then, and in the rounds since
    assert {text: guesses for text, guesses in woken.items() if always.get(text, guesses) != guesses} == {}
    assert len(woken.keys() & always.keys()) > 3
    other = prompt[::-1]
    heard.clear()
    slept = generator.generate([other], **run, schedule=Late(99)).sequences[0].tolist()
    assert len(heard) == 1  # to be kept
    awake.clear()
    out = generator.generate([slept], **run, **constant)
    assert out.stats.cached_prompt_tokens > 40
    assert awake
    check(head, model, awake)


@pytest.mark.parametrize("kind", ["eagle", "anchor"])
def test_a_long_sleep(kind: str, made: Make, proposals: Proposals, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is read now and then, so that its features need not be kept; guesses afterwards are as ever."""
    model, draft = made(kind)
    head, kept, update = SpecGenerator(model, draft).draft, list[int](), HeadProposer.update

    def noted(self: HeadProposer, commits: Sequence[Commit]) -> None:
        update(self, commits)
        kept.extend(len(one.text) + len(one.pending) for one in self._features.values())

    monkeypatch.setattr(HeadProposer, "update", noted)
    monkeypatch.setattr(module, "_PENDING", 6)
    run = {**RUN, "max_new_tokens": 40}
    out = SpecGenerator(model, head).generate(IDS, **run, schedule=Late(30))
    assert out.sequences.tolist() == SpecGenerator(model).generate(IDS, **run).sequences.tolist()
    assert max(kept) <= 16
    assert len(proposals) > 10
    check(head, model, proposals)


@pytest.mark.parametrize("way", ["fork", "propose"])
@torch.no_grad()
def test_a_failure_takes_no_features(way: str, made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text whose reading failed is read again. (Features were lost, and the cache held half a text.)"""
    model, name = made("eagle")
    draft: Any = SpecGenerator(model, name).draft
    tokens = [(7 * i) % 50 + 5 for i in range(100)]
    states = states_of(model, tokens, draft.hidden_layers)
    session, seq = draft.start(64), FakeSequence(tokens)
    session.update([Commit(seq, [], 0, Hidden(0, 0, states[:-1].unbind(1)))])
    keep = HeadProposer._keep

    def fail(*given: Any, **more: Any) -> None:
        if way == "propose":
            keep(*given, **more)
        raise ZeroDivisionError

    calls = {
        "fork": lambda: session.fork(FakeSequence(tokens, 1), seq.id, 50),
        "propose": lambda: session.propose([seq], [Budget.sure(LIMIT)]),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*((HeadDraft, "features") if way == "fork" else (HeadProposer, "_keep")), fail)
        with pytest.raises(ZeroDivisionError):
            calls[way]()
    assert session.propose([seq], [Budget.sure(LIMIT)])[0].tokens == guesses_anew(draft, tokens, states)
    (cached,) = session._cached.values()
    assert session._session.length(cached.cache_row) == len(tokens) + len(cached.guesses)
