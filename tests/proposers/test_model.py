"""The model draft: what it proposes, what it feeds, and that its cache always is the text."""

import random

import pytest
import torch

from specdec.proposers import ModelDraft
from tests.proposers.fakes import FakeBudget, FakeEncoding, FakeModel, FakeSequence, Greedy, follow, one, task


def test_proposes_the_models_own_continuation() -> None:
    """Greedy guesses are what the draft model would have said, with its confidence, one pass per guess."""
    model, row = FakeModel(), FakeSequence([1, 2, 3])
    [tree] = ModelDraft(model).start(50).propose([row], [FakeBudget(4)])
    assert tree.tokens == model.greedy(row.tokens, 4)
    assert tree.is_chain
    assert tree.q is None
    assert tree.source == "model"
    assert model.passes == 4
    assert tree.confidence[0] == pytest.approx(float(model.logits(row.tokens).softmax(-1).max()))


@pytest.mark.parametrize("seed", range(5))
def test_catching_up_equals_a_fresh_start(seed: int) -> None:
    """After any mixture of full, partial and no acceptance, idle rounds, silence and rows that left, all is as new."""
    rng = random.Random(seed)
    model = FakeModel()
    session = ModelDraft(model).start(50)
    rows = [FakeSequence([rng.randrange(50) for _ in range(rng.randint(1, 6))], key) for key in range(4)]
    for turn in range(25):
        budgets = [FakeBudget(rng.choice([0, 1, 3, 6])) for _ in rows]
        trees = session.propose(rows, budgets)
        for row, budget, tree in zip(rows, budgets, trees, strict=True):
            assert tree.tokens == model.greedy(row.tokens, budget.limit)
            new = [rng.randrange(50) for _ in range(rng.randint(0, 2))]
            if rng.random() < 0.2:
                row.tokens += new
            else:
                follow(session, row, tree.tokens, rng.randint(0, len(tree)), *new)
        if len(rows) > 1 and rng.random() < 0.1:
            session.drop([rows.pop(rng.randrange(len(rows))).id])
        if rng.random() < 0.1:
            rows.append(FakeSequence([rng.randrange(50)], 10 + turn))


def test_full_acceptance_costs_no_extra_pass() -> None:
    """The last guess and the bonus token are fed together, in the pass that yields the next first guess."""
    model, row = FakeModel(), FakeSequence([1])
    session = ModelDraft(model).start(50)
    for round_ in range(1, 4):
        follow(session, row, one(session, row, 3), 3, 7)
        assert model.passes == 3 * round_
    assert sorted(map(tuple, model.fed)) == 7 * [(1,)] + 2 * [(2,)]


def test_looks_only_at_new_text() -> None:
    """Comparing the cache with the text must not grow with the text: old tokens are never read again."""

    class Guarded(list):  # type: ignore[type-arg]
        def __getitem__(self, where: object) -> object:
            if isinstance(where, int):
                assert where < 0 or where >= floor
            elif isinstance(where, slice):
                assert (where.start or 0) >= floor
            return super().__getitem__(where)  # type: ignore[call-overload]

    floor = 0
    session = ModelDraft(FakeModel(200)).start(200)
    row = FakeSequence(Guarded(range(100)))
    follow(session, row, one(session, row, 3), 2, 7)
    floor = 60
    assert len(one(session, row, 3)) == 3


def test_text_that_was_written_anew_is_read_again() -> None:
    """A bridge re-encodes the last tokens; what lies before is not read a second time."""
    model, row = FakeModel(), FakeSequence(list(range(40)))
    session = ModelDraft(model).start(50)
    follow(session, row, one(session, row, 3), 1)
    row.tokens = [*range(35), 7, 8, 9, 10, 11, 12, 13]
    assert one(session, row, 3) == model.greedy(row.tokens, 3)
    assert model.fed == [[40], [1], [1], [7], [1], [1]]


def test_no_pass_without_a_plan() -> None:
    """Limits of 0, the last token to come and a budget that does not go on cost nothing; the rows catch up later."""
    model, row = FakeModel(), FakeSequence([1, 2])
    session = ModelDraft(model).start(50)
    assert not session.propose([row], [FakeBudget(0)])[0].tokens
    row.remaining = 1
    assert not session.propose([row], [FakeBudget(5)])[0].tokens
    row.remaining = 3
    assert model.passes == 0
    assert one(session, row, 5) == model.greedy(row.tokens, 2)


def test_asks_before_every_pass_and_may_drop_the_last_guess() -> None:
    """`gain` is asked with the confidence so far; `keep` cuts a node that was drawn, but never under rejection."""
    model, row = FakeModel(), FakeSequence([1, 2])
    budget = FakeBudget(4, doubt=2.0)
    [tree] = ModelDraft(model).start(50).propose([row], [budget])
    assert len(tree) == 1
    assert budget.asked == [[], tree.confidence]
    [tree] = ModelDraft(model).start(50).propose([row], [FakeBudget(4, drop=2.0)])
    assert not tree.tokens
    drawn = FakeSequence([1, 2], task=task(Greedy(needs_q=True)))
    [tree] = ModelDraft(model).start(50).propose([drawn], [FakeBudget(4, drop=2.0)])
    assert len(tree) == 4


@pytest.mark.parametrize("target_vocab", [40, 50, 64])
def test_padded_vocabularies(target_vocab: int) -> None:
    """The sampler sees logits at the target's width, and no guess lies outside either vocabulary."""
    sampler, model = Greedy(needs_q=True), FakeModel(50)
    row = FakeSequence([1, 2], task=task(sampler))
    [tree] = ModelDraft(model).start(target_vocab).propose([row], [FakeBudget(8)])
    assert sampler.widths == {target_vocab}
    assert tree.q.shape == (8, target_vocab)
    assert max(tree.tokens) < min(target_vocab, 50)


def test_a_forced_token_the_draft_cannot_read_ends_its_chain() -> None:
    """A processor may force a token beyond the draft's vocabulary: it is proposed, and nothing after it."""

    class Forced(Greedy):
        def pick(self, row, guesses, logits, *, confident=True):  # type: ignore[no-untyped-def]
            return 55, 1.0, None

    session = ModelDraft(FakeModel(50)).start(60)
    assert one(session, FakeSequence([1, 2], task=task(Forced()))) == [55]


def test_nothing_is_guessed_after_the_end_of_the_text() -> None:
    """A chain ends with the token that ends the text, and no draft pass follows it."""
    model = FakeModel()
    whole = model.greedy([1, 2, 3], 6)
    end = whole.index(whole[3])
    row = FakeSequence([1, 2, 3], task=task(ends=frozenset({whole[3]})))
    assert one(ModelDraft(model).start(50), row, 6) == whole[: end + 1]
    assert model.passes == end + 1


def test_stops_at_the_drafts_last_position() -> None:
    """A draft with fewer positions than the target drafts up to them and then falls silent."""
    model, row = FakeModel(max_positions=8), FakeSequence([1, 2, 3, 4, 5, 6])
    session = ModelDraft(model).start(50)
    follow(session, row, one(session, row, 9), 9)
    assert len(row.tokens) == 9
    assert one(session, row) == []


def test_a_failure_leaves_the_session_usable() -> None:
    """An exception in a pass or in the sampler does not corrupt the next proposal."""
    model = FakeModel()

    class Failing(Greedy):
        fails = False

        def pick(self, row, guesses, logits, *, confident=True):  # type: ignore[no-untyped-def]
            if self.fails and guesses:
                raise KeyError("no")
            return super().pick(row, guesses, logits)

    sampler = Failing()
    session, row = ModelDraft(model).start(50), FakeSequence([1, 2, 3], task=task(sampler))
    for fail_in in (1, 2, 3):
        model.fail_in = fail_in
        with pytest.raises(ZeroDivisionError):
            one(session, row)
        follow(session, row, one(session, row), 2)
    sampler.fails = True
    with pytest.raises(KeyError):
        one(session, row)
    sampler.fails = False
    row.tokens += [9]
    assert one(session, row) == model.greedy(row.tokens, 5)


def test_release_frees_the_cache_and_readmits() -> None:
    """Released rows leave the session; an unknown key is nothing, and a key that comes back starts anew."""
    model = FakeModel()
    session = ModelDraft(model).start(50)
    rows = [FakeSequence([k + 1], k) for k in range(3)]
    session.propose(rows, [FakeBudget(2)] * 3)
    session.drop([1, 99])
    assert len(model.sessions[0].held) == 2
    session.drop([0, 2])
    again = FakeSequence([8, 9], 0)
    assert one(session, again, 2) == model.greedy([8, 9], 2)


def test_encoder_decoder_reads_its_own_inputs_once() -> None:
    """Without a shared encoding the draft encodes once, and each row keeps its own part, however rows come and go."""
    model = FakeModel(is_encoder_decoder=True)
    inputs = {"input_ids": torch.tensor([[5, 6], [7, 8], [1, 1]])}
    session = ModelDraft(model).start(50)
    rows = [FakeSequence([0], k, task=task(inputs=inputs, encoder_row=k)) for k in range(3)]
    session.propose(rows, [FakeBudget(0), FakeBudget(2), FakeBudget(0)])
    session.drop([1])
    session.propose(rows[:1], [FakeBudget(2)])
    late = FakeSequence([0], 3, task=task(inputs={"input_ids": torch.tensor([[20, 3]])}))
    trees = session.propose([rows[0], rows[2], late], [FakeBudget(2)] * 3)
    assert [tree.tokens for tree in trees] == [model.greedy([0], 2, value) for value in (11, 2, 23)]
    assert model.encoded in (2, 3)  # again where nobody was there to keep it


def test_encoder_decoder_takes_a_shared_encoding_or_needs_inputs() -> None:
    """A shared encoding is used as it is; without one, the draft says that it reads inputs of its own."""
    model = FakeModel(is_encoder_decoder=True)
    session = ModelDraft(model, shared_encoder=True).start(50)
    assert one(session, FakeSequence([0], encoding=FakeEncoding([3])), 2) == model.greedy([0], 2, 3)
    assert model.encoded == 0
    assert [ModelDraft(model, shared_encoder=shared).needs_encoder_inputs for shared in (True, False)] == [False, True]
