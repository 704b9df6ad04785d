"""Random schedules of requests that join, are cancelled, fail and finish: every text is the same as alone."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from specdec import LanguageModel, SpecGenerator
from specdec.core.drafts import Draft
from specdec.core.sequence import RunningSequence
from specdec.engine.engine import Engine
from specdec.engine.request import Request
from specdec.generator.build_request import Call
from specdec.generator.job import Job
from specdec.proposers import EarlyExitDraft, FunctionDraft, HybridDraft, ModelDraft, QuantizedDraft, SuffixDraft
from tests.matrix import STRATEGIES
from tests.models.exact import num_pending
from tests.oracle import oracle, rows_in_drafts
from tests.test_exact import noisy
from tests.tiny import ENCODER_DECODERS, tiny

VOCAB = 64
CHUNK = 40
LONG = 150
COMMON = [12 + i * i % 17 for i in range(120)]  # how all long prompts begin
MANY = 10_000  # steps that no schedule here needs


def ends_with_a_multiple(ids: torch.Tensor, scores: Any) -> torch.Tensor:
    """A criterion that looks at the last token."""
    return ids[:, -1] % 9 == 0


def odd_after_even(row: int, ids: torch.Tensor) -> list[int]:
    """A prefix function that looks at the last token."""
    return list(range(3 + int(ids[-1]) % 2, VOCAB, 2))


CALLS: dict[str, dict[str, Any]] = {
    **STRATEGIES,
    "scored": {"output_scores": True},
    "traced": {"output_hidden_states": True},
    "penalised": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    "stopped": {"stopping_criteria": [ends_with_a_multiple]},
    "limited": {"prefix_allowed_tokens_fn": odd_after_even},
}
DRAFTS = (
    "none",
    "model",
    "noisy",
    "trees",
    "cost",
    "suffix",
    "early_exit",
    "quantized",
    "hybrid",
    "random",
    "wrong",
    "numbers",
)
ONE_TEXT = ("greedy", "coupled", "scored", "penalised", "limited")


@dataclass(frozen=True)
class Asked:
    strategy: str
    draft: str
    length: int
    rows: int
    new: int
    chunked: bool
    seed: int

    def options(self, name: str) -> dict[str, Any]:
        """The arguments of the call, without the draft."""
        eos = [7, 11, 23, 40] if self.seed % 2 else []
        common = {"max_new_tokens": self.new, "eos_token_id": eos, "pad_token_id": 0, **CALLS[self.strategy]}
        if self.chunked:
            common["prefill_chunk_size"] = CHUNK
        if self.draft in ("trees", "cost"):
            common["schedule"] = "cost" if self.draft == "cost" else "constant"
        if self.draft == "trees":
            common["num_assistant_branches"] = max(2, CALLS[self.strategy].get("num_beams", 1))
        return common | prompts(name, self)


def prompts(name: str, asked: Asked) -> dict[str, Any]:
    """Ragged ids, or what an encoder reads and, of some requests, the first ids of the text."""
    numbers = random.Random(asked.seed)

    def ids(length: int) -> list[int]:
        own = [numbers.randrange(12, 30) for _ in range(length)]
        return own if length < LONG else COMMON + own[len(COMMON) :]

    if name not in ENCODER_DECODERS:
        return {"prompt": [ids(asked.length + 2 * row) for row in range(asked.rows)]}
    given: dict[str, Any] = {}
    if asked.length > CHUNK:
        given["decoder_input_ids"] = torch.tensor([[1, *ids(asked.length)] for _ in range(asked.rows)])
    if name == "whisper":
        features = torch.Generator().manual_seed(asked.seed)
        return {**given, "input_features": torch.randn(asked.rows, 8, 40, generator=features)}
    return {**given, "prompt": [ids(5 + asked.length + 2 * row) for row in range(asked.rows)]}


@cache
def models(name: str) -> tuple[LanguageModel, LanguageModel, LanguageModel]:
    """A target, a draft that knows nothing, and one that is often right."""
    draft = noisy(tiny(name, vocab=VOCAB), 0.01)
    return LanguageModel(tiny(name, vocab=VOCAB)), LanguageModel(tiny(name, vocab=VOCAB, seed=1)), LanguageModel(draft)


def draft(name: str, kind: str) -> Draft | None:
    target, other, near = models(name)
    match kind:
        case "none":
            return None
        case "model":
            return ModelDraft(other)
        case "noisy" | "trees" | "cost":
            return ModelDraft(near)
        case "suffix":
            return SuffixDraft()
        case "early_exit":
            return EarlyExitDraft(target, 1)
        case "quantized":
            return QuantizedDraft(target) if target.capability.cache_kind == "kv" else None
        case "hybrid":
            return HybridDraft(SuffixDraft(), ModelDraft(near))
        case "numbers":
            return FunctionDraft(lambda tokens, k: [(tokens[-1] + i) % VOCAB for i in range(k)])
        case _:
            return FunctionDraft(oracle(kind, [], VOCAB))


def possible(name: str, asked: Asked) -> Asked:
    """The request with what does not go together left out."""
    if asked.strategy in ("rejection", "block") and asked.draft in ("hybrid", "cost"):
        asked = replace(asked, draft="noisy")  # these go by the clock
    if asked.strategy == "contrastive":
        asked = replace(asked, draft="none")
    if asked.strategy == "guided" and name in ENCODER_DECODERS:
        asked = replace(asked, strategy="greedy")
    return asked


class Recorded:
    """Stands in for the driver: a request that has been stepped already."""

    def start(self, request: Request, notify: Callable[[], None], **how: bool) -> None:
        """Tells of its end."""
        notify()

    def resume(self, request: Request) -> bool:
        """It has ended."""
        return False

    def cancel(self, request: Request, error: Exception) -> None: ...


def result(call: Call) -> Any:
    """What `generate` would return for a request that is done."""
    job = Job(call, Recorded())  # type: ignore[arg-type]
    for _ in job.follow(stream=False):
        pass
    return job.result


@cache
def alone(name: str, asked: Asked) -> Any:
    """The same request on a generator of its own."""
    generator = SpecGenerator(models(name)[0], draft(name, asked.draft))
    return generator.generate(**asked.options(name))


def assert_same(mine: Any, other: Any) -> None:
    """The same texts, and the same numbers up to rounding."""
    assert mine.sequences.tolist() == other.sequences.tolist()
    assert mine.stats.finish_reasons == other.stats.finish_reasons
    if other.sequences_scores is not None:
        assert torch.allclose(mine.sequences_scores, other.sequences_scores, atol=1e-3)
    for kind in ("scores", "hidden_states", "decoder_hidden_states"):
        for one, two in zip(leaves(getattr(mine, kind)), leaves(getattr(other, kind)), strict=True):
            assert torch.allclose(one, two, atol=1e-3), kind


def leaves(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of nested tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for part in value or ():
            yield from leaves(part)


class Trouble(RuntimeError):
    """What goes wrong in one request."""


def failing(kind: str, error: BaseException, at: int) -> dict[str, Any]:
    """Arguments of a call in which something raises `error` when it is called for the `at`-th time."""
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise error

    def processor(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        count()
        return logits

    def criterion(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        count()
        return torch.zeros(len(ids), dtype=torch.bool)

    def prefix(row: int, ids: torch.Tensor) -> list[int]:
        count()
        return list(range(VOCAB))

    def draft(tokens: list[int], k: int) -> list[int]:
        count()
        return [5] * k

    return {
        "processor": {"logits_processor": [processor]},
        "criterion": {"stopping_criteria": [criterion]},
        "prefix": {"prefix_allowed_tokens_fn": prefix},
        "draft": {"assistant_model": draft},
    }[kind]


def check_keys_and_values(engine: Engine) -> None:
    """What the target holds of the running rows gives the logits of a session that reads everything anew.

    A row whose nodes have all run, as after a check without a round between, has none to compare.
    """
    rows = [row for running in engine.running for row in running.batch_seqs if row.cache_row is not None]
    rows = [row for row in rows if num_pending(engine.session, row.cache_row) < max(len(row.tree), 1)]
    if not rows:
        return
    found = logits(
        engine.session, [row.cache_row for row in rows], rows, [engine.session.length(row.cache_row) for row in rows]
    )
    fresh = engine.model.session()
    slots = [fresh.add(row.encoding) for row in rows]
    again = logits(fresh, slots, rows, [0] * len(rows))
    for row, one, two in zip(rows, found, again, strict=True):
        count = max(len(row.tree), 1)
        assert torch.allclose(one[-1], two[-1], atol=1e-3), (row.tokens, count)


def logits(session: Any, slots: list[Any], rows: list[RunningSequence], held: list[int]) -> list[torch.Tensor]:
    """Of every row, `[nodes, vocab]` at the nodes that the session does not hold."""
    works = []
    for row, length, slot in zip(rows, held, slots, strict=True):
        work = row.works([length] * len(row.batch_seqs))[0]
        cached = num_pending(session, slot)
        count = len(row.tree) - cached or 1
        works.append(replace(work, row=slot, num_cached=cached, num_logits=count))
    with torch.no_grad():
        return [out.logits for out in session.run(works)]


class Requests(RuleBasedStateMachine):
    """One engine, and requests that come and go in it."""

    name: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.generator = SpecGenerator(models(self.name)[0])
        self.engine: Engine = self.generator._driver.engine
        self.drafts = {kind: draft(self.name, kind) for kind in DRAFTS}
        self.live: list[tuple[Asked, Call, Trouble | None]] = []

    def submit(self, asked: Asked, error: Trouble | None = None, **more: Any) -> None:
        given = {"assistant_model": self.drafts[asked.draft], **asked.options(self.name), **more}
        prompt = given.pop("prompt", None)
        call = self.generator._prepare(prompt, None, given)
        self.engine.submit(call.request)
        self.live.append((asked, call, error))

    @rule(
        strategy=st.sampled_from(sorted(CALLS)), draft=st.sampled_from(DRAFTS),
        length=st.sampled_from([1, 3, 9, LONG, LONG]), rows=st.sampled_from([1, 1, 2]), new=st.sampled_from([1, 4, 9]),
        chunked=st.booleans(), seed=st.integers(0, 3),
    )  # fmt: skip
    def joins(self, **asked: Any) -> None:
        """A request of any kind."""
        self.submit(possible(self.name, Asked(**asked)))

    @rule(
        kind=st.sampled_from(["processor", "criterion", "prefix", "draft"]),
        strategy=st.sampled_from(ONE_TEXT),
        draft=st.sampled_from(["none", "model", "noisy", "suffix"]),
        at=st.integers(1, 6),
        rows=st.sampled_from([1, 2]),
    )
    def joins_and_fails(self, kind: str, strategy: str, draft: str, at: int, rows: int) -> None:
        """A request with something in it that raises."""
        if strategy == "limited" and kind == "prefix":
            strategy = "greedy"
        error = Trouble(f"{kind} {at}")
        asked = Asked(strategy, "none" if kind == "draft" else draft, 3, rows, 9, False, 0)
        self.submit(asked, error, **failing(kind, error, at))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 20))
    def is_cancelled(self, which: int) -> None:
        """Any of the requests, waiting, half read or running."""
        _, call, _ = self.live.pop(which % len(self.live))
        self.engine.cancel(call.request)
        assert call.request.done
        users = [other for _, other, _ in self.live if other.request.pacing is call.request.pacing]
        assert call.request.pacing.users == {other.request for other in users}
        assert all(one.cache_row is None for row in call.seqs for one in row.batch_seqs)

    @precondition(lambda self: self.live)
    @rule(rounds=st.integers(1, 4))
    def goes_on(self, rounds: int) -> None:
        """Some rounds for all of them."""
        for _ in range(rounds):
            self.step()

    @precondition(lambda self: self.engine.running)
    @rule()
    def holds_what_it_should(self) -> None:
        """Keys and values are those of the texts."""
        check_keys_and_values(self.engine)

    @invariant()
    def nothing_is_left_behind(self) -> None:
        """Only rows of live requests are anywhere."""
        rows = [row for _, call, _ in self.live for row in call.seqs]
        keys = {row.id for row in rows}
        engine = self.engine
        assert {*engine._requests} <= keys
        assert {row.id for row in [*engine.scheduler.prefilling, *engine.running]} == {*engine._requests}
        slots = [one.cache_row for row in rows for one in row.batch_seqs if one.cache_row is not None]
        assert len(slots) == len({*slots}) == len(engine.session.rows)  # type: ignore[attr-defined]
        for draft in engine.drafts.open.values():
            for part in (
                draft.proposer,
                getattr(draft.proposer, "_model", None),
                getattr(draft.proposer, "_text", None),
            ):
                for held in ("_cached", "_readings", "_seqs"):
                    assert {*getattr(part, held, ())} <= keys, (draft, held)

    def step(self) -> None:
        self.engine.step()
        for one in [one for one in self.live if one[1].request.done]:
            self.live = [other for other in self.live if other is not one]
            self.finished(*one)

    def finished(self, asked: Asked, call: Call, error: Trouble | None) -> None:
        """What came of a request is what comes of it alone; only what raised ended early, with its own error."""
        if error is not None and call.request.error is not None:
            assert call.request.error is error
            with pytest.raises(Trouble):
                result(call)
        else:
            assert_same(result(call), alone(self.name, asked))
        assert all(one.cache_row is None for row in call.seqs for one in row.batch_seqs)

    def teardown(self) -> None:
        """All come to an end, and leave nothing."""
        for _ in range(MANY):
            if self.engine.idle:
                break
            self.step()
        engine = self.engine
        assert not any((self.live, engine.scheduler.prefilling, engine.running, engine.waiting))
        assert not any((engine._requests, rows_in_drafts(engine)))
        assert not engine.session.rows  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "examples", "steps"),
    [
        *(("llama", 6, 20), ("gemma2", 3, 20), ("mamba", 1, 20), ("t5", 3, 20)),
        *(
            pytest.param(name, 30 if name == "llama" else 8, 40, marks=(pytest.mark.slow, pytest.mark.timeout(3600)))
            for name in ("llama", "gemma2", "bloom", "mamba", "qwen3_next", "t5", "whisper")
        ),
    ],
)
def test_schedules(name: str, examples: int, steps: int) -> None:
    how = settings(
        max_examples=examples, stateful_step_count=steps, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],
    )  # fmt: skip
    run_state_machine_as_test(type(f"Requests_{name}", (Requests,), {"name": name}), settings=how)
