"""Several threads on one generator: they share its passes, and nothing that one of them does reaches another."""

import gc
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from specdec import CancelledError, EngineError, LanguageModel, SpecGenerator
from specdec.core.drafts import Draft, Proposer
from specdec.engine import openmp
from specdec.engine.openmp import Threads, release_helpers
from specdec.proposers import FunctionDraft, ModelDraft, SuffixDraft
from tests.engine.test_requests_stateful import Trouble, failing
from tests.matrix import endless, slow, some
from tests.oracle import rows_in_drafts, shapes
from tests.tiny import threads as torch_threads
from tests.tiny import tiny

pytestmark = pytest.mark.timeout(60)

COMMON = endless(16)
PATIENCE = 60.0  # seconds, after which a thread is taken to be stuck
KINDS = [
    *some("greedy", "coupled", "rejection", "beams", "constrained", "contrastive", "ranked").values(),
    {"repetition_penalty": 1.4},
]

PROGRAM = """
import threading, time
from specdec import SpecGenerator
from tests.tiny import tiny

gen = SpecGenerator(tiny("llama"), "suffix", eos_token_id=[])
once = threading.Barrier(4)

def call():
    gen.generate([[5, 6, 7]], max_new_tokens=30)

def calls():
    once.wait()
    for _ in range(4):
        call()
    {last}

callers = [threading.Thread(target=calls, daemon=True) for _ in range(3)]
for one in callers:
    one.start()
if "{last}":
    once.wait()
else:
    calls()
    for one in callers:  # torch aborts where an operator of theirs meets the end of the interpreter
        one.join()
    call()
while not (found := [one.name for one in threading.enumerate() if one.name == "specdec-engine"]):
    time.sleep(0.001)
print(*found)
"""


def together(*works: Callable[[], Any]) -> list[Any]:
    """What these return or raise when each has a thread, all starting at once; fails where one does not come back."""
    start = threading.Barrier(len(works))
    found: list[Any] = [None] * len(works)

    def work(i: int) -> None:
        start.wait(PATIENCE)
        try:
            found[i] = works[i]()
        except BaseException as error:
            found[i] = error

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a thread is stuck"
    return found


def generated(generator: SpecGenerator, prompt: Any, **options: Any) -> list[list[int]]:
    return generator.generate(prompt, **{**COMMON, **options}).sequences.tolist()


def streamed(generator: SpecGenerator, prompt: Any, **options: Any) -> list[list[int]]:
    """The texts of a stream, which its events spell."""
    stream = generator.stream(prompt, **{**COMMON, **options})
    spelled: dict[int, list[int]] = {}
    out = None
    while out is None:
        try:
            event = next(stream)
        except StopIteration as end:
            out = end.value
        else:
            spelled.setdefault(event.row, []).extend(event.token_ids)
    assert [spelled[row] for row in sorted(spelled)] == out.new_tokens()
    return out.sequences.tolist()


def is_clean(generator: SpecGenerator) -> bool:
    """Whether no row is left in its engine, once the engine's thread has ended, as it soon does."""
    driver, end = generator._driver, time.monotonic() + PATIENCE
    while driver._thread is not None and time.monotonic() < end:
        time.sleep(0.001)
    engine = driver.engine
    left = (engine._requests, rows_in_drafts(engine), engine.session.rows, driver._open)  # type: ignore[attr-defined]
    return engine.idle and not any(left)


@pytest.mark.parametrize("name", ["llama", "t5", slow("gemma2"), slow("mamba")])
def test_eight_threads(name: str) -> None:
    """All strategies with all kinds of drafts, half of them streamed: the texts are those of calls alone."""
    model = LanguageModel(tiny(name))
    drafts = [None, ModelDraft(LanguageModel(tiny(name, seed=1))), SuffixDraft(), "early_exit:1"]
    drafts.append(FunctionDraft(lambda tokens, k: [5] * k))
    prompts = [[[5 + i, 9, 12, *range(20, 20 + 3 * i)]] for i in range(8)]
    calls = []
    for turn in range(2):
        for i, kind in enumerate(KINDS):
            draft = None if "penalty_alpha" in kind else drafts[(i + turn) % len(drafts)]
            more = {"assistant_model": draft, "prefill_chunk_size": 8 if i % 3 else None, "max_new_tokens": 10}
            calls.append((prompts[i], {**kind, **more}))
    expected = [generated(SpecGenerator(model), prompt, **options) for prompt, options in calls]
    generator = SpecGenerator(model)

    def some(i: int) -> list[Any]:
        how = streamed if i % 2 else generated
        return [how(generator, *calls[j][:1], **calls[j][1]) for j in (i, i + 8)]

    found = together(*(lambda i=i: some(i) for i in range(8)))
    assert found == [[expected[i], expected[i + 8]] for i in range(8)]
    assert is_clean(generator)


def test_passes_are_shared() -> None:
    """The target runs far less often than for one after the other."""
    model = tiny("llama")
    generator = SpecGenerator(model, "suffix")
    prompts = [[[5 + i, 9, 12]] for i in range(8)]
    options = {"max_new_tokens": 60}
    with shapes(model) as one_by_one:
        alone = [generated(generator, prompt, **options) for prompt in prompts]
    with shapes(model) as passes:
        found = together(*(lambda prompt=prompt: generated(generator, prompt, **options) for prompt in prompts))
    assert found == alone
    assert len(passes) < len(one_by_one) / 2


class Jammed:
    """A streamer that raises at its `at`-th piece, of which the prompt is the first."""

    def __init__(self, at: int) -> None:
        self.left = at

    def put(self, value: torch.Tensor) -> None:
        self.left -= 1
        if not self.left:
            raise Trouble("no paper")

    def end(self) -> None:
        raise AssertionError


class Interrupting(Draft):
    """A draft whose start ends the program."""

    def start(self, vocab_size: int) -> Proposer:
        raise SystemExit


@pytest.mark.parametrize("draft", [None, "early_exit:1"])
def test_what_one_thread_raises_is_its_own(draft: Any) -> None:
    """A processor and a streamer that raise end their calls, and no other; nor does what would end a program."""
    generator = SpecGenerator(tiny("llama"), draft)
    prompts = [[[5 + i, 9, 12]] for i in range(8)]
    alone = [generated(generator, prompt) for prompt in prompts]
    bad: dict[int, tuple[Any, dict[str, Any]]] = {
        1: (Trouble, failing("processor", Trouble("no ink"), 4)),
        3: (KeyboardInterrupt, failing("processor", KeyboardInterrupt(), 4)),
        4: (Trouble, {"streamer": Jammed(3)}),
        6: (SystemExit, {"assistant_model": Interrupting()}),
    }
    found = together(*(lambda i=i: generated(generator, prompts[i], **bad.get(i, (None, {}))[1]) for i in range(8)))
    for i, (one, text) in enumerate(zip(found, alone, strict=True)):
        assert type(one) is bad[i][0] if i in bad else one == text
    assert is_clean(generator)


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_stream_that_is_given_up_in_another_s_last_round(how: str) -> None:
    """Nobody steps after it; its rows are gone all the same."""
    generator = SpecGenerator(tiny("llama"))
    streams = [generator.stream([[6, 7]], **COMMON)]
    next(streams[0])
    here, gone = threading.Event(), threading.Event()

    def last(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        if ids.shape[1] == 2 + 6:
            here.set()
            assert gone.wait(PATIENCE)
        return torch.tensor([False])

    def give_up() -> None:
        assert here.wait(PATIENCE)
        if how == "closed":
            streams[0].close()
        streams.clear()
        gc.collect()
        gone.set()

    together(lambda: generated(generator, [[5, 9]], max_new_tokens=6, stopping_criteria=[last]), give_up)
    assert is_clean(generator)


def test_a_dropped_stream_is_cancelled() -> None:
    """One that is collected leaves nothing, whether or not somebody else drives meanwhile."""
    generator = SpecGenerator(tiny("llama"), "early_exit:1")
    stream = generator.stream([[5, 9]], **COMMON)
    next(stream)
    assert not is_clean(generator)
    del stream
    gc.collect()
    assert is_clean(generator)
    alone = generated(generator, [[6, 7]])

    def drop() -> None:
        for _ in range(5):
            next(generator.stream([[5, 9]], **COMMON))

    found = together(drop, drop, lambda: [generated(generator, [[6, 7]]) for _ in range(5)])
    assert found == [None, None, [alone] * 5]
    assert is_clean(generator)


@pytest.mark.parametrize("stream", [False, True])
def test_ctrl_c_ends_the_call_that_waits(stream: bool, request: pytest.FixtureRequest) -> None:
    """The caller comes back once no pass runs for it, with the texts so far in the job."""
    held = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, held))
    generator = SpecGenerator(tiny("llama"), "early_exit:1")
    alone = generated(generator, [[5, 9]])

    def press(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        if ids.shape[1] == 8:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return torch.tensor([False])

    job = generator.submit([[5, 9]], **{**COMMON, "max_new_tokens": 2000}, stopping_criteria=[press])
    with pytest.raises(KeyboardInterrupt):
        list(job.follow(stream=stream))
    assert generator.engine.idle
    assert job.result is not None
    assert job.result.stats is not None
    assert job.result.stats.finish_reasons == ("cancelled",)
    assert is_clean(generator)
    assert generated(generator, [[5, 9]]) == alone


def test_which_thread_runs_what() -> None:
    """Processors, criteria and drafts run in the engine's thread, streamers and loops over streams in the caller's."""
    generator, here = SpecGenerator(tiny("llama")), threading.current_thread()
    seen: dict[str, set[Any]] = {"within": set(), "streamer": set()}

    def note(name: str) -> None:
        seen[name].add(threading.current_thread())

    def processor(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        note("within")
        return logits

    def criterion(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        note("within")
        return torch.tensor([False])

    def draft(tokens: list[int], k: int) -> list[int]:
        note("within")
        return []

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            note("streamer")

        def end(self) -> None:
            note("streamer")

    own = {"logits_processor": [processor], "stopping_criteria": [criterion], "assistant_model": draft}
    with torch.inference_mode():
        generated(generator, [[5, 9]], **own, streamer=Streamer())
    assert [one.name for one in seen["within"]] == ["specdec-engine"]
    assert seen["streamer"] == {here}


def test_torch_computes_on_as_many_threads_as_in_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each call, also where the engine's thread still runs after the last one; unless other programs take cores."""
    monkeypatch.setattr(openmp, "_WAITING", math.inf)
    generator, counts = SpecGenerator(tiny("llama")), set[int]()

    def note(ids: torch.Tensor, scores: Any) -> bool:
        counts.add(torch.get_num_threads())
        return False

    for count in (1, 2, 1):
        counts.clear()
        with torch_threads(count):
            generated(generator, [[5, 9]], stopping_criteria=[note])
            assert torch.get_num_threads() == count
        assert counts == {count}


def test_what_was_learned_of_a_busy_machine_outlives_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread ends after 10 ms without a call. (The next one tried all threads again, and said so again.)"""
    used, whole = list[Threads](), Threads.use
    monkeypatch.setattr(Threads, "use", lambda self, most: used.append(self) or whole(self, most))
    generator = SpecGenerator(tiny("llama"), eos_token_id=[])
    for _ in range(2):
        generator.generate([[5, 6, 7]], max_new_tokens=3)
        while any(one.name == "specdec-engine" for one in threading.enumerate()):
            time.sleep(0.01)
    assert all(threads is used[0] for threads in used)


def test_a_stream_runs_as_far_as_it_is_read() -> None:
    """Between two events nothing computes: the caller may change the model there, or never come back."""
    generator, calls = SpecGenerator(tiny("llama")), list[int]()

    def note(ids: torch.Tensor, scores: Any) -> bool:
        calls.append(1)
        return False

    stream = generator.stream([[5, 9]], **COMMON, stopping_criteria=[note])
    for read in (1, 2):
        next(stream)
        time.sleep(0.03)
        assert len(calls) == read
    stream.close()
    assert is_clean(generator)


def test_a_defect_of_the_engine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """All calls under way raise it, it is logged, and the next call is right. (It was hidden.)"""
    generator = SpecGenerator(tiny("llama"))
    alone = generated(generator, [[5, 9]])
    stream = generator.stream([[6, 7]], **COMMON)
    next(stream)
    with monkeypatch.context() as patched:
        patched.setattr(generator.engine, "_commit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generated(generator, [[5, 9]])
    with pytest.raises(ZeroDivisionError):
        next(stream)
    assert "the engine failed" in caplog.text
    assert is_clean(generator)
    assert generated(generator, [[5, 9]]) == alone


def test_pushed_news(caplog: pytest.LogCaptureFixture) -> None:
    """A job that is started tells of each round without being asked; one whose caller cannot be told ends."""
    generator, ended = SpecGenerator(tiny("llama")), threading.Event()
    alone = generated(generator, [[5, 9]])
    good, bad = (generator.submit([[5, 9]], **COMMON) for _ in range(2))
    news = SimpleQueue[str]()
    good.start(lambda: news.put(threading.current_thread().name))

    def tell() -> None:
        ended.set()
        raise RuntimeError("the loop is closed")

    bad.start(tell)
    tokens = list[int]()
    while good.result is None:
        assert news.get(timeout=PATIENCE) == "specdec-engine"
        tokens += [token for deltas in good.take() for one in deltas for token in one.token_ids]
    assert [[5, 9, *tokens]] == alone
    assert ended.wait(PATIENCE)
    assert is_clean(generator)
    with pytest.raises(RuntimeError, match="loop is closed"):
        list(bad.take())
    assert "could not be told" in caplog.text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_has_an_engine_of_its_own() -> None:
    """It decodes, though its parent's thread is not there, and has none of its parent's calls, which go on."""
    generator = SpecGenerator(tiny("llama"))
    stream = generator.stream([[5, 9]], **COMMON)
    begun = next(stream).token_ids  # the thread rests
    assert begun
    if not (child := os.fork()):
        signal.alarm(int(PATIENCE))
        right = generated(generator, [[5, 9]])[0][2:3] == begun
        try:
            next(stream)
        except CancelledError:
            os._exit(0 if right else 1)
        os._exit(2)
    begun += [token for event in stream for token in event.token_ids]
    assert [[5, 9, *begun]] == generated(generator, [[5, 9]])
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("how", ["generate", "stream", "open stream", "close"])
@pytest.mark.parametrize("where", ["processor", "draft"])
def test_calls_from_within_are_refused(how: str, where: str) -> None:
    """A processor or draft that calls its own generator gets an EngineError, and never waits for itself."""
    generator = SpecGenerator(tiny("llama"))
    alone = generated(generator, [[5, 9]])
    opened = generator.stream([[6, 7]], **COMMON)
    next(opened)

    def calls() -> None:
        if how == "generate":
            generated(generator, [[6, 7]])
        elif how == "stream":
            next(generator.stream([[6, 7]], **COMMON))
        elif how == "open stream":
            next(opened)
        else:
            opened.close()

    def processor(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        calls()
        return logits

    def draft(tokens: list[int], k: int) -> list[int]:
        calls()
        return []

    more = {"logits_processor": [processor]} if where == "processor" else {"assistant_model": draft}
    (found,) = together(lambda: generated(generator, [[5, 9]], **more))
    if how == "close":
        assert found == alone
    else:
        assert isinstance(found, EngineError)
        assert "another SpecGenerator" in str(found)
    opened.close()
    assert is_clean(generator)
    assert generated(generator, [[5, 9]]) == alone


def test_a_streamer_may_call() -> None:
    """It runs outside of the engine."""
    generator = SpecGenerator(tiny("llama"))
    alone = generated(generator, [[5, 9]]), generated(generator, [[6, 7]], max_new_tokens=3)

    class Calls:
        def put(self, value: torch.Tensor) -> None:
            assert generated(generator, [[6, 7]], max_new_tokens=3) == alone[1]

        def end(self) -> None: ...

    assert together(lambda: generated(generator, [[5, 9]], streamer=Calls())) == [alone[0]]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed by /proc")
def test_loading_leaves_no_helper_threads() -> None:
    """Those of the thread that loads made the passes of every other one take twice as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        release_helpers()
        alone = threads()
        torch.ones(2**20).exp()  # an operation that two threads share
        if not threads() - alone:
            pytest.skip("this torch has no helper threads of GNU's OpenMP")
        SpecGenerator(tiny("llama"))
        assert not threads() - alone
    finally:
        torch.set_num_threads(before)


def threads() -> set[str]:
    """The threads of this process, after waiting for those that are ending."""
    time.sleep(0.05)
    return set(os.listdir("/proc/self/task"))


@pytest.mark.slow
@pytest.mark.parametrize("last", ["", "while True: call()"], ids=["rests", "runs"])
def test_a_program_ends_while_its_engine_has_a_thread(last: str) -> None:
    """In order, and at once. A thread that freed a tensor while the interpreter ended made that an abort (SIGABRT)."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(last=last)], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "specdec-engine\n"), done.stderr
    assert time.monotonic() - began < PATIENCE


ENDING = """
import atexit, threading, time
atexit.register(lambda: print(*[one.name for one in threading.enumerate()]))  # after the engine's handler
from contextlib import contextmanager
from specdec import SpecGenerator
from specdec.engine import driver
from tests.tiny import tiny

@contextmanager
def slow():
    yield
    time.sleep(1.0)

driver.plain_modes = slow
SpecGenerator(tiny("llama"), eos_token_id=[]).generate([[5, 6, 7]], max_new_tokens=3)
time.sleep(0.3)
"""


@pytest.mark.slow
def test_a_thread_that_ends_is_waited_for() -> None:
    """It may be the last owner of a model. (`summarize` wrote its texts, and then aborted while a model was freed.)"""
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "MainThread\n"), done.stderr
