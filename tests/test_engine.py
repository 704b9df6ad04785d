"""The loop itself: the store after every round, rows that leave, and calls that fail half-way."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from specdec import BusyError, DraftError, LanguageModel, SpecGenerator
from specdec.draft import FunctionDrafter, ModelDrafter
from specdec.engine import Engine
from specdec.logits import Processors
from specdec.rows import TextRow
from specdec.schedule import Heuristic
from specdec.select import Greedy, PerRow, Stopping
from specdec.types import Call, Tree
from tests.oracle import oracle
from tests.tiny import tiny

COMMON = {"max_new_tokens": 16, "eos_token_id": [], "pad_token_id": 0}


def running(model: LanguageModel, prompts: list[list[int]], drafter: Any, limit: int = 40) -> Engine:
    """An engine over greedy rows that end at `limit` tokens."""
    rows = [
        TextRow(
            key=r,
            tokens=list(p),
            selector=Greedy(Processors()),
            stop=Stopping(max_length=limit - 5 * r),
            max_length=limit - 5 * r,
            device=model.device,
        )
        for r, p in enumerate(prompts)
    ]
    call = Call(PerRow({row.key: row.selector.rule for row in rows}), model.vocab_size)
    engine = Engine(model.session(), drafter.start(call), Heuristic(), prefill_chunk=8)
    engine.add(rows)
    return engine


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "bloom", "mamba"])
def test_store_equals_a_recomputed_one_after_every_round(name: str) -> None:
    """After each round, what the target and the draft hold gives the logits of a store filled from scratch."""
    model = LanguageModel(tiny(name))
    draft = ModelDrafter(LanguageModel(tiny(name, seed=1)))
    prompts = [[5, 9, 12, 7, 30, 5, 9, 12, 8, 8, 4, 3], [6, 6, 9], [5, 17, 21, 40, 11, 12]]
    with torch.no_grad():
        engine = running(model, prompts, draft)
        while engine.rows:
            engine.step()
            for row, held in zip(engine.rows, engine.target.lengths, strict=True):
                assert held <= len(row.tokens) - 1
            if not engine.rows:
                break
            needs = [row.frontier(held) for row, held in zip(engine.rows, engine.target.lengths, strict=True)]
            seen = engine.target.forward(needs, [1] * len(needs))
            for row, scores in zip(engine.rows, seen, strict=True):
                fresh = model.session()
                fresh.add(1)
                again = fresh.forward([Tree.chain(row.tokens)], [1])[0]
                assert torch.allclose(scores.logits, again.logits, atol=1e-3), name


def test_long_prompts_are_read_in_chunks() -> None:
    """A prompt longer than the chunk gives the same text, in more passes."""
    model = tiny("mistral")
    prompt = [torch.randint(5, 64, (50,), generator=torch.Generator().manual_seed(0)).tolist(), [7, 8, 9]]
    whole = SpecGenerator(model, "suffix").generate(prompt, **COMMON)
    chunked = SpecGenerator(model, "suffix").generate(prompt, **COMMON, prefill_chunk_size=7)
    assert chunked.sequences.tolist() == whole.sequences.tolist()
    assert chunked.stats.num_target_passes == whole.stats.num_target_passes + 7


def test_chunks_of_a_prompt_are_the_target_s_time() -> None:
    """Reading a long prompt counts as verification. (Its seconds were the draft's.)"""
    model = tiny("llama")
    slow, forward = 0.02, model.forward

    def sleepy(*args: Any, **kwargs: Any) -> Any:
        time.sleep(slow)
        return forward(*args, **kwargs)

    model.forward = sleepy
    stats = (
        SpecGenerator(model, FunctionDrafter(lambda tokens, k: []))
        .generate([[5] * 9], **COMMON, prefill_chunk_size=2)
        .stats
    )
    assert stats.num_target_passes == 20
    assert stats.verify_seconds > 20 * slow
    assert stats.draft_seconds < 4 * slow


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


def test_released_row_leaves_the_others_alone() -> None:
    """A row that is taken out early does not change what the others become."""
    model = LanguageModel(tiny("llama"))
    prompts = [[5, 9, 12], [6, 6, 9], [5, 17]]
    with torch.no_grad():
        alone = running(model, prompts, FunctionDrafter(oracle("random", [], 64)))
        kept = [alone.rows[0], alone.rows[2]]
        for _ in alone.run():
            pass
        engine = running(model, prompts, FunctionDrafter(oracle("random", [], 64)))
        rows = [engine.rows[0], engine.rows[2]]
        engine.step()
        engine.release([1])
        for _ in engine.run():
            pass
    assert [row.tokens for row in rows] == [row.tokens for row in kept]


class Fails(LogitsProcessor):
    """Raises at the third token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= 5:
            raise KeyboardInterrupt
        return scores


class Broken:
    """A streamer that raises."""

    def put(self, value: torch.Tensor) -> None:
        raise RuntimeError("no paper")

    def end(self) -> None: ...


def bad_draft(tokens: list[int], k: int) -> list[int]:
    raise ValueError("no idea")


@pytest.mark.parametrize("name", ["llama", "bloom", "t5", "mamba"])
@pytest.mark.parametrize("trouble", ["draft", "processor", "streamer", "criterion"])
def test_bad_luck_leaves_everything_usable(name: str, trouble: str) -> None:
    """After an exception in a draft, processor, streamer or criterion, the next call and the model are as before."""
    model = tiny(name)
    prompt = [[5, 9, 12]]
    generator = SpecGenerator(model, "early_exit:1")
    before = generator.generate(prompt, **COMMON).sequences.tolist()
    logits = plain_logits(model)
    options: dict[str, Any] = {
        "draft": {"assistant_model": bad_draft},
        "processor": {"logits_processor": [Fails()]},
        "streamer": {"streamer": Broken()},
        "criterion": {"stopping_criteria": [lambda ids, scores: 1 / 0]},
    }[trouble]
    with pytest.raises((ValueError, DraftError, KeyboardInterrupt, RuntimeError, ZeroDivisionError)):
        generator.generate(prompt, **COMMON, **options)
    assert generator.generate(prompt, **COMMON).sequences.tolist() == before
    assert torch.equal(plain_logits(model), logits)


def plain_logits(model: Any) -> torch.Tensor:
    ids = torch.tensor([[5, 9, 12, 7]])
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(ids, **more).logits


def test_a_busy_generator_says_so() -> None:
    """A second call while a stream is open raises; closing the stream frees the generator."""
    generator = SpecGenerator(tiny("llama"), "suffix")
    stream = generator.stream([[5, 9]], **COMMON)
    next(stream)
    with pytest.raises(BusyError, match="decoding already"):
        generator.generate([[5, 9]], **COMMON)
    stream.close()
    assert generator.generate([[5, 9]], **COMMON).stats.num_new_tokens == 16


def test_a_draft_that_offers_too_much_is_told() -> None:
    """A session that ignores how much may still come raises instead of overrunning the limit."""

    class Endless:
        def start(self, call: Call) -> Any:
            return self

        def propose(self, rows: Any, plans: Any) -> list[Tree]:
            return [Tree.chain([1] * 50) for _ in rows]

        def release(self, keys: Any) -> None: ...

    with pytest.raises(DraftError, match="may only grow by"):
        SpecGenerator(tiny("llama"), Endless()).generate([[5, 9]], **COMMON)
