"""What programs that serve others need of a generator: jobs that any thread may end, scores of tokens, penalties."""

import threading
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
import torch

from specdec import CancelledError, EngineError, OptionError, SpecGenerator
from specdec.decoding.processors.builtin import OutputPenalty
from specdec.errors import DraftError
from specdec.models.backends.kv_session import KvSession
from tests.engine.test_threads import PATIENCE, Jammed, is_clean
from tests.folders import WIDTH, byte_tokenizer
from tests.matrix import endless
from tests.tiny import tiny

COMMON = endless(24)
DRAFTS: dict[str, Any] = {"none": None, "suffix": "suffix", "early": "early_exit:1"}


def followed(generator: SpecGenerator, prompt: Any, **options: Any) -> tuple[list[int], Any]:
    """The tokens of a job's first row, and its result."""
    follow, tokens = generator.submit(prompt, **{**COMMON, **options}).follow(), []
    while True:
        try:
            deltas = next(follow)
        except StopIteration as end:
            return tokens, end.value
        tokens += [token for one in deltas if one.row == 0 for token in one.token_ids]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("stream", [True, False])
def test_a_cancelled_job_gives_back_what_it_had(draft: str, stream: bool) -> None:
    """The beginnings of its texts, counted and told as cancelled. (They were lost with the error.)"""
    generator = SpecGenerator(tiny("llama", vocab=WIDTH), DRAFTS[draft], tokenizer=byte_tokenizer())
    prompts, common = [[5, 9], [7, 8, 6]], {**COMMON, "max_new_tokens": 40}
    whole = generator.generate(prompts, **common).new_tokens()
    calls: list[int] = []

    def watch(ids: torch.Tensor, scores: Any) -> bool:
        calls.append(1)
        if len(calls) == 12:
            job.cancel()
        return False

    job = generator.submit(prompts, **common, stopping_criteria=[watch])
    assert job.result is None
    with pytest.raises(CancelledError):
        assert all(job.result is None for _ in job.follow(stream=stream))
    out = job.result
    new = out.new_tokens()
    assert new == [row[: len(begun)] for row, begun in zip(whole, new, strict=True)]
    assert 12 <= sum(map(len, new)) == out.stats.num_new_tokens < 80
    assert out.stats.finish_reasons == ("cancelled", "cancelled")
    assert [len(row) for row in out.drafted] == list(map(len, new))
    assert out.texts == [byte_tokenizer().decode(row, skip_special_tokens=True) for row in new]
    assert out._repr_html_()
    assert is_clean(generator)


def test_what_a_job_gives_back_otherwise() -> None:
    """The result of one that ended; of a closed one the texts so far; nothing of a failed one, or of a search.

    Nothing of one that is cancelled before it is followed reaches the engine, and the next call is not disturbed;
    nothing comes of cancelling one that has ended.
    """
    generator = SpecGenerator(tiny("llama"))
    job = generator.submit([[5, 9]], **COMMON, output_scores=True)
    for _ in job.follow():
        pass
    assert len(job.result.scores) == 24
    job.cancel()  # too late
    assert job.call.request.error is None
    closed = generator.submit([[5, 9]], **COMMON)
    follow = closed.follow()
    begun = [*next(follow)[0].token_ids, *next(follow)[0].token_ids]
    follow.close()
    assert closed.result.new_tokens() == [begun]
    seconds = closed.result.stats.seconds
    with pytest.raises(CancelledError, match="left before its end"):
        closed.run()  # it ended with what it had, as if that were all
    assert closed.result.stats.finish_reasons == ("cancelled",)
    assert closed.result.stats.seconds == seconds  # (those of the second try were told)
    early = generator.submit([[5, 9]], **COMMON)
    early.cancel()
    with pytest.raises(CancelledError):
        next(early.follow())
    assert early.result.new_tokens() == [[]]
    search = generator.submit([[5, 9]], **COMMON, num_beams=2)
    search.cancel()
    with pytest.raises(CancelledError):
        next(search.follow())
    assert search.result is None
    failed = generator.submit([[5, 9]], **COMMON, logits_processor=[lambda ids, scores: 1 / 0])
    with pytest.raises(ZeroDivisionError):
        next(failed.follow())
    assert failed.result is None
    assert len(followed(generator, [[5, 9]])[0]) == 24
    assert is_clean(generator)


def test_what_failed_outside_the_engine_has_no_result() -> None:
    """A refusal, a streamer's error: nobody cancelled. (The result was told as cancelled.)"""
    refused = SpecGenerator(tiny("llama"), kv_budget=1).submit([[5, 9]], **COMMON)
    with pytest.raises(OptionError):
        refused.run()
    broken = SpecGenerator(tiny("llama")).submit([[5, 9]], **COMMON, streamer=Jammed(2))
    with pytest.raises(RuntimeError, match="paper"):
        broken.run()
    assert refused.result is broken.result is None


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_whoever_cancels_copies_nothing(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two rounds the canceller's own thread, of a server its event loop, kept the text: up to 256 MiB of keys.

    It does not wait for that of another request either, which the thread that drives copies meanwhile.
    """
    generator, keep = SpecGenerator(tiny("llama"), prefix_cache=True), KvSession.keep_prefix
    jobs = [generator.submit([list(range(5 + i, 30 + i))], **COMMON) for i in range(1 + shared)]
    follows = [job.follow() for job in jobs]
    for follow in follows:
        next(follow)  # now nobody drives, or a thread of its own that rests
    keepers: list[threading.Thread] = []
    begun, cancelled = threading.Event(), threading.Event()

    def kept(*args: Any) -> Any:
        keepers.append(threading.current_thread())
        begun.set()
        assert cancelled.wait(PATIENCE), "the canceller waits"
        return keep(*args)

    def cancel() -> None:
        jobs[0].cancel()
        if shared:
            assert begun.wait(PATIENCE)
            jobs[1].cancel()
        cancelled.set()

    monkeypatch.setattr(KvSession, "keep_prefix", kept)
    canceller = threading.Thread(target=cancel)
    canceller.start()
    assert cancelled.wait(PATIENCE)
    for follow in follows:
        with pytest.raises(CancelledError):
            for _ in follow:
                pass
    canceller.join(PATIENCE)
    assert keepers
    assert canceller not in keepers
    assert is_clean(generator)
    assert len(followed(generator, [[5, 9]])[0]) == 24


def test_a_job_is_followed_once_at_a_time() -> None:
    """The engine got its rows twice, and an error about them ended the first."""
    job = SpecGenerator(tiny("llama")).submit([[5, 9]], **COMMON)
    with closing(job.follow()) as rounds:
        next(rounds)
        with pytest.raises(EngineError, match="is being followed"):
            job.run()
        assert job.result is None
        list(rounds)
    alone = followed(SpecGenerator(tiny("llama")), [[5, 9]])[0]
    assert job.run().new_tokens() == job.result.new_tokens() == [alone]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("sampling", [{}, {"repetition_penalty": 1.3}, {"do_sample": True, "seed": 4}])
def test_log_probabilities(draft: str, sampling: dict[str, Any]) -> None:
    """The likeliest tokens and their log-probabilities are those of the target's own logits."""
    generator = SpecGenerator(tiny("llama"), DRAFTS[draft])
    call = {**COMMON, **sampling}
    out = generator.generate([[5, 9, 12]], output_logits=True, **call)
    follow = generator.submit([[5, 9, 12]], top_logprobs=3, **call).follow()
    steps = [step for deltas in follow for one in deltas for step in one.steps]
    assert [step.token for step in steps] == out.new_tokens()[0]
    for step, logits in zip(steps, out.logits, strict=True):
        own = logits[0].log_softmax(-1)
        assert step.top.tokens == own.topk(3).indices.tolist()
        assert step.top.log_probs == pytest.approx(own.topk(3).values.tolist(), abs=1e-4)
        assert step.log_prob == pytest.approx(float(own[step.token]), abs=1e-4)
        assert step.logits is None


def test_output_penalty() -> None:
    """Tokens of the prompt do not count; others count once for presence, and each time for frequency."""
    ids, logits = torch.tensor([[1, 1, 2, 3, 3]]), torch.zeros(1, 5)
    assert OutputPenalty(2, 0.5, 0.0)(ids, logits).tolist() == [[0, 0, -0.5, -0.5, 0]]
    assert OutputPenalty(2, 0.0, 0.5)(ids, logits).tolist() == [[0, 0, -0.5, -1.0, 0]]
    assert OutputPenalty(5, 1.0, 1.0)(ids, logits) is logits


def test_a_call_without_the_generators_draft() -> None:
    """`assistant_model="none"` decodes plainly, also what takes no draft."""
    generator = SpecGenerator(tiny("llama"), "suffix")
    out = generator.generate([[5, 9, 5, 9]], assistant_model="none", **COMMON)
    assert out.stats.num_draft_tokens == 0
    assert out.sequences.tolist() == generator.generate([[5, 9, 5, 9]], **COMMON).sequences.tolist()
    generator.generate([[5, 9]], assistant_model="none", penalty_alpha=0.5, top_k=3, **COMMON)


class Even:
    """Lets only even tokens through, and knows it beforehand."""

    pure = True

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The logits without odd tokens."""
        logits = logits.clone()
        logits[:, 1::2] = -torch.inf
        return logits

    def allowed(self, text: Sequence[int], tokens: Sequence[int]) -> int:
        """The even ones before the first odd one."""
        return next((i for i, token in enumerate(tokens) if token % 2), len(tokens))


class Free(Even):
    """Lets everything through."""

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def allowed(self, text: Sequence[int], tokens: Sequence[int]) -> int:
        return len(tokens)


@pytest.mark.parametrize("count", [10**9, -3])
def test_more_tokens_than_were_asked_about_may_follow(count: int) -> None:
    """A count beyond the guesses became a billion drafted tokens, one below 0 a tree without a chain."""
    free = Free()
    free.allowed = lambda text, tokens: count  # type: ignore[method-assign, assignment]
    out = SpecGenerator(tiny("llama"), lambda tokens, k: [4, 6, 7][:k]).generate(
        [[5, 9]], logits_processor=[free], **COMMON
    )
    assert out.stats.num_draft_tokens <= 3 * out.stats.num_draft_rounds


def test_what_is_no_count_of_tokens_is_told() -> None:
    free = Free()
    free.allowed = lambda text, tokens: None  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(DraftError, match="`allowed` of a processor must return how many tokens may follow"):
        SpecGenerator(tiny("llama"), lambda tokens, k: [4][:k]).generate([[5, 9]], logits_processor=[free], **COMMON)


@pytest.mark.parametrize("draft", [lambda tokens, k: [4, 6, 7, 8][:k], "suffix", "early_exit:1"])
def test_drafts_are_cut_where_a_processor_says_so(draft: Any) -> None:
    """No forbidden token is verified, and the text is that without a draft. (Only the first processor was asked.)"""
    model = tiny("llama")
    expected = SpecGenerator(model).generate([[5, 9, 5, 9]], logits_processor=[Even()], **COMMON)
    generator = SpecGenerator(model, draft)
    job = generator.submit([[5, 9, 5, 9]], logits_processor=[Free(), Even()], **COMMON)
    seen: list[int] = []
    run = generator.engine.session.run

    def spy(works: Any, **how: Any) -> Any:
        seen.extend(token for work in works for token in work.tree.tokens[work.first + 1 :])
        return run(works, **how)

    generator.engine.session.run = spy  # type: ignore[method-assign]
    tokens = [token for deltas in job.follow() for one in deltas for token in one.token_ids]
    assert tokens == expected.new_tokens()[0]
    assert all(token % 2 == 0 for token in seen)


def test_an_attribute_of_a_processor_is_no_rule_for_drafts() -> None:
    """Only a method `allowed` is one. (A list of that name was called.)"""

    class Plain:
        def __init__(self) -> None:
            self.allowed = [2, 4]

        def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            return logits

    model, how = tiny("llama"), {"logits_processor": [Plain()], **COMMON}
    expected = SpecGenerator(model).generate([[5, 9, 5, 9]], **how).new_tokens()
    assert SpecGenerator(model, tiny("llama", seed=1)).generate([[5, 9, 5, 9]], **how).new_tokens() == expected
