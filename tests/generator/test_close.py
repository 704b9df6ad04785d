"""What a closed generator ends and frees, and what it refuses."""

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch

from specdec import CancelledError, EngineError, SpecGenerator
from tests.engine.test_threads import PATIENCE, together
from tests.matrix import endless
from tests.tiny import tiny

COMMON = endless(400)


def driving() -> list[threading.Thread]:
    """The threads that run engines."""
    return [thread for thread in threading.enumerate() if thread.name == "specdec-engine"]


def test_a_closed_generator_refuses_calls() -> None:
    """Every entry raises at once, jobs that were ready included; closing again does nothing."""
    with SpecGenerator(tiny("llama"), "suffix") as generator:
        generator.generate([[5, 9]], **{**COMMON, "max_new_tokens": 4})
        job = generator.submit([[5, 9]], **COMMON)
    generator.close()
    for call in (generator.generate, generator.stream, generator.submit):
        with pytest.raises(EngineError, match="is closed: make another one"):
            call([[5, 9]], **COMMON)
    with pytest.raises(EngineError, match="is closed"):
        next(job.follow())


def test_closing_frees_keys_and_values() -> None:
    """At once, and not when the collector of reference cycles comes round."""
    generator = SpecGenerator(tiny("llama"), tiny("llama", seed=1))
    stream = generator.stream([[5, 9]], **COMMON)
    next(stream)
    next(stream)
    sessions = [generator.engine.session, *(one.proposer._session for one in generator.engine.drafts.open.values())]
    buffers = [weakref.ref(buffer) for session in sessions for buffer in session.buffers._buffers()]
    del sessions
    gc.disable()
    try:
        generator.close()
        assert len(buffers) > 4
        assert not any(buffer() is not None for buffer in buffers)
    finally:
        gc.enable()


@pytest.mark.parametrize("calls", [1, 3])
def test_closing_cancels_running_calls(calls: int) -> None:
    """Alone or together they raise CancelledError, and the thread that ran them has ended."""
    generator, before = SpecGenerator(tiny("llama"), "suffix"), len(driving())
    reached: list[int] = []
    closing = threading.Event()

    def watch(ids: torch.Tensor, scores: Any) -> bool:
        reached.extend([1] * (ids.shape[1] == 3))
        return len(reached) == calls and not closing.wait(PATIENCE)

    def run() -> str:
        with pytest.raises(CancelledError, match="the generator was closed"):
            generator.generate([[5, 9]], **{**COMMON, "max_new_tokens": 2000}, stopping_criteria=[watch])
        return "cancelled"

    def close() -> str:
        end = time.monotonic() + PATIENCE
        while len(reached) < calls:
            assert time.monotonic() < end
        closing.set()
        generator.close()
        return "closed"

    assert together(*[run] * calls, close) == [*["cancelled"] * calls, "closed"]
    assert len(driving()) == before
    assert generator.engine.idle


def test_closing_between_two_rounds() -> None:
    """A stream that nobody reads ends, and keys, values and cached prompts are freed."""
    generator = SpecGenerator(tiny("llama"), prefix_cache=True)
    prompt = [list(range(3, 40))]
    generator.generate(prompt, **{**COMMON, "max_new_tokens": 4})
    prefixes = generator.engine.scheduler.prefix_cache
    assert prefixes.bytes > 0
    stream = generator.stream(prompt, **COMMON)
    next(stream)
    generator.close()
    with pytest.raises(CancelledError, match="the generator was closed"):
        next(stream)
    assert prefixes.bytes == 0
    assert generator.engine.idle


def test_closing_inside_a_call() -> None:
    """A processor that closes the generator it runs in gets an error, and the generator stays open."""
    generator = SpecGenerator(tiny("llama"))
    with pytest.raises(EngineError, match="called the generator that it runs in"):
        generator.generate([[5]], logits_processor=[lambda ids, scores: generator.close()], **COMMON)
    generator.generate([[5]], **{**COMMON, "max_new_tokens": 2})
