"""The hybrid: it takes the draft that pays, learns which that is, and never looks at what was drawn."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from specdec.core.budget import Budget
from specdec.core.draft_schedules.estimates import Acceptance, LinearFit
from specdec.core.drafts import SequenceView
from specdec.core.tree import Tree
from specdec.decoding.processors import Processors
from specdec.decoding.samplers import GreedySampler
from specdec.errors import OptionError
from specdec.proposers import HybridDraft, ModelDraft, NgramDraft, SuffixDraft
from specdec.proposers import hybrid as module
from tests.proposers.fakes import FakeBudget, FakeModel, FakeSequence, OwnProposer, follow, task


class Clock:
    """Time that passes only when told to, and by half a second for each pass of the draft model."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowModel(FakeModel):
    seconds = 0.5
    seconds_of_a_token = 0.0  # beyond the first of a pass

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def session(self):  # type: ignore[no-untyped-def]
        session, clock, seconds = super().session(), self.clock, self.seconds
        run = session.run

        def slow(*args, **more):  # type: ignore[no-untyped-def]
            clock.now += seconds + self.seconds_of_a_token * sum(len(work.tree) - 1 for work in args[0])
            return run(*args, **more)

        session.run = slow  # type: ignore[method-assign]
        return session


class Counting(SlowModel):
    """Every token is one more than the token before it, and sure."""

    def logits(self, prefix: Sequence[int], encoding: int = 0) -> Tensor:
        return 8 * one_hot(torch.tensor((prefix[-1] + 1) % self.vocab_size), self.vocab_size).float()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "perf_counter", clock)
    return clock


@pytest.fixture
def model(clock: Clock) -> SlowModel:
    return SlowModel(clock)


def run(model: SlowModel, next_token, rounds: int) -> list[Tree]:  # type: ignore[no-untyped-def]
    """Rounds of one second each over a text in which `next_token(text)` follows; the proposals."""
    session = HybridDraft(SuffixDraft(), ModelDraft(model)).start(50)
    row, trees = FakeSequence([1, 2, 3, 4, 5]), []
    for _ in range(rounds):
        [tree] = session.propose([row], [FakeBudget(5)])
        trees.append(tree)
        accepted, new = 0, next_token(row.tokens)
        while accepted < len(tree) and tree.tokens[accepted] == new:
            accepted += 1
            new = next_token([*row.tokens, *tree.tokens[:accepted]])
        follow(session, row, tree.tokens, accepted, new)
        model.clock.now += 1.0
    return trees


def test_changes_its_mind_with_the_text(model: SlowModel) -> None:
    """Copying first, free text after, of which the text draft has guesses too: each goes to the draft that knows it."""
    model.seconds = 0.1
    trees = run(model, lambda text: text[-5] if len(text) < 150 else model.greedy(text, 1)[0], 80)
    assert {tree.source for tree in trees[10:20]} == {"suffix"}
    assert sum(tree.source == "model" for tree in trees[-30:]) > 25


def test_an_expensive_model_is_left_alone(model: SlowModel) -> None:
    """A model that is always right but dearer than the target loses even against copies that often fail."""
    model.seconds = 2.0
    trees = run(model, lambda text: model.greedy(text, 1)[0] % 3, 60)
    assert {tree.source for tree in trees[-20:]} == {"suffix"}


def test_what_the_model_reads_along_is_no_part_of_a_pass(model: SlowModel) -> None:
    """After copies the model's first pass reads them, too: a hybrid took it for the price of every pass."""
    model.seconds, model.seconds_of_a_token = 0.1, 0.1
    session = HybridDraft(SuffixDraft(), ModelDraft(model)).start(50)
    seq = FakeSequence([1, 2, 3, 4, 5])
    rng = random.Random(1)
    for unread in [1, 9, 1, 5, 12] * 3:
        session.propose([seq], [FakeBudget(2)])
        follow(session, seq, [], 0, rng.randrange(50))
        seq.tokens += [rng.randrange(50) for _ in range(unread - 1)]
    assert session._odds.passes.at(1) == pytest.approx(0.1, rel=0.3)


def test_a_wait_between_two_calls_is_no_gap_between_rounds(model: SlowModel, clock: Clock) -> None:
    """A pause of a minute changed the choice for the next hundred tokens."""
    session = HybridDraft(SuffixDraft(), ModelDraft(model)).start(50)
    row = FakeSequence([1, 2, 3, 4, 5])
    for wait in (1.0, 1.0, 60.0, 1.0):
        session.propose([row], [FakeBudget(5)])
        clock.now += wait
    assert session._odds.gap is not None
    assert session._odds.gap < 2


def test_skipped_rounds_leave_the_model_exact(model: SlowModel, clock: Clock) -> None:
    """Whatever mixture of drafts ran before, the model's proposals are those of a fresh session."""
    rng = random.Random(3)
    session = HybridDraft(SuffixDraft(), ModelDraft(model)).start(50)
    rows = [FakeSequence([rng.randrange(4)], key) for key in range(3)]
    sources = set()
    for _ in range(40):
        budgets = [FakeBudget(rng.choice([0, 2, 5])) for _ in rows]
        for row, budget, tree in zip(rows, budgets, session.propose(rows, budgets), strict=True):
            sources.add(tree.source)
            assert len(tree) <= budget.limit
            if tree.source == "model":
                assert tree.tokens == model.greedy(row.tokens, budget.limit)
            follow(session, row, tree.tokens, rng.randint(0, 5), rng.randrange(4))
        clock.now += 1.0
    assert {"model", "suffix"} <= sources
    session.drop([1])
    assert len(session.propose([rows[0], rows[2]], [FakeBudget(2)] * 2)) == 2


def test_decides_before_the_model_draws(clock: Clock) -> None:
    """A tree that the model drew is always the one proposed: choosing after seeing it would bend the distribution."""
    drawn: list[Tree] = []

    class Watched(OwnProposer):
        def propose(self, rows: list[SequenceView], budgets: list[FakeBudget]) -> list[Tree]:
            drawn.extend(Tree.chain([9] * budget.limit) for budget in budgets)
            return drawn[-len(rows) :]

    session = HybridDraft(SuffixDraft(), Watched()).start(50)
    row, used = FakeSequence([1, 2, 1]), 0
    for step in range(30):
        [tree] = session.propose([row], [FakeBudget(2)])
        used += any(tree is other for other in drawn)
        row.tokens.append(step % 3)
        clock.now += 1.0
    assert used == len(drawn)


def test_refuses_a_model_as_the_text_draft() -> None:
    with pytest.raises(OptionError, match="text"):
        HybridDraft(ModelDraft(FakeModel()), ModelDraft(FakeModel()))  # type: ignore[arg-type]


@pytest.mark.parametrize("before", [True, False])
def test_a_chain_goes_on_with_copies(clock: Clock, before: bool) -> None:
    """The model ran a pass for each token of what the text has once already, then as long as a pass paid: copies behind
    its chain cost none, and four tokens show that they will do.
    """
    for siblings in (False, True):
        model = Counting(clock)
        session = HybridDraft(SuffixDraft(), ModelDraft(model)).start(50)
        budget = Budget(30, None, (0.5,), (0.9, 0.9), (0.0, 0.0), later=0.9, pass_cost=0.5, siblings=siblings)
        seq = FakeSequence([*range(10, 45), 5, 9] if before else [5, 9], task=task(GreedySampler(Processors())))
        seq.prediction = None if before else [*range(10, 45)]
        [tree] = session.propose([seq], [budget])
        [path] = [tree.path(node) for node in range(len(tree)) if len(tree.path(node)) == tree.depth]
        assert [tree.tokens[node] for node in path] == [*range(10, 10 + tree.depth)]
        assert tree.source == "model+suffix"
        assert model.passes == 4
        assert tree.depth > 2 * model.passes
        assert (len(tree) > tree.depth) == siblings


class Cycling(SlowModel):
    """After any token from 10 to 15 comes the next, then 10 again, and all are sure."""

    def logits(self, prefix: Sequence[int], encoding: int = 0) -> Tensor:
        return 12 * one_hot(torch.tensor(10 + (prefix[-1] - 9) % 6), self.vocab_size).float()


def test_a_chain_goes_on_where_no_copy_would(clock: Clock) -> None:
    """What repeats in the chain alone is in no text, and two matched tokens promise less than four. (Chains ended
    there, after 10 of 30 guesses, or went on with copies that were right half as often.)
    """
    right = Acceptance().after([(0.99, True)] * 200, 200)
    budget = right.budget(30, 0.01, 0.001)
    for draft, text in ((SuffixDraft(), [1, 5, 2, 6, 3]), (NgramDraft(), [*range(10, 16), 5, 9])):
        session = HybridDraft(draft, ModelDraft(Cycling(clock))).start(50)
        odds = session._odds
        odds.acceptance, odds.passes, odds.gap = right, LinearFit().add(1, 0.01), 1.0
        seq = FakeSequence(text, task=task(GreedySampler(Processors())))
        [tree] = session.propose([seq], [budget])
        assert (len(tree), tree.source) == (30, "model")


@pytest.mark.parametrize(
    ("copied", "prompt", "remaining", "reads"),
    [(None, 1, 2, False), (None, 1, 20, True), (0.9, 40, 60, False), (0.9, 30, 60, True), (0.1, 40, 60, True)],
)
def test_a_model_reads_where_that_pays(
    clock: Clock, copied: float | None, prompt: int, remaining: int, reads: bool
) -> None:
    """A text's last tokens do not pay for reading all before them, nor do texts that are usually copied.

    (For one chain the model read the prompt, and the hybrid had 0.6 of its text draft's speed; of texts that copy from
    their fifth token on, 0.7.)
    """
    model = SlowModel(clock)
    draft = HybridDraft(SuffixDraft(), ModelDraft(model))
    draft.odds.copied = draft.odds.copied if copied is None else copied
    seq = FakeSequence([*range(40)], prompt_length=prompt, remaining=remaining)
    draft.start(50).propose([seq], [Budget(4)])
    assert bool(model.passes) == reads


@pytest.mark.parametrize(("levels", "reads"), [(4, True), (100, False)])
def test_a_model_is_tried_until_its_guesses_are_known(clock: Clock, levels: int, reads: bool) -> None:
    """A few guesses of which half were right are bad luck, many are a poor draft. (After 4 guesses, a model that was
    right in 9 of 10 never read: copies that were half right came at 0.6 of its speed.)
    """
    model = SlowModel(clock)
    draft = HybridDraft(SuffixDraft(), ModelDraft(model))
    draft.odds.acceptance = Acceptance().after([(0.8, True), (0.8, False)] * (levels // 2), levels)
    draft.odds.seconds, draft.odds.tokens = 6.0, 10.0  # 0.6 seconds a token, and a second a pass
    draft.odds.passes, draft.odds.gap = LinearFit().add(1, 0.2), 1.0
    draft.start(50).propose([FakeSequence([*range(40)], prompt_length=30, remaining=60)], [Budget(8)])
    assert bool(model.passes) == reads


@pytest.mark.parametrize(("text", "source"), [([1, 2, 3, 1], "model"), ([*range(40), 0], "suffix")])
def test_doubtful_copies_lose_only_to_a_model_that_has_read(clock: Clock, text: list[int], source: str) -> None:
    """Copies of even chance came before a model that adds more than its passes cost: 0.97 of its speed on prose."""
    session = HybridDraft(SuffixDraft(), ModelDraft(SlowModel(clock))).start(50)
    session._odds.gap, session._odds.passes = 1.0, LinearFit().add(1, 0.1 if len(text) > 32 else 0.3)
    [tree] = session.propose([FakeSequence(text)], [FakeBudget(5)])
    assert tree.source.startswith(source)


def test_a_model_is_not_judged_by_copies_that_missed(clock: Clock) -> None:
    """Both had one measure of acceptance: on prose a model that was always right guessed one token at a time."""
    missed = right = Acceptance()
    for _ in range(30):
        missed, right = missed.after([(0.99, False)], 1), right.after([(0.99, True)] * 4, 4)
    draft = HybridDraft(SuffixDraft(), ModelDraft(Counting(clock)))
    draft.odds.acceptance = right
    [tree] = draft.start(50).propose([FakeSequence([*range(20)])], [missed.budget(6, 0.3, 0.05)])
    assert tree.tokens == [*range(20, 26)]
    alone = ModelDraft(Counting(clock)).start(50)
    assert len(alone.propose([FakeSequence([*range(20)])], [missed.budget(6, 0.3, 0.05)])[0]) < 2


@pytest.mark.parametrize(("copied", "count"), [(0.0, 6), (1.0, 0)])
def test_copies_price_the_model_only_where_they_are(clock: Clock, copied: float, count: int) -> None:
    """An answer began with five rounds without a guess, since copies had made the one before it six times as fast."""
    right = Acceptance()
    for _ in range(30):
        right = right.after([(0.99, True)] * 4, 4)
    model, seq = Counting(clock), FakeSequence([*range(20)])
    model.seconds, draft = 0.3, HybridDraft(SuffixDraft(), ModelDraft(model))
    draft.odds.acceptance, draft.odds.gap = right, 1.0
    session = draft.start(50)
    session._copy_shares[seq.id] = copied
    [tree] = session.propose([seq], [right.budget(6, 1.8, 0.3, pace=6.0)])
    assert len(tree) == count


def test_a_try_is_free(clock: Clock) -> None:
    """A model that guessed badly for a while had to pay for each try, and so was never asked again."""
    bad = Acceptance().after([(0.5, False)] * 30, 30)
    draft = HybridDraft(SuffixDraft(), ModelDraft(SlowModel(clock)))
    draft.odds.acceptance, draft.odds.gap = bad, 1.0
    [tree] = draft.start(50).propose([FakeSequence([*range(20)])], [bad.budget(1, 0.0, 0.0)])
    assert tree.source == "model"
    assert len(tree) == 1


def test_a_model_reads_for_several_sequences(clock: Clock) -> None:
    """A pass that they share was counted for each of them in full, so that the model read nothing."""
    draft, seqs = (
        HybridDraft(SuffixDraft(), ModelDraft(SlowModel(clock))),
        [FakeSequence([*range(40)], n) for n in range(6)],
    )
    draft.odds.gap = 1.0
    assert len(draft.start(50).begin_round(seqs, [Acceptance().budget(32, 6 * 0.3, 0.1)] * 6)) == 6


def test_a_batch_shares_the_cost_of_a_pass(clock: Clock) -> None:
    """One pass guesses for all. (Its cost counted in full for each, so that copies of one token beat a model that was
    right in 8 of 10.)
    """
    draft, text = HybridDraft(SuffixDraft(), ModelDraft(SlowModel(clock))), [1, 2, 3, 1]
    draft.odds.acceptance, draft.odds.gap = Acceptance().after([(0.8, True)] * 16 + [(0.8, False)] * 4, 20), 1.0
    draft.odds.passes = LinearFit().add(1, 0.1)
    seqs = [FakeSequence([*text], n, remaining=60) for n in range(8)]
    assert len(draft.start(50).begin_round(seqs, [Acceptance().budget(32, 8 * 0.1, 0.05)] * 8)) == 8


def test_a_search_teaches_nothing(clock: Clock) -> None:
    """Its proposals begin at branches, which were compared with the tokens that all branches share: a draft that was
    always right seemed always wrong, to later calls too.
    """
    draft = HybridDraft(SuffixDraft(), ModelDraft(SlowModel(clock)))
    session, seq = draft.start(50), FakeSequence([1, 2, 3], tree=Tree([4, 5], [-1, -1]), leaves=(0, 1))
    before = draft.odds.acceptance, draft.odds.new
    for token in (6, 7, 8):
        session.propose([seq], [FakeBudget(2)])
        seq.tokens.append(token)
        clock.now += 1.0
    session.propose([seq], [FakeBudget(2)])
    assert (draft.odds.acceptance, draft.odds.new) == before


def test_time_without_sequences_is_no_gap(clock: Clock) -> None:
    """An hour after a first call of one round was taken for a pass of the target."""
    draft = HybridDraft(SuffixDraft(), ModelDraft(SlowModel(clock)))
    session = draft.start(50)
    session.propose([FakeSequence([1, 2, 3])], [FakeBudget(2)])
    session.drop([0])
    clock.now += 3600
    session.propose([FakeSequence([1, 2, 3], 1)], [FakeBudget(2)])
    assert draft.odds.gap is None
