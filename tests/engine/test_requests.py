"""Requests that run together: none waits for, computes, encodes or ends anything of another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec import CancelledError, SpecGenerator
from specdec.core.drafts import Draft, Proposer
from specdec.core.tree import Tree
from specdec.engine.engine import Engine
from specdec.generator.build_request import Call
from specdec.models.backends.kv_session import KvSession
from tests.engine.test_requests_stateful import Trouble, result
from tests.matrix import endless
from tests.oracle import shapes
from tests.tiny import tiny

COMMON = endless(24)
LONG = [[5 + (7 * i) % 40 for i in range(150)]]


def alone(model: Any, prompt: list[list[int]]) -> list[int]:
    """The new tokens of a generator that keeps nothing."""
    out = SpecGenerator(model, prefix_cache=False).generate(prompt, **COMMON)
    return out.sequences[0, len(prompt[0]) :].tolist()


def submit(generator: SpecGenerator, prompt: Any, **options: Any) -> Call:
    """A request that waits in the generator's engine."""
    call = generator._prepare(prompt, None, {**COMMON, **options})
    generator.engine.submit(call.request)
    return call


def finish(engine: Engine) -> None:
    """Steps until there is nothing to do."""
    for _ in range(1000):
        if engine.idle:
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


def new_tokens(call: Call) -> int:
    """How many tokens the first row has so far."""
    return len(call.seqs[0].texts[0])


def test_rounds_of_a_request_tell_who_shared_them() -> None:
    """A shared round is no evidence against a call's draft. (Each was charged as if it were the call's alone.)"""
    generator = SpecGenerator(tiny("llama"), "suffix")
    calls = [submit(generator, [[5, 9, 12]], max_new_tokens=9), submit(generator, [[6, 9]], max_new_tokens=30)]
    finish(generator.engine)
    ids = [{seq.id for seq in call.seqs} for call in calls]
    assert all({seq.id for seq in round.seqs} == ids[0] for round in calls[0].request.rounds)
    assert all({seq.id for seq in round.others} == ids[1] for round in calls[0].request.rounds)
    alone = [not round.others for round in calls[1].request.rounds]
    assert alone == sorted(alone)
    assert alone[-1]


@pytest.mark.parametrize("draft", [None, "suffix"])
def test_a_prompt_is_read_between_the_rounds_of_running_rows(draft: Any) -> None:
    """Every step has one pass over a chunk, of the new row alone, and one of running rows, which bring tokens."""
    model = tiny("llama")
    generator = SpecGenerator(model, draft)
    runs = [submit(generator, [[5, 9, 12]], max_new_tokens=60), submit(generator, [[6, 6, 9]], max_new_tokens=60)]
    engine = generator.engine
    engine.step()
    comes = submit(generator, LONG, prefill_chunk_size=16, max_new_tokens=2)
    chunks = 0
    while not comes.seqs[0].prefilled:
        before = [new_tokens(call) for call in runs]
        with shapes(model) as passes:
            engine.step()
        (first, *others) = passes
        chunks += 1
        assert first[0] == 1
        assert first[1] <= 16 + 7  # at the end of the prompt a draft may add to it
        assert all(new_tokens(call) > count for call, count in zip(runs, before, strict=True))
        if not comes.seqs[0].prefilled:
            assert [rows for rows, _ in others] == [2]
            assert others[0][1] < 16
    assert chunks == 10
    finish(engine)


def test_rows_between_those_of_a_long_prompt_are_not_padded() -> None:
    """A running row that lies between two readers in memory is in none of their passes."""
    model = tiny("llama")
    generator = SpecGenerator(model)
    engine = generator.engine
    calls = [submit(generator, [[5, 9]], max_new_tokens=new) for new in (2, 40, 40)]
    while not calls[0].request.done:
        engine.step()
    late = [submit(generator, [LONG[0][i:]], prefill_chunk_size=160) for i in (0, 10)]
    gap = submit(generator, [[5, 9]], max_new_tokens=40)
    late.append(submit(generator, [LONG[0][20:]], prefill_chunk_size=160))
    with shapes(model) as passes:
        while not all(call.seqs[0].prefilled for call in [gap, *late]):
            engine.step()
    nodes = sum(rows * width for rows, width in passes if width > 1)
    read = sum(len(call.seqs[0].tokens) for call in late)
    assert nodes <= read + 3  # the short prompt beside them
    finish(engine)


def test_running_rows_wait_for_no_more_than_a_chunk() -> None:
    """Also where the reader beside a chunked prompt keeps hidden states, and so is read whole."""
    model = tiny("llama")
    generator = SpecGenerator(model)
    submit(generator, [[5, 9, 12]])
    generator.engine.step()
    submit(generator, [[6, 6]], output_hidden_states=True)
    submit(generator, [LONG[0][:60]], prefill_chunk_size=8)
    submit(generator, LONG, prefill_chunk_size=8)
    with shapes(model) as passes:
        finish(generator.engine)
    assert max(rows * width for rows, width in passes) <= 8


def test_the_first_token_comes_before_the_draft_reads() -> None:
    """The draft model's first pass is after the round that brought the first token, also for one that joins."""
    target, draft = tiny("llama"), tiny("llama", seed=1)
    generator = SpecGenerator(target, draft)
    engine = generator.engine
    with shapes(draft) as passes:
        first = submit(generator, [[5, 9, 12, 7]])
        engine.step()
        assert new_tokens(first) == 1
        assert not passes
        engine.step()
        assert passes
        passes.clear()
        second = submit(generator, [[6, 7, 8, 9, 10, 11]])
        engine.step()
        assert new_tokens(second) == 1
        assert {rows for rows, _ in passes} == {1}  # those of the first one
    finish(engine)


@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize("new", [1, 3])
def test_copies_of_a_prompt_that_end_early(chunk: int, new: int) -> None:
    """Rows that continue one reading begin also after the first of them has ended."""
    model = tiny("llama")
    how = {**COMMON, "max_new_tokens": new, "do_sample": True, "num_return_sequences": 5, "seed": 1}
    whole = SpecGenerator(model).generate([[5, 9, 12, 7]], **how)
    chunked = SpecGenerator(model).generate([[5, 9, 12, 7]], **how, prefill_chunk_size=chunk)
    assert chunked.sequences.tolist() == whole.sequences.tolist()


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_a_joining_request_is_encoded_alone(name: str) -> None:
    """The encoder runs, and cross-attention is projected, for the new rows alone, and once."""
    model = tiny(name)
    encoded: list[int] = []
    projected: list[int] = []
    keys = next(
        module for path, module in model.named_modules() if path.endswith(("EncDecAttention.k", "encoder_attn.k_proj"))
    )
    hooks = [
        model.get_encoder().register_forward_hook(lambda *args: encoded.append(len(args[2][0]))),
        keys.register_forward_hook(lambda *args: projected.append(len(args[2]))),
    ]
    generator = SpecGenerator(model, "early_exit:1")
    engine = generator.engine

    def inputs(rows: int, seed: int) -> dict[str, Any]:
        numbers = torch.Generator().manual_seed(seed)
        if name == "whisper":
            return {"prompt": None, "input_features": torch.randn(rows, 8, 40, generator=numbers)}
        return {"prompt": torch.randint(5, 60, (rows, 6 + seed), generator=numbers)}

    calls = [submit(generator, **inputs(2, 0))]
    for _ in range(3):
        engine.step()
    calls.append(submit(generator, **inputs(1, 1)))
    engine.step()
    calls.append(submit(generator, **inputs(3, 2)))
    finish(engine)
    for hook in hooks:
        hook.remove()
    assert encoded == [2, 1, 3]
    assert sorted(projected) == sorted([1, 2, 3] * (len(projected) // 3))
    assert len(projected) in (3, 6)  # an early exit that shares the layer has a session of its own
    for i, call in enumerate(calls):
        alone = SpecGenerator(model).generate(**inputs((2, 1, 3)[i], i), **COMMON)
        assert result(call).sequences.tolist() == alone.sequences.tolist()


@pytest.mark.parametrize("reading", [False, True])
def test_what_fails_in_a_pass_ends_all_that_take_part(reading: bool) -> None:
    """All requests of a round, or of the prompts that are read, with their rows that run already; later ones go on."""
    generator = SpecGenerator(tiny("llama"))
    engine, run = generator.engine, generator.engine.session.run
    calls = [submit(generator, [[5, 9], *LONG], prefill_chunk_size=64), submit(generator, [[6, 7]])]
    for _ in range(2 if reading else 8):
        engine.step()
    running = [seq.prompt_length for seq in engine.running]
    assert running == [2, 2] if reading else len(running) == 3

    def fails(works: Any, **more: Any) -> Any:
        if bool(engine.scheduler.prefilling) == reading and (works[0].text_length or not reading):
            raise Trouble("out of memory")
        return run(works, **more)

    engine.session.run = fails  # type: ignore[method-assign]
    engine.step()
    engine.session.run = run  # type: ignore[method-assign]
    assert [isinstance(call.request.error, Trouble) for call in calls] == [True, not reading]
    finish(engine)
    assert new_tokens(calls[1]) == 24 or not reading


class Clinging(Draft, Proposer):
    """Cannot let go of a sequence; notes whom each of its proposers was asked about."""

    def __init__(self) -> None:
        self.asked: list[set[int]] = []

    def start(self, vocab_size: int) -> Clinging:
        self.asked.append(set())
        return self

    def propose(self, seqs: Any, plans: Any) -> list[Tree]:
        self.asked[-1] |= {seq.id for seq in seqs}
        return [Tree([], [])] * len(seqs)

    def drop(self, seq_ids: Any) -> None:
        raise RuntimeError


def test_a_proposer_that_is_started_again_adopts_no_sequence() -> None:
    """Where one could not drop a sequence, the others go on without a draft. (A new one came into their midst.)"""
    model, draft = tiny("llama"), Clinging()
    generator = SpecGenerator(model, draft)
    first, second = (submit(generator, [[5, 9]], **{**COMMON, "max_new_tokens": n}) for n in (4, 30))
    while not first.request.done:
        generator.engine.step()
    third = submit(generator, [[6, 7]], **COMMON)
    finish(generator.engine)
    ids = [call.request.seqs[0].id for call in (first, second, third)]
    assert draft.asked == [{*ids[:2]}, {ids[2]}]
    assert len(second.request.seqs[0].texts[0]) == 30


def test_what_fails_while_it_is_admitted_ends_alone() -> None:
    """An encoder that raises, or a draft that cannot start."""
    model = tiny("t5")
    generator = SpecGenerator(model)
    good = submit(generator, [[5, 9, 12]])
    bad = submit(generator, [[6, 7]])
    error = Trouble("encoder")

    def encode() -> Any:
        raise error

    bad.request.encode = encode
    late = submit(generator, [[6, 7]])
    finish(generator.engine)
    assert bad.request.error is error
    for call, prompt in ((good, [[5, 9, 12]]), (late, [[6, 7]])):
        alone = SpecGenerator(model).generate(prompt, **COMMON)
        assert result(call).sequences.tolist() == alone.sequences.tolist()


def test_a_request_cancelled_before_it_was_submitted_leaves_its_pacing_alone() -> None:
    """What learns is counted as in use as often as it is."""
    generator = SpecGenerator(tiny("llama"), "suffix", schedule="cost")
    job = generator.submit([[5, 9]], **COMMON)
    job.cancel()
    with pytest.raises(CancelledError):
        next(job.follow())
    assert not job.call.request.pacing.users


def test_a_place_that_cannot_be_had() -> None:
    """Ends its own request, all rows of it, and nobody else's."""
    model = tiny("llama")
    generator = SpecGenerator(model)
    engine = generator.engine
    stays = submit(generator, [[7, 8, 9]])
    engine.step()
    fails = submit(generator, [[5, 6, 7], [8, 9, 10]])
    add, places = engine.session.add, []

    def failing(encoding: Any = None) -> int:
        places.append(encoding)
        if len(places) == 2:
            raise MemoryError("no room")
        return add(encoding)

    engine.session.add = failing  # type: ignore[method-assign]
    finish(engine)
    assert isinstance(fails.request.error, MemoryError)
    assert stays.request.error is None
    assert stays.request.seqs[0].texts == [alone(model, [[7, 8, 9]])]


def test_a_text_that_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    generator = SpecGenerator(model, prefix_cache=True)
    prompt = [[(3 * i) % 40 + 5 for i in range(30)]]

    def full(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(KvSession, "keep_prefix", full)
    for _ in range(2):
        out = generator.generate(prompt, **COMMON)
        assert out.sequences[0, 30:].tolist() == alone(model, prompt)
        assert out.stats.cached_prompt_tokens == 0


def test_a_request_counts_its_own_passes() -> None:
    """Those of rows far longer than its own are others'."""
    model = tiny("llama")
    expected = SpecGenerator(model).generate([[5, 9, 7]], **COMMON).stats.num_target_passes
    generator = SpecGenerator(model)
    generator.target.weight_bytes = 1  # every row has passes of its own then
    engine = generator.engine
    long = submit(generator, [[(3 * i) % 40 + 5 for i in range(60)]])
    engine.step()
    short = submit(generator, [[5, 9, 7]])
    finish(engine)
    assert (short.request.passes, long.request.passes) == (expected, expected)


def test_equal_prompts_of_one_token_are_read_together() -> None:
    """Nobody waits for a row that leaves with what it has read."""
    generator = SpecGenerator(tiny("llama"), prefix_cache=1000)
    generator.target.weight_bytes = 10**9  # one pass for all
    engine = generator.engine
    prompt = [[(3 * i) % 40 + 5 for i in range(40)]]
    for _ in range(5):
        submit(generator, prompt, max_new_tokens=1)
    finish(engine)
    assert engine.session.passes == 1


def test_short_prompts_do_not_wait_for_a_long_one() -> None:
    """Every other chunk may be one of somebody else's."""
    generator = SpecGenerator(tiny("llama"))
    engine = generator.engine
    long = submit(generator, [[(3 * i) % 40 + 5 for i in range(200)]], prefill_chunk_size=10)
    engine.step()
    short = submit(generator, [[5, 9, 7]])
    for _ in range(3):
        engine.step()
    assert new_tokens(short)
    assert not new_tokens(long)
    finish(engine)


def test_hidden_states_beside_a_longer_negative_prompt() -> None:
    """The prompt's are there, whatever else is read beside it."""
    given = {"guidance_scale": 2.0, "negative_prompt_ids": torch.tensor([[5, 6, 7, 8, 9, 10]])}
    generator = SpecGenerator(tiny("llama"))
    out = generator.generate(
        torch.tensor([[5, 9, 12, 7]]), **COMMON, **given, output_hidden_states=True, return_dict_in_generate=True
    )
    assert out.hidden_states[0][0].shape[1] == 4
