"""The loop itself: the store after every round, rows that leave, and calls that fail half-way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec import DraftError, LanguageModel, OptionError, SpecGenerator
from specdec.core.draft_schedules import Constant
from specdec.core.drafts import Draft
from specdec.core.outcome import Round, SequenceRound
from specdec.core.tree import Tree
from specdec.core.work import Work
from specdec.engine import engine as loop
from specdec.engine.engine import Engine
from specdec.models import Session
from specdec.models.backends.kv_session import KvSession
from specdec.proposers import ModelDraft
from tests.engine.test_requests import finish, submit
from tests.matrix import endless, slow
from tests.oracle import sessions_of_drafts, shapes
from tests.proposers.fakes import OwnProposer
from tests.tiny import tiny, tiny_inputs

COMMON = endless(16)
PROMPTS = [[5, 9, 12], [6, 6, 9], [5, 17]]


def check_held(language: LanguageModel, session: Session, slot: int, text: list[int], encoding: Any) -> None:
    """What a session holds of a row is what a new one makes of the text."""
    length = session.length(slot)
    assert length <= len(text)
    if not length:
        return
    fresh = language.session()
    row = fresh.add(encoding)
    fresh.run([Work.text(row, text[:length])])
    fresh.commit([row], [list(range(length))])
    if isinstance(session, KvSession) and isinstance(fresh, KvSession):
        kept, expected = session.keep_prefix(slot, length), fresh.keep_prefix(row, length)
        for ours, theirs in zip(kept, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    copy = session.fork(slot, length)
    scores = [s.run([Work.text(r, [7, 8], 2)])[0] for s, r in ((session, copy), (fresh, row))]
    torch.testing.assert_close(scores[0].logits, scores[1].logits, atol=1e-3, rtol=1e-3)
    session.remove([copy])


WAYS = [{}, {"num_assistant_branches": 2}, {"num_beams": 3}, {"guidance_scale": 2.0}, {"num_samples": 3}]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        (name, how) if name == "llama" or number == 0 or (number == 1 and name in ("mamba", "t5")) else slow(name, how)
        for name in ("llama", "gpt2", "gemma2", "bloom", "mamba", "t5", "whisper")
        for number, how in enumerate(WAYS)
    ],
    ids=str,
)
def test_store_equals_a_recomputed_one_after_every_step(
    name: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the target and the draft hold of every row is what stores filled from scratch hold."""
    target, draft = LanguageModel(tiny(name)), LanguageModel(tiny(name, seed=1))
    checked, step = 0, Engine.step

    def stepping(self: Engine) -> None:
        nonlocal checked
        step(self)
        inner: dict[int, Any] = {}
        for drafting in self.drafts.open.values():
            drafting.proposer._settle([*self.scheduler.prefilling, *self.running])  # type: ignore[attr-defined]
            inner |= drafting.proposer._cached  # type: ignore[attr-defined]
        for row in [*self.scheduler.prefilling, *self.running]:
            for one in row.batch_seqs:
                if one.cache_row is not None:
                    check_held(target, self.session, one.cache_row, one.tokens, one.encoding)
            if row.id in inner:
                [session] = sessions_of_drafts(self)
                held, inputs = inner[row.id], row.task.inputs
                assert session.length(held.cache_row) == held.num_text
                read = None if inputs is None else draft.encode(inputs).select([row.task.encoder_row])
                check_held(draft, session, held.cache_row, row.tokens, read)
                checked += 1

    monkeypatch.setattr(Engine, "step", stepping)
    given: dict[str, Any] = {"prompt": [[5, 9, 12, 7, 30, 5, 9, 12, 8, 8, 4, 3], [6, 6, 9], [5, 17, 21, 40, 11, 12]]}
    if target.is_encoder_decoder:
        if "guidance_scale" in how:
            pytest.skip("takes no guidance")
        given = tiny_inputs(name, rows=2)
    if "num_samples" in how:
        how = {**how, "do_sample": True, "seed": 1}
    SpecGenerator(target, draft).generate(**given, **{**COMMON, "max_new_tokens": 9}, **how, prefill_chunk_size=8)
    assert checked


def test_greedy_leaves_the_global_generator_alone() -> None:
    """Only a call that samples draws its seed there. (Every call did, and shifted the caller's own numbers.)"""
    generator = SpecGenerator(tiny("llama"), "suffix")
    torch.manual_seed(0)
    before = torch.get_rng_state()
    generator.generate([[5, 9]], **COMMON)
    assert torch.equal(torch.get_rng_state(), before)
    first = generator.generate([[5, 9]], **COMMON, do_sample=True).sequences.tolist()
    assert not torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(0)
    assert generator.generate([[5, 9]], **COMMON, do_sample=True).sequences.tolist() == first


@pytest.mark.parametrize("how", [{}, {"do_sample": True, "seed": 1}, {"num_beams": 2}, {"num_samples": 2, "seed": 1}])
def test_finished_requests_leave_the_batch_at_once(how: dict[str, Any]) -> None:
    """From the pass after its end on, a request takes part in none."""
    how = {"do_sample": True, **how} if "num_samples" in how else how
    model, prompts = tiny("llama"), [[5, 9, 12], [6, 6, 9]]
    lengths = [4, 20]

    def ends(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        found = [len(row) >= 3 + lengths[prompts.index(row[:3].tolist())] for row in ids]
        return torch.tensor(found)

    with shapes(model) as passes:
        out = SpecGenerator(model).generate(prompts, **endless(30), stopping_criteria=[ends], **how)
    copies = how.get("num_samples", 1)
    assert list(map(len, out.new_tokens())) == lengths
    assert [rows for rows, _ in passes][-20:] == [2 * copies] * 4 + [copies] * 16


def noting(heard: list[SequenceRound]) -> Constant:
    """A schedule that is told what became of the first row in every round."""

    class Noting(Constant):
        def after(self, round: Round) -> Noting:
            heard.append(round.seqs[0])
            return self

    return Noting()


class Unsure(OwnProposer):
    """Guesses, and keeps nothing."""

    def propose(self, rows: Any, budgets: Any) -> list[Tree]:
        return [Tree([], [], source="unsure") for _ in rows]


@pytest.mark.parametrize("draft", [Unsure(), ModelDraft(LanguageModel(tiny("llama", vocab=32)))])
def test_a_prompt_is_read_in_once_and_not_for_ever(draft: Draft) -> None:
    """Rounds in which a draft kept no guess, or cannot read the text, are no prompts being read.

    (They counted as prefill for ever, and nobody learned what they cost.)
    """
    heard: list[SequenceRound] = []
    SpecGenerator(tiny("llama"), draft, schedule=noting(heard)).generate([[5, 40, 9]], **COMMON)
    assert [row.prefill for row in heard] == [True] + [False] * (len(heard) - 1)


def test_a_draft_that_waited_reads_what_it_missed() -> None:
    """After more than 16 tokens without a draft, its time is not that of a draft pass alone."""

    heard: list[SequenceRound] = []

    class Waits(type(noting(heard))):  # type: ignore[misc]
        def budgets(self, seqs: Any) -> Any:
            return Constant.budgets(self if len(seqs[0].tokens) not in range(5, 30) else Constant(0), seqs)

    generator = SpecGenerator(tiny("llama"), ModelDraft(LanguageModel(tiny("llama"))), schedule=Waits(1))
    generator.generate([[5, 9, 12]], **endless(40))
    reads = [at for at, row in enumerate(heard) if row.prefill]
    assert len(reads) == 2  # the target's prompt, and the gap: reading four tokens along is no reading of a prompt
    assert [row.read for row in heard[:3]] == [0, 3, 0]
    assert heard[reads[-1] - 1].drafted == 0 < heard[reads[-1]].drafted
    assert not any(row.prefill for row in heard[reads[-1] + 1 :])


def test_nodes_of_guided_texts_count_once() -> None:
    """As they were drafted once: a pass holds a draft's nodes and the end of the text."""
    generator = SpecGenerator(tiny("llama"), "suffix", schedule=Constant(3))
    request = submit(generator, [[5, 9, 12, 5, 9, 12, 5, 9]], guidance_scale=2.0).request
    finish(generator.engine)
    assert any(round.seqs[0].drafted for round in request.rounds)
    for round in list(request.rounds)[1:]:
        assert round.nodes == 1 + round.seqs[0].drafted


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_first_token_waits_for_the_draft_of_an_offloaded_target_alone(offloaded: bool) -> None:
    """Only there, a draft model reads the prompt before the pass that ends it, and proposes."""
    heard: list[SequenceRound] = []
    generator = SpecGenerator(tiny("llama"), ModelDraft(LanguageModel(tiny("llama"))), schedule=noting(heard))
    generator.target.is_offloaded = offloaded
    generator.generate([[5, 9, 12]], **COMMON)
    assert [row.drafted > 0 for row in heard[:2]] == [offloaded, True]


@pytest.mark.parametrize(
    ("proposed", "words"),
    [
        (lambda n: [Tree.chain([1] * 50)] * n, "'Fixed' proposed 50 tokens in a row, but the text may only grow by"),
        (lambda n: [Tree.chain([1] * 9, source="x")] * n, "'x' proposed 9 tokens in a row, but its budget allows 3"),
        (lambda n: [Tree.chain([1, 2, 3], [0.5])] * n, "3 tokens, 3 parents and 1 confidences"),
        (lambda n: [Tree.chain([1], [math.nan])] * n, r"the confidences \[nan\]: give each token one from 0 to 1"),
        (lambda n: [Tree([1, 2], [-1])] * n, "2 tokens, 1 parents and None confidences"),
        (lambda n: [Tree.chain([1], q=[torch.ones(3)])] * n, r"`q` of the shapes \[\[3\]\]: give each token"),
        (lambda n: [Tree.chain([1, 2], q=torch.ones(1, 64))] * n, r"2 tokens with `q` of the shapes \[\[64\]\]"),
        (lambda n: [Tree([1, 2], [-1, 1])] * n, r"parents \[-1, 1\]"),
        (lambda n: [Tree([1], [-2])] * n, r"-1 to -1 are the leaves"),
        (lambda n: [Tree.chain([torch.tensor(1)])] * n, "propose whole numbers from 0 to"),
        (lambda n: [Tree.chain([10**6])] * n, "ids that the target lacks"),
        (lambda n: [Tree(torch.tensor([1, 2]), [-1, 0])] * n, "`tokens` is a Tensor: make it a list"),
        (lambda n: [Tree.chain([1, 2], torch.tensor([0.9, 0.8]))] * n, "`confidence` is a Tensor: make it a list"),
        (lambda n: [[1, 2]] * n, r"`Fixed.propose` must return a list of 1 Trees, one per sequence, got \[list\]"),
        (lambda n: [], r"a list of 1 Trees, one per sequence, got \[\]"),
        (lambda n: None, "got NoneType"),
    ],
)
def test_a_wrong_proposal_is_refused(proposed: Callable[[int], Any], words: str) -> None:
    """It names the draft, or its proposer, and what is wrong. (A longer chain than its budget's was measured as the
    budget's; a short confidence crashed once a guess was right; the others were bare errors.)
    """

    class Fixed(OwnProposer):
        def propose(self, rows: Any, budgets: Any) -> Any:
            return proposed(len(rows))

    with pytest.raises(DraftError, match=words):
        SpecGenerator(tiny("llama"), Fixed(), schedule=Constant(3)).generate([[5, 9]], **COMMON)


@pytest.mark.parametrize("budgets", [lambda seqs: [5] * len(seqs), lambda seqs: [], lambda seqs: None])
def test_a_schedule_without_plans_ends_its_own_request_alone(budgets: Callable[[Any], Any]) -> None:
    class Odd(Constant):
        def budgets(self, seqs: Any) -> Any:
            return budgets(seqs)

    generator = SpecGenerator(tiny("llama"), "suffix")
    sound, odd = submit(generator, [[5, 9]]), submit(generator, [[6, 7]], schedule=Odd())
    finish(generator.engine)
    assert sound.request.error is None
    assert isinstance(odd.request.error, OptionError)


def test_a_draft_must_start_a_session() -> None:
    """What is missing is named with the way out, before any pass."""

    class Odd(Draft):
        def start(self, vocab_size: int) -> Any:
            return object()

    with pytest.raises(DraftError, match="Proposer"):
        SpecGenerator(tiny("llama"), Odd()).generate([[5, 9]], **COMMON)


def test_each_phase_has_its_own_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting, the pass and the strategy's steps are told apart, and the whole round holds what comes after them."""
    generator = SpecGenerator(tiny("llama"))
    request = submit(generator, [[5, 9, 12]]).request
    moments = iter([0, 1, 3, 7, 15, 16])  # the last is that of the first token
    monkeypatch.setattr(loop, "perf_counter", lambda: next(moments))
    generator.engine.step()
    [found] = request.rounds
    assert (found.draft_seconds, found.verify_seconds, found.select_seconds, found.seconds) == (1, 2, 4, 15)
