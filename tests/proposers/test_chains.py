"""Chains that grow in one call: the same proposals as pass by pass, and the same text in the cache."""

import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper
from transformers.generation import logits_process as stock

from specdec.core.budget import Budget
from specdec.core.draft_schedules.estimates import Acceptance
from specdec.core.drafts import Chained, ChainRule, Choice, Filter
from specdec.core.tree import EMPTY
from specdec.decoding import noise
from specdec.decoding.processors import Processors, Timestamps, Top
from specdec.decoding.processors.own import MinLength, OutputPenalty, Suppress, SuppressAtBegin
from specdec.decoding.samplers import CoupledSampler, DrawnSampler, GreedySampler
from specdec.proposers import ModelDraft
from tests.proposers.fakes import FakeModel, FakeSequence, FakeSession, follow, task

TESTED = [(0.02, False), (0.05, False), (0.05, True), (0.3, True), (0.6, True), (0.9, True), (0.9, False)]
BUDGETS = [
    Budget.sure(5), Budget.sure(1), Budget.sure(20, 0.1), Acceptance().budget(12, 0.05, 0.02, 1),
    Acceptance().after(TESTED, 7).budget(12, 0.01, 0.002, 1), Acceptance().after(TESTED, 7).budget(32, 0.0, 0.0, 1),
    Acceptance().after(TESTED, 7).budget(12, 0.01, 0.01, 1, siblings=True),
]  # fmt: skip


def cost(rule: ChainRule) -> float:
    return rule.budget.pass_cost / rule.budget.later


class Chaining(FakeSession):
    """A session whose chains are one call."""

    draft_chains, calls = True, 0

    def draft_chain(self, rows: Any, texts: Any, rules: Sequence[ChainRule], embeds: None = None) -> Chained:
        self.calls += 1
        found = [([], []) for _ in rows]
        chains = [self.grow(*given) for given in zip(rows, texts, rules, found, strict=True)]
        live = [(chain, rule, math.inf) for chain, rule in zip(chains, rules, strict=True)]
        while live and sum(gain for *_, gain in live) >= max(cost(rule) for _, rule, _ in live):
            live = [(chain, rule, gain) for chain, rule, _ in live if (gain := next(chain, None)) is not None]
        q = [torch.stack(own) if rule.needs_q else None for rule, (_, own) in zip(rules, found, strict=True)]
        siblings = [self.siblings(q[: len(guesses)], rule) for (guesses, q), rule in zip(found, rules, strict=True)]
        return Chained([guesses for guesses, _ in found], q, siblings)

    def siblings(self, q: list[Tensor], rule: ChainRule) -> list[list[tuple[int, float]]]:
        count = rule.siblings if rule.choice.address is None else 0
        tops = [chances.topk(1 + count) for chances in q]
        return [list(zip(top.indices.tolist(), top.values.tolist(), strict=True))[1:] for top in tops]

    def grow(
        self, row: int, text: list[int], rule: ChainRule, into: tuple[list[tuple[int, float]], list[Tensor]]
    ) -> Iterator[float]:
        """Guesses one token after the other `into` a list, with its q; returns the gain of a next one, if any."""
        budget, (found, q) = rule.budget, into
        least = budget.node_cost / budget.later
        chance, fed = 1.0, text
        while True:
            self.held[row] += fed
            logits = self.model.logits(self.held[row], self.encodings[row])[: rule.width]
            q.append(logits.softmax(-1))
            token = int((logits + noise_of(rule.choice, len(found), len(logits))).argmax())
            sure = float(q[-1][token]) if budget.needs_confidence else 1.0
            found.append((token, sure))
            b = bisect_right(budget.edges, sure)
            chance *= min(budget.bases[b] + budget.rates[b] * sure, 1.0)
            if len(found) == rule.most or not chance > least or token in rule.ends:
                return
            yield chance - least
            fed = [token]


def noise_of(choice: Choice, place: int, vocab: int) -> Tensor:
    if choice.address is None:
        return torch.zeros(vocab)
    return noise.gumbel(noise.fold(choice.address, choice.first + place), torch.arange(vocab))


# Filters are applied by compiled code alone (tests/models/test_compile.py); the last test here has their numbers.
SAMPLERS = {
    "likeliest": GreedySampler(Processors(), 50),
    "drawn": CoupledSampler(Processors(), 50, seed=3),
    "distributions": DrawnSampler(Processors(), 50, seed=1),
}


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_as_pass_by_pass(budget: Budget, sampler: GreedySampler) -> None:
    """Whatever becomes of the guesses, the next ones are the same, and so is what the caches hold."""
    chance = random.Random(4)
    models = FakeModel(), FakeModel(session=Chaining)
    sessions = [ModelDraft(model).start(50) for model in models]
    rows = [FakeSequence([7, 3, 9], task=replace(task(sampler), ends=frozenset({11, 30}))) for _ in models]
    lengths = set()
    for _ in range(60):
        trees = [session.propose([row], [budget])[0] for session, row in zip(sessions, rows, strict=True)]
        one, other = trees
        assert (one.tokens, one.parents) == (other.tokens, other.parents)
        assert one.confidence == pytest.approx(other.confidence)
        assert len(one) == one.depth or budget.siblings
        assert (one.q is None) == (other.q is None) == (not sampler.needs_q or not one.tokens)
        if one.q is not None:
            torch.testing.assert_close(other.q, one.q)
        lengths.add(len(one))
        chain = one.tokens[: one.trunk]
        accepted = chance.randrange(len(chain) + 1)
        bonus = chance.randrange(50)
        held = [next(iter(model.sessions[-1].held.values())) for model in models]
        assert [*rows[0].tokens, *chain][: len(held[0])] == held[0] == held[1]
        for session, row in zip(sessions, rows, strict=True):
            follow(session, row, chain, accepted, bonus)
    assert models[1].sessions[-1].calls == 60
    assert not models[1].fed  # no pass beside them
    assert len(lengths) > 1 or budget.limit == 1 or not budget.needs_confidence


def test_several_rows_at_once() -> None:
    """Rows with budgets and samplers of their own: the proposals of passes, and one call a round as long as all
    allow it.
    """
    samplers, budgets = SAMPLERS.values(), [Budget.sure(5), Budget.sure(2), Acceptance().budget(12, 0.05, 0.02, 1)]
    models = FakeModel(), FakeModel(session=Chaining)
    sessions = [ModelDraft(model).start(50) for model in models]
    texts = [7, 3, 9], [4, 8, 2, 2], [30, 31]
    rows = [
        [
            FakeSequence([*text], id=key, task=task(sampler))
            for key, (text, sampler) in enumerate(zip(texts, samplers, strict=True))
        ]
        for _ in models
    ]
    chance = random.Random(1)
    for turn in range(30):
        trees = [session.propose(own, budgets) for session, own in zip(sessions, rows, strict=True)]
        for number, (one, other) in enumerate(zip(*trees, strict=True)):
            assert one.tokens == other.tokens
            assert one.confidence == pytest.approx(other.confidence)
            accepted, bonus = chance.randrange(len(one) + 1), chance.randrange(50)
            for session, own in zip(sessions, rows, strict=True):
                follow(session, own[number], one.tokens, accepted, bonus)
        assert models[1].sessions[-1].calls == turn + 1
    assert [*models[0].sessions[-1].held.values()] == [*models[1].sessions[-1].held.values()]
    assert not models[1].sessions[-1].fed
    rows[1][0].task = task(Contrary(Processors(), 50))  # one that must be asked after every guess
    sessions[1].propose(rows[1], budgets)
    assert models[1].sessions[-1].calls == 30


def test_no_guess() -> None:
    """A draft that overflowed proposes what it had before."""

    class Overflowing(Chaining):
        def grow(self, row: int, text: list[int], rule: ChainRule, into: Any) -> Iterator[float]:
            self.held[row] += [*text, 5]
            into[0].extend([(5, 0.5), (0, math.nan)])
            yield from ()

    session = ModelDraft(FakeModel(session=Overflowing)).start(50)
    row = FakeSequence([7, 3], task=task(GreedySampler(Processors(), 50)))
    [tree] = session.propose([row], [Budget.sure(5)])
    assert tree.tokens == [5]
    follow(session, row, tree.tokens, 1, 8)
    assert session.propose([row], [Budget.sure(5)])[0].tokens == [5]


class Contrary(GreedySampler):
    """Picks in a way of its own."""

    def pick(self, seq: Any, guesses: list[int], logits: Tensor, **more: Any) -> tuple[int, float, None]:
        return int(logits.argmin()), 0.5, None


ASKED = {
    "own code": GreedySampler(Processors((lambda ids, logits: logits,)), 50),
    "own sampler": Contrary(Processors(), 50),
    "typical": GreedySampler(Processors((stock.TypicalLogitsWarper(0.9),)), 50),
    "least probability": GreedySampler(Processors((stock.MinPLogitsWarper(0.1),)), 50),
    "repetitions": GreedySampler(Processors((stock.RepetitionPenaltyLogitsProcessor(1.5, 1),)), 50),
    "one of two": GreedySampler(Processors((Suppress([4]), OutputPenalty(1, 0.5, 0.5))), 50),
    "after the begin": GreedySampler(Processors((Timestamps(40, 3, 30),)), 50),
    "no say": None,
}


@pytest.mark.parametrize("sampler", ASKED.values(), ids=ASKED)
def test_who_must_be_asked(sampler: GreedySampler | None) -> None:
    """Samplers that numbers do not say."""
    model = FakeModel(session=Chaining)
    session = ModelDraft(model).start(50)
    row = FakeSequence([7, 3], task=task(sampler)) if sampler else FakeSequence([7, 3])
    assert session.propose([row], [Budget.sure(5)])[0] is not EMPTY
    assert not model.sessions[-1].calls


def test_what_numbers_say() -> None:
    """Of suppressed tokens those that are not over, of texts what is looked at, and the noise."""
    row = FakeSequence([7, 3, 9], prompt_length=1)
    over = Processors((SuppressAtBegin([3], 2), MinLength(3, [3]), Suppress([5, 4, -1]), Top(p=0.5)))
    said = [Filter("suppress", (0, math.inf, 4, 5)), Filter("top", (0, 0.5, 1))]
    assert GreedySampler(over, 50).choice(row) == Choice(said)
    repeated = GreedySampler(Processors((stock.RepetitionPenaltyLogitsProcessor(1.5),)), 50)
    assert repeated.choice(FakeSequence([7, 3, 9, 7])) == Choice([Filter("repetition", (1.5, 3, 7, 9))])
    begin = Processors((SuppressAtBegin([3], 5), MinLength(4, [2])))
    said = [Filter("suppress", (2, 3, 3)), Filter("suppress", (0, 1, 2))]
    assert GreedySampler(begin, 50).choice(row) == Choice(said)
    for text, newest, last in (([7, 3], -1, ()), ([7, 3, 41, 5, 6], 41, (5, 6)), ([7, 3, 42], 42, (42,))):
        stamps = GreedySampler(Processors((Timestamps(40, 2, 30),)), 50).choice(FakeSequence(text))
        assert stamps == Choice([Filter("timestamps", (40, 30, -1, True, newest, *last))])
    drawn = CoupledSampler(Processors((TemperatureLogitsWarper(0.5), Top(7))), 50, seed=2).choice(row)
    said = [Filter("temperature", (0.5,)), Filter("top", (7, 1.0, 1))]
    assert drawn == Choice(said, noise.key(2, noise.COUPLED), 2)
    own = DrawnSampler(Processors(), 50, seed=2).choice(row)
    assert own == Choice([], noise.key(2, noise.DRAFT, 2), 0)
