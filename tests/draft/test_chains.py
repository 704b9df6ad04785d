"""Chains that grow in one call: the same proposals as pass by pass, and the same text in the cache."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper
from transformers.generation import logits_process as stock

from specdec.draft import ModelDrafter
from specdec.logits import Processors, TopK, TopP
from specdec.logits.suppress import MinLength, Suppress, SuppressAtBegin
from specdec.schedule.base import Limit
from specdec.schedule.cost import CostPlan
from specdec.schedule.estimates import Acceptance
from specdec.select import noise
from specdec.select.rules import CoupledRule, GreedyRule, SampledRule
from specdec.types import EMPTY, Chained, ChainRule, Choice, Plan

from .fakes import FakeModel, FakeRow, FakeSession, choosing, follow, task

TESTED = [(0.02, False), (0.05, False), (0.05, True), (0.3, True), (0.6, True), (0.9, True), (0.9, False)]
PLANS = [
    Limit(5),
    Limit(1),
    Limit(20, 0.1),
    CostPlan(12, Acceptance(), 0.05, 0.02, 1),
    CostPlan(12, Acceptance().after(TESTED, 7), 0.01, 0.002, 1),
    CostPlan(32, Acceptance().after(TESTED, 7), 0.0, 0.0, 1),
]


class Chaining(FakeSession):
    """A session whose chains are one call."""

    chains, calls = True, 0

    def chain(self, rows: Sequence[int], texts: Sequence[list[int]], rules: Sequence[ChainRule]) -> Chained:
        self.calls += 1
        return Chained([self.guesses(*own) for own in zip(rows, texts, rules, strict=True)])

    def guesses(self, row: int, text: list[int], rule: ChainRule) -> list[tuple[int, float]]:
        until = rule.until
        found: list[tuple[int, float]] = []
        chance, fed = 1.0, text
        while True:
            self.held[row] += fed
            logits = self.model.logits(self.held[row], self.encodings[row])[: rule.width]
            scores = chosen_from(logits, rule.choice)
            token = int((scores + noise_of(rule.choice, len(found), len(scores))).argmax())
            sure = float(scores.softmax(-1)[token]) if rule.confident else 1.0
            found.append((token, sure))
            chance *= min(sure * until.rates[bisect_right(until.edges, sure)], 1.0)
            if len(found) == rule.most or chance < until.least or token in rule.ends:
                return found
            fed = [token]


def chosen_from(logits: Tensor, choice: Choice) -> Tensor:
    """What a choice leaves of logits, by transformers' processors."""
    processors = [
        stock.SuppressTokensLogitsProcessor(choice.suppressed),
        stock.TemperatureLogitsWarper(choice.temperature),
        stock.TopKLogitsWarper(choice.top_k or len(logits)),
        stock.TopPLogitsWarper(choice.top_p),
    ]
    scores = logits[None]
    for processor in processors:
        scores = processor(None, scores)
    return scores[0]


def noise_of(choice: Choice, place: int, vocab: int) -> Tensor:
    """The noise of guess `place`."""
    if choice.address is None:
        return torch.zeros(vocab)
    return noise.gumbel(noise.fold(choice.address, choice.first + place), torch.arange(vocab))


class ChainingModel(FakeModel):
    def session(self) -> Chaining:
        self.sessions.append(Chaining(self))
        return self.sessions[-1]


@pytest.mark.parametrize("rule", choosing(50).values(), ids=choosing(50))
@pytest.mark.parametrize("plan", PLANS)
def test_as_pass_by_pass(plan: Plan, rule: GreedyRule) -> None:
    """Whatever becomes of the guesses, the next ones are the same, and so is what the caches hold."""
    chance = random.Random(4)
    models = FakeModel(), ChainingModel()
    sessions = [ModelDrafter(model).start(50) for model in models]
    rows = [FakeRow([7, 3, 9], task=replace(task(rule), ends=frozenset({11, 30}))) for _ in models]
    lengths = set()
    for _ in range(60):
        trees = [session.propose([row], [plan])[0] for session, row in zip(sessions, rows, strict=True)]
        one, other = trees
        assert one.tokens == other.tokens
        assert one.confidence == pytest.approx(other.confidence)
        lengths.add(len(one))
        accepted = chance.randrange(len(one) + 1)
        bonus = chance.randrange(50)
        for session, row, tree in zip(sessions, rows, trees, strict=True):
            follow(session, row, tree.tokens, accepted, bonus)
        held = [next(iter(model.sessions[-1].held.values())) for model in models]
        assert rows[0].tokens[: len(held[0])] == held[0] == held[1]
    assert models[1].sessions[-1].calls == 60
    assert not models[1].fed  # no pass beside them
    assert len(lengths) > 1 or plan.limit == 1 or not plan.needs_confidence


def test_several_rows_at_once() -> None:
    """Rows with plans and rules of their own: the proposals of passes, and one call a round as long as all allow it."""
    rules, plans = [*choosing(50).values()][:3], [Limit(5), Limit(2), CostPlan(12, Acceptance(), 0.05, 0.02, 1)]
    models = FakeModel(), ChainingModel()
    sessions = [ModelDrafter(model).start(50) for model in models]
    texts = [7, 3, 9], [4, 8, 2, 2], [30, 31]
    rows = [
        [FakeRow([*text], key=key, task=task(rule)) for key, (text, rule) in enumerate(zip(texts, rules, strict=True))]
        for _ in models
    ]
    chance = random.Random(1)
    for turn in range(30):
        trees = [session.propose(own, plans) for session, own in zip(sessions, rows, strict=True)]
        for number, (one, other) in enumerate(zip(*trees, strict=True)):
            assert one.tokens == other.tokens
            assert one.confidence == pytest.approx(other.confidence)
            accepted, bonus = chance.randrange(len(one) + 1), chance.randrange(50)
            for session, own in zip(sessions, rows, strict=True):
                follow(session, own[number], one.tokens, accepted, bonus)
        assert models[1].sessions[-1].calls == turn + 1
    assert [*models[0].sessions[-1].held.values()] == [*models[1].sessions[-1].held.values()]
    assert not models[1].sessions[-1].fed
    sessions[1].propose(rows[1], [Impatient(5), *plans[1:]])  # who must be asked
    assert models[1].sessions[-1].calls == 30


def test_no_guess() -> None:
    """A draft that overflowed proposes what it had before."""

    class Overflowing(Chaining):
        def guesses(self, row: int, text: list[int], rule: ChainRule) -> list[tuple[int, float]]:
            self.held[row] += [*text, 5]
            return [(5, 0.5), (0, math.nan)]

    class Model(FakeModel):
        def session(self) -> Overflowing:
            self.sessions.append(Overflowing(self))
            return self.sessions[-1]

    session = ModelDrafter(Model()).start(50)
    row = FakeRow([7, 3], task=task(GreedyRule(Processors(), 50)))
    [tree] = session.propose([row], [Limit(5)])
    assert tree.tokens == [5]
    follow(session, row, tree.tokens, 1, 8)
    assert session.propose([row], [Limit(5)])[0].tokens == [5]


class Impatient(Limit):
    """A limit that asks for something else."""

    def go_on(self, paths: Sequence[Sequence[float]], width: int = 1) -> bool:
        return max(map(len, paths)) < 2


def test_limits_of_another_kind() -> None:
    """Are asked after every guess."""
    model = ChainingModel()
    session = ModelDrafter(model).start(50)
    row = FakeRow([7, 3], task=task(GreedyRule(Processors(), 50)))
    assert len(session.propose([row], [Impatient(5)])[0]) == 2
    assert not model.sessions[-1].calls


class Contrary(GreedyRule):
    """A rule of another kind."""


ASKED = {
    "q": SampledRule(Processors(), 50, seed=1),
    "own code": GreedyRule(Processors((lambda ids, logits: logits,)), 50),
    "own rule": Contrary(Processors(), 50),
    "begin": GreedyRule(Processors((SuppressAtBegin([3], 2),)), 50),
    "length": GreedyRule(Processors((MinLength(9, [3]),)), 50),
    "order": GreedyRule(Processors((TopK(5), TemperatureLogitsWarper(2.0))), 50),
    "two cuts": GreedyRule(Processors((TopP(0.9), TopK(5))), 50),
    "beams": GreedyRule(Processors((TopP(0.9, min_tokens_to_keep=2),)), 50),
    "text": GreedyRule(Processors((stock.RepetitionPenaltyLogitsProcessor(1.5),)), 50),
    "no say": None,
}


@pytest.mark.parametrize("rule", ASKED.values(), ids=ASKED)
def test_who_must_be_asked(rule: GreedyRule | None) -> None:
    """Rules that look at more than logits, or in another order."""
    model = ChainingModel()
    session = ModelDrafter(model).start(50)
    row = FakeRow([7, 3], task=task(rule)) if rule else FakeRow([7, 3])
    assert session.propose([row], [Limit(5)])[0] is not EMPTY
    assert not model.sessions[-1].calls


def test_what_numbers_say() -> None:
    """Suppressed tokens that are over, and what a text's length decides."""
    row = FakeRow([7, 3, 9], prompt_length=1)
    over = Processors((SuppressAtBegin([3], 2), MinLength(3, [3]), Suppress([5, 4]), TopP(0.5)))
    assert GreedyRule(over, 50).choice(row) == Choice([4, 5], top_p=0.5)
    drawn = CoupledRule(Processors((TemperatureLogitsWarper(0.5), TopK(7))), 50, seed=2).choice(row)
    assert drawn == Choice((), 0.5, 7, 1.0, noise.key(2, noise.COUPLED), 2)
