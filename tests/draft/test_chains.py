"""Chains that grow in one call: the same proposals as pass by pass, and the same text in the cache."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest
import torch

from specdec.draft import ModelDrafter
from specdec.logits import Processors
from specdec.schedule.base import Limit
from specdec.schedule.cost import CostPlan
from specdec.schedule.estimates import Acceptance
from specdec.select.rules import CoupledRule, GreedyRule
from specdec.types import EMPTY, Plan, Until

from .fakes import FakeModel, FakeRow, FakeSession, follow, task

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

    chains = 0

    def chain(
        self,
        row: int,
        text: list[int],
        most: int,
        until: Until,
        *,
        width: int,
        ends: Collection[int] = (),
        confident: bool = True,
    ) -> list[tuple[int, float]]:
        self.chains += 1
        found: list[tuple[int, float]] = []
        chance, fed = 1.0, text
        while True:
            self.held[row] += fed
            logits = self.model.logits(self.held[row], self.encodings[row])[:width]
            token = int(logits.argmax())
            sure = float(logits.softmax(-1)[token]) if confident else 1.0
            found.append((token, sure))
            chance *= min(sure * until.rates[bisect_right(until.edges, sure)], 1.0)
            if len(found) == most or chance < until.least or token in ends:
                return found
            fed = [token]


class ChainingModel(FakeModel):
    def session(self) -> Chaining:
        self.sessions.append(Chaining(self))
        return self.sessions[-1]


@pytest.mark.parametrize("plan", PLANS)
def test_as_pass_by_pass(plan: Plan) -> None:
    """Whatever becomes of the guesses, the next ones are the same, and so is what the caches hold."""
    rule = GreedyRule(Processors(), 50)
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
    assert models[1].sessions[-1].chains == 60
    assert not models[1].fed  # no pass beside them
    assert len(lengths) > 1 or plan.limit == 1 or not plan.needs_confidence


def test_no_guess() -> None:
    """A draft that overflowed proposes what it had before."""

    class Overflowing(Chaining):
        def chain(self, row: int, text: list[int], *others: object, **named: object) -> list[tuple[int, float]]:
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
    assert not model.sessions[-1].chains


@pytest.mark.parametrize(
    ("rule", "plan"),
    [
        (CoupledRule(Processors(), 50, seed=1), Limit(5)),
        (GreedyRule(Processors((torch.nn.Identity(),)), 50), Limit(5)),
    ],
)
def test_who_must_be_asked(rule: GreedyRule, plan: Plan) -> None:
    """Rules that look at more than logits."""
    assert not rule.is_plain
    model = ChainingModel()
    session = ModelDrafter(model).start(50)
    assert not model.sessions[-1].chains
    assert GreedyRule(Processors(), 50).is_plain
    assert session.propose([FakeRow([7, 3])], [plan])[0] is not EMPTY  # a rule that does not say
    assert not model.sessions[-1].chains
