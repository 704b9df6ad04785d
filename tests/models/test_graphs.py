"""Recorded passes: by a recorder that counts, as graphs need a GPU."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from specdec import SpecGenerator, kernels
from specdec.core.tree import Tree
from specdec.kernels import reference_attention
from specdec.models import LanguageModel
from specdec.models.graphs import WIDTHS, GraphedForward, cuda_graphs
from tests.models.exact import Twin
from tests.tiny import ENCODER_DECODERS, tiny, tiny_inputs

pytestmark = pytest.mark.usefixtures("built")
PROMPT = torch.tensor([[5, 9, 33, 7, 12]])


class Recorder:
    """Plays a pass back by running it again, over the tensors that it was recorded with."""

    def __init__(self) -> None:
        self.recorded = self.played = 0

    def __call__(self, run: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        self.recorded += 1
        said = [tensor.clone() for tensor in run()]

        def play() -> None:
            self.played += 1
            for mine, new in zip(said, run(), strict=True):
                mine.copy_(new)

        return play, said


def recorded(name: str = "llama", **options: object) -> tuple[LanguageModel, Recorder]:
    """A model whose passes are recorded."""
    language, recorder = LanguageModel(tiny(name, **options), backend="packed"), Recorder()
    language.ragged.compiled = GraphedForward(language.ragged, recorder)
    return language, recorder


@pytest.fixture(params=["compiled attention", "attention of a GPU"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own operators, as they run on other devices, too."""
    if request.param == "attention of a GPU":

        def attend(queries: Tensor, keys: Tensor, values: Tensor, nodes: Tensor, scale: float, softcap: float = 0.0,
                   sinks: Tensor | None = None, biases: Tensor | None = None) -> Tensor:  # fmt: skip
            return reference_attention.attend(queries, keys, values, nodes, scale, softcap, sinks, biases)

        monkeypatch.setattr(kernels, "attend", attend)
        monkeypatch.setattr(kernels, "store_nodes", reference_attention.store_nodes)


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "whisper", "t5")]


@pytest.mark.parametrize("name", ["llama", *OTHERS])
def test_passes(name: str, attention: None) -> None:
    """Chains, trees and rows of any number have the logits that the text alone gives, past the first capacity too."""
    language, recorder = recorded(name)
    encoding = language.encode(tiny_inputs(name, 3)) if name in ENCODER_DECODERS else None
    twin = Twin(language, 3, encoding)
    twin.wander()
    played = recorder.played
    twin.step([twin.chain(150), twin.chain(1), twin.tree()], [2, 1, 1], [list(range(150)), [0], [5, 6]])
    assert recorder.played == played  # too wide
    twin.leave(0, 2)
    for size in (1, 1, 2, 1):
        twin.step([twin.chain(size)], [size], [[0]])
    assert recorder.played == played + 4


def test_passes_of_one_size_are_recorded_once() -> None:
    """Sizes are few: nodes are filled up."""
    language, recorder = recorded()
    twin = Twin(language, 1)
    twin.prefill(9)
    for size in (1, 2, 3, 4, 5, 6, 7, 8) * 3:
        twin.step([twin.chain(size)], [1], [[]])
    assert recorder.recorded == 5  # of 16 nodes for the prompt, and of 1, 2, 4, 8
    assert recorder.played == 25
    assert list(WIDTHS) == sorted(WIDTHS)


def test_buffers_that_grow() -> None:
    """A recording is of its buffers: others have recordings of their own, and only so many are kept."""
    language, recorder = recorded()
    for seed in range(40):
        twin = Twin(language, 1, seed=seed)
        twin.prefill(9)
        twin.step([twin.chain(1)], [1], [[0]])
    held = language.ragged.compiled._recordings
    assert len(held) <= 32
    assert recorder.recorded >= len(held)


def test_buffers_that_go() -> None:
    """A recording holds nothing of a session: its keys and values go with it."""
    language = LanguageModel(tiny("llama"), backend="packed")

    def record(run: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        return (lambda: None), [tensor.clone() for tensor in run()]

    language.ragged.compiled = GraphedForward(language.ragged, record)
    session = language.session()
    session.forward(session.add(1), [Tree.chain([5, 6, 7])], [1])
    keys = weakref.ref(session.store.pairs()[0][0])
    assert len(language.ragged.compiled._recordings) == 1
    del session
    gc.collect()
    assert keys() is None


def test_several_threads() -> None:
    """Sessions of one model run side by side, though they share what passes are played on."""
    language, recorder = recorded()
    played = recorder.__call__

    def slowly(run: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        play, said = played(run)

        def play_slowly() -> None:
            time.sleep(0.002)  # time enough for others to write to the same places
            play()

        return play_slowly, said

    language.ragged.compiled = GraphedForward(language.ragged, slowly)
    session = language.session()
    rows = session.add(3)
    texts = [Tree.chain([5 + row, 9, 33]) for row in rows]
    expected = [session.forward([row], [text], [1])[0].logits for row, text in zip(rows, texts, strict=True)]
    found: list[Tensor] = [torch.empty(0)] * len(rows)

    def run(i: int) -> None:
        for _ in range(5):
            found[i] = session.forward([rows[i]], [texts[i]], [1])[0].logits

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(torch.equal, found, expected))


def test_hidden_states() -> None:
    """Of the layers that are asked for, and of the pass's own nodes alone."""
    language, _ = recorded()
    twin, below = Twin(language, 2), Twin(LanguageModel(language.model, backend="eager"), 2)
    for one in (twin, below):
        one.prefill(20, 4)
    trees, keep = [twin.chain(3), twin.tree()], [2, 7]
    plain_, some, whole = (twin.forward(trees, keep, output_hidden_states=layers) for layers in (False, [0, 2], True))
    expected = below.forward(trees, keep, output_hidden_states=True)
    for row in range(2):
        assert plain_[row].hidden_states is None
        assert [state is not None for state in some[row].hidden_states] == [True, False, True]
        for mine, own in zip(whole[row].hidden_states, expected[row].hidden_states, strict=True):
            torch.testing.assert_close(mine, own, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("more", [{}, {"do_sample": True, "seed": 3}, {"num_beams": 3}, {"repetition_penalty": 1.3}])
def test_texts(more: dict[str, object]) -> None:
    """Assisted by a recorded draft, every strategy writes what plain passes write."""
    given = {"input_ids": PROMPT, "max_new_tokens": 40, **more}
    target, recorder = recorded()
    draft, _ = recorded(seed=1)
    expected = SpecGenerator(tiny("llama"), backend="packed").generate(**given)
    assert torch.equal(SpecGenerator(target, draft).generate(**given).sequences, expected.sequences)
    assert recorder.played > recorder.recorded > 0


def test_what_cannot_be_recorded(caplog: pytest.LogCaptureFixture) -> None:
    """Passes run as before, and a warning says why, once."""

    def record(run: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    language = LanguageModel(tiny("llama"), backend="packed")
    language.ragged.compiled = GraphedForward(language.ragged, record)
    twin = Twin(language, 1)
    twin.prefill(9)
    twin.step([twin.chain(2)], [2], [[0, 1]])
    assert not language.wait_until_compiled()
    [message] = caplog.messages
    assert message == (
        "the passes of LlamaForCausalLM are not recorded, they run as before: "
        "operation not permitted when stream is capturing"
    )


def test_how_graphs_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the model's device and a stream of its own, once as it is and then into a graph; graphs share memory."""
    events: list[object] = []

    @contextmanager
    def noted(*what: object) -> Iterator[None]:
        events.append(("begin", *what))
        yield
        events.append(("end", *what))

    stream = SimpleNamespace(wait_stream=lambda other: events.append("wait"))
    stub = SimpleNamespace(
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda _: noted("stream"),
        graph_pool_handle=lambda: "pool",
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: events.append("replay")),
        device=lambda device: noted("device", device),
        graph=lambda graph, pool, stream, capture_error_mode: noted("graph", pool, stream),
    )
    monkeypatch.setattr(torch, "cuda", stub)
    record = cuda_graphs(torch.device("cuda:1"))

    def run() -> list[Tensor]:
        events.append("run")
        return [torch.ones(1)]

    play, [said] = record(run)
    play()
    assert torch.equal(said, torch.ones(1))
    once = ["wait", ("begin", "stream"), "run", ("end", "stream"), "wait"]
    captured = [("begin", "graph", "pool", stream), "run", ("end", "graph", "pool", stream)]
    place = "device", torch.device("cuda:1")
    assert events == [("begin", *place), *once, *captured, ("end", *place), "replay"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    """Graphs themselves."""
    given = {"input_ids": PROMPT.cuda(), "max_new_tokens": 40, "do_sample": False}
    eager = SpecGenerator(tiny("llama").cuda(), backend="eager").generate(**given)
    target, draft = (LanguageModel(tiny("llama", seed=seed).cuda(), backend="compiled") for seed in (0, 1))
    assert torch.equal(SpecGenerator(target, draft).generate(**given).sequences, eager.sequences)
    assert target.ragged.compiled._recordings
