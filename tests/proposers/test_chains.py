"""Chains that grow in one call: the same proposals as pass by pass, and the same text in the cache."""

import math
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper
from transformers.generation import logits_process as stock

from specdec.core.budget import Budget
from specdec.core.draft_schedules.estimates import Acceptance
from specdec.core.drafts import Chained, Choice, Filter, Proposer
from specdec.core.tree import Tree
from specdec.decoding import noise
from specdec.decoding.processors import Processors, Timestamps, Top
from specdec.decoding.processors.builtin import MinLength, OutputPenalty, Suppress, SuppressAtBegin
from specdec.decoding.samplers import CoupledSampler, DrawnSampler, GreedySampler
from specdec.models import LanguageModel
from specdec.models.backends.kv_session import KvSession
from specdec.proposers import ModelDraft
from tests.models.exact import encoding_for
from tests.proposers.fakes import FakeSequence, choosing, follow, task
from tests.tiny import never, tiny

pytestmark = pytest.mark.usefixtures("built")
TESTED = [(0.02, False), (0.05, False), (0.05, True), (0.3, True), (0.6, True), (0.9, True), (0.9, False)]
BUDGETS = [
    Budget.sure(5), Budget.sure(1), Budget.sure(20, 0.1), Acceptance().budget(12, 0.05, 0.02, 1),
    Acceptance().after(TESTED, 7).budget(12, 0.01, 0.002, 1), Acceptance().after(TESTED, 7).budget(32, 0.0, 0.0, 1),
    Acceptance().after(TESTED, 7).budget(12, 0.01, 0.013, 1, siblings=True), replace(Budget.sure(12), match=1),
    replace(Budget.sure(12), match=2),
]  # fmt: skip
WIDTH = 60  # of the target's vocabulary; the drafts' has four more


@cache
def models(name: str) -> tuple[LanguageModel, LanguageModel]:
    """A model whose passes Python runs, and the same one with recorded passes, which make chains in one call."""
    by_pass, in_one_call = (LanguageModel(tiny(name), backend="packed") for _ in range(2))
    by_pass.ragged.recorded = None
    return by_pass, in_one_call


def opened(model: LanguageModel) -> Any:
    return ModelDraft(model, shared_encoder=model.is_encoder_decoder).start(WIDTH)


def proposals(proposer: Proposer, rows: list[FakeSequence], budgets: list[Budget], together: bool) -> list[Tree]:
    if together:
        return proposer.propose(rows, budgets)
    return [proposer.propose([row], [budget])[0] for row, budget in zip(rows, budgets, strict=True)]


@pytest.mark.parametrize(
    ("name", "together"), [("llama", False), *((name, True) for name in ("llama", "gemma2", "whisper", "t5"))]
)
def test_as_pass_by_pass(name: str, together: bool, chains: list[int]) -> None:
    """Whatever becomes of the guesses, the next ones are the same, and so is what the caches hold.

    Of rows with budgets, samplers and ends of their own, in one call or in a call for each; one begins anew meanwhile.
    """
    chance, encoding = random.Random(4), encoding_for(models(name)[0], 1)
    proposers, rows = [opened(model) for model in models(name)], list[list[FakeSequence]]([[], []])
    proposers[1]._session.run = never
    for key, sampler in enumerate(choosing(WIDTH).values()):
        text, ends = [chance.randrange(3, WIDTH) for _ in range(1 + 4 * key)], frozenset({11, 30} if key % 2 else ())
        for same in rows:
            same.append(FakeSequence([*text], key, encoding=encoding, task=task(sampler, ends=ends)))
    lengths, wide = set(), 0
    for turn in range(7):
        budgets = [BUDGETS[(turn + row.id) % len(BUDGETS)] for row in rows[0]]
        trees = [proposals(one, same, budgets, together) for one, same in zip(proposers, rows, strict=True)]
        for number, (tree, other) in enumerate(zip(*trees, strict=True)):
            assert (tree.tokens, tree.parents) == (other.tokens, other.parents)
            assert tree.confidence == pytest.approx(other.confidence, rel=1e-4)
            assert (tree.q is None) == (other.q is None)
            if tree.q is not None:
                torch.testing.assert_close(other.q, tree.q, rtol=1e-3, atol=1e-5)
            lengths.add(len(tree))
            assert tree.siblings == len(tree) - tree.depth
            assert not tree.siblings or budgets[number].siblings
            wide += tree.siblings > 0
            chain = tree.tokens[: tree.stem]
            accepted, bonus = chance.randrange(len(chain) + 1), chance.randrange(3, WIDTH)
            for one, same in zip(proposers, rows, strict=True):
                follow(one, same[number], chain, accepted, bonus)
        held = [[one._session.length(cached.cache_row) for cached in one._cached.values()] for one in proposers]
        assert held[0] == held[1]
        if turn == 1:
            for one in proposers:
                one.drop([3])
    count = len(rows[0])
    assert chains == ([count] * 7 if together else [1] * 7 * count)
    assert len(lengths) > 5
    assert wide > 2


@pytest.mark.parametrize("number", [0, 1])
def test_a_chain_ends_where_its_tokens_stand_in_the_text(number: int) -> None:
    """With a token behind them; the shorter the match, the sooner. (It ended where it repeated itself, though no copy
    goes on there.)
    """
    text = [*random.Random(4).choices(range(3, WIDTH), k=400), 7, 3]
    row = FakeSequence(text, task=task(GreedySampler(Processors())))
    [whole], *ended = (
        opened(models("llama")[number]).propose([row], [replace(Budget.sure(20), match=match)]) for match in range(4)
    )
    for match, [tree] in enumerate(ended, 1):
        followed = [text[at : at + match] for at in range(len(text) - match)]
        tails = ([*text, *whole.tokens[:count]][-match:] for count in range(1, len(whole)))
        count = next((count for count, tail in enumerate(tails, 1) if tail in followed), len(whole))
        assert tree.tokens == whole.tokens[:count]
    assert len(ended[0][0]) == 1 < len(ended[1][0]) < len(whole) == len(ended[2][0])


def test_no_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that overflowed proposes what it had before, and then as ever."""
    row, chain = FakeSequence([7, 3], task=task(GreedySampler(Processors()))), KvSession.draft_chain

    def overflowing(self: KvSession, *given: Any) -> Chained:
        chained = chain(self, *given)
        for guesses in chained.guesses:
            guesses[-1] = (0, math.nan)
        return chained

    proposer, anew = (opened(models("llama")[1]) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(KvSession, "draft_chain", overflowing)
        [tree] = proposer.propose([row], [Budget.sure(2)])
        assert len(tree) == 1
        follow(proposer, row, tree.tokens, 1, 8)
    assert proposer.propose([row], [Budget.sure(5)])[0].tokens == anew.propose([row], [Budget.sure(5)])[0].tokens


class Contrary(GreedySampler):
    """Picks in a way of its own."""

    def pick(self, seq: Any, guesses: list[int], logits: Tensor, **more: Any) -> tuple[int, float, None]:
        return int(logits.argmin()), 0.5, None


ASKED = {
    "own code": GreedySampler(Processors((lambda ids, logits: logits,))),
    "own sampler": Contrary(Processors()),
    "typical": GreedySampler(Processors((stock.TypicalLogitsWarper(0.9),))),
    "least probability": GreedySampler(Processors((stock.MinPLogitsWarper(0.1),))),
    "repetitions": GreedySampler(Processors((stock.RepetitionPenaltyLogitsProcessor(1.5, 1),))),
    "one of two": GreedySampler(Processors((Suppress([4]), OutputPenalty(1, 0.5, 0.5)))),
    "after the begin": GreedySampler(Processors((Timestamps(40, 3, 30),))),
    "no say": None,
}


@pytest.mark.parametrize("sampler", ASKED.values(), ids=ASKED)
def test_who_must_be_asked(sampler: GreedySampler | None, chains: list[int]) -> None:
    """Samplers that numbers do not say, for all rows of the round."""
    proposer, plain = opened(models("llama")[1]), GreedySampler(Processors())
    rows = [FakeSequence([7, 3], task=task(sampler)), FakeSequence([4, 8], 1, task=task(plain))]
    assert all(tree.tokens for tree in proposer.propose(rows, [Budget.sure(5)] * 2))
    assert not chains


def test_what_numbers_say() -> None:
    """Of suppressed tokens those that are not over, of texts what is looked at, and the noise."""
    row = FakeSequence([7, 3, 9], prompt_length=1)
    over = Processors((SuppressAtBegin([3], 2), MinLength(3, [3]), Suppress([5, 4, -1]), Top(p=0.5)))
    said = [Filter("suppress", (0, math.inf, 4, 5)), Filter("top", (0, 0.5, 1))]
    assert GreedySampler(over).choice(row) == Choice(said)
    repeated = GreedySampler(Processors((stock.RepetitionPenaltyLogitsProcessor(1.5),)))
    assert repeated.choice(FakeSequence([7, 3, 9, 7])) == Choice([Filter("repetition", (1.5, 3, 7, 9))])
    begin = Processors((SuppressAtBegin([3], 5), MinLength(4, [2])))
    said = [Filter("suppress", (2, 3, 3)), Filter("suppress", (0, 1, 2))]
    assert GreedySampler(begin).choice(row) == Choice(said)
    for text, newest, last in (([7, 3], -1, ()), ([7, 3, 41, 5, 6], 41, (5, 6)), ([7, 3, 42], 42, (42,))):
        stamps = GreedySampler(Processors((Timestamps(40, 2, 30),))).choice(FakeSequence(text))
        assert stamps == Choice([Filter("timestamps", (40, 30, -1, True, newest, *last))])
    drawn = CoupledSampler(Processors((TemperatureLogitsWarper(0.5), Top(7))), seed=2).choice(row)
    said = [Filter("temperature", (0.5,)), Filter("top", (7, 1.0, 1))]
    assert drawn == Choice(said, noise.key(2, noise.COUPLED), 2)
    own = DrawnSampler(Processors(), seed=2).choice(row)
    assert own == Choice([], noise.key(2, noise.DRAFT, 2), 0)
