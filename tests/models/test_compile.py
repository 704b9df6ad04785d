"""The second gear computes what the first one does, and compiles a handful of times."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from torch._dynamo.utils import counters

from specdec import SpecGenerator
from specdec.errors import UnsupportedError
from specdec.models import LanguageModel
from specdec.types import Tree
from tests.models.exact import Twin
from tests.tiny import tiny

NAMES = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "gpt2", "gemma2")]  # 10 to 60 seconds each


@functools.lru_cache(maxsize=1)
def _language(name: str) -> LanguageModel:
    return LanguageModel(tiny(name), gear="compiled")


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", NAMES)
def test_rollback_trees_and_growth(name: str) -> None:
    """One row through everything that a decoding run does, past the first capacity."""
    twin = Twin(_language(name))
    twin.prefill(70)
    for _ in range(2):
        twin.step([twin.chain(1)], [1], [[0]])
        twin.step([twin.chain(5)], [5], [[0, 1]])
        twin.step([twin.chain(2)], [1], [[0, 1]])
        twin.step([twin.tree()], [7], [[0, 2, 4]])
        twin.step([twin.tree()], [1], [[]])
        twin.step([twin.chain(20)], [20], [list(range(18))])
        twin.truncate([len(twin.texts[0]) - 3])
    twin.prefill(70)
    assert twin.session.store.capacity > 128
    twin.step([twin.chain(3)], [3], [[0, 1]])
    twin.step([twin.chain(1)], [1], [[0]])


@pytest.mark.parametrize("name", NAMES)
def test_ragged_rows(name: str) -> None:
    """Rows of different lengths, sitting out, reordered, joining, each as if it were alone."""
    twin = Twin(_language(name), 3)
    twin.prefill(20, 4, 13)
    twin.step([twin.chain(1) for _ in range(3)], [1, 1, 1], [[0]] * 3)
    twin.step([twin.chain(3), twin.chain(0), twin.chain(5)], [3, 0, 2], [[0], [], [0, 1, 2]])
    twin.select([2, 0])
    twin.step([twin.tree(), twin.chain(2)], [7, 1], [[5, 6], [0]])
    twin.add(0)
    twin.step([twin.chain(1), twin.chain(2), twin.chain(9)], [1, 2, 1], [[0], [0], list(range(9))])


@pytest.mark.parametrize("name", NAMES)
def test_few_graphs(name: str) -> None:
    """Two graphs serve one row at every length and width, in all sessions; two more serve every batch."""
    torch.compiler.reset()
    language, before = LanguageModel(tiny(name), gear="compiled"), _graphs()
    for prompt in (1, 10, 120, 300):
        twin = Twin(language, seed=prompt)
        twin.forward([twin.chain(prompt)], [1])
        twin.session.commit(twin.rows, [list(range(prompt))])
        for nodes in (1, 3, 1, 7, 20, 2, 4, 8, 64, 1):
            for keep in {1, nodes}:
                twin.forward([twin.chain(nodes)], [keep])
            twin.session.commit(twin.rows, [list(range(nodes))])
    assert _graphs() - before == 2
    for rows in (3, 2, 5):
        twin = Twin(language, rows)
        twin.prefill(*range(10, 10 + rows))
        twin.step([twin.chain(1) for _ in range(rows)], [1] * rows, [[0]] * rows)
        twin.select([1, 0])
        twin.step([twin.tree(), twin.chain(2)], [7, 2], [[0, 1], [0]])
    assert _graphs() - before == 4


@pytest.mark.slow
def test_generation_is_the_same() -> None:
    """Assisted greedy text does not depend on the gear, nor does it compile again in the next call."""
    target, draft = tiny("llama"), tiny("llama")
    eager, compiled = SpecGenerator(target, draft), SpecGenerator(target, draft, gear="compiled")
    ids = torch.tensor([[5, 9, 33, 7, 12]])
    graphs = set()
    for _ in range(3):
        given = {"input_ids": ids, "max_new_tokens": 150, "do_sample": False}
        assert torch.equal(compiled.generate(**given).sequences, eager.generate(**given).sequences)
        graphs.add(_graphs())
    assert len(graphs) == 1


@pytest.mark.slow
def test_several_threads() -> None:
    """Sessions of one model run side by side, the first of them compiling."""
    language, found = LanguageModel(tiny("llama"), gear="compiled"), []

    def run() -> None:
        session = language.session()
        rows = session.add(1)
        for size in (9, 1, 4, 1):
            scores = session.forward(rows, [Tree.chain(list(range(3, 3 + size)))], [1])
            session.commit(rows, [list(range(size))])
        found.append(scores[0].logits)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert all(torch.equal(logits, found[0]) for logits in found)


@pytest.mark.slow
def test_too_many_recompilations_run_eager() -> None:
    """Beyond the compiler's limit the ordinary forward goes on, and says so."""
    twin = Twin(LanguageModel(tiny("llama"), gear="compiled"))
    with torch._dynamo.config.patch(recompile_limit=1):
        twin.prefill(20)
        twin.step([twin.chain(1)], [1], [[0]])
        with pytest.warns(RuntimeWarning, match="gave up"):
            twin.step([twin.chain(5)], [5], [[0, 1]])
        twin.step([twin.chain(1)], [1], [[0]])


def test_extras_come_from_the_ordinary_forward() -> None:
    """Hidden states need no graph of their own."""
    session = _language("llama").session()
    rows = session.add(1)
    session.forward(rows, [Tree.chain([3, 4, 5])], [1])
    session.commit(rows, [[0, 1, 2]])
    before = _graphs()
    scores = session.forward(rows, [Tree.chain([6])], [1], output_hidden_states=True)
    assert scores[0].hidden_states is not None
    assert _graphs() == before


def test_a_changed_weight_is_used() -> None:
    """Guards leave modules alone, but weights are read anew in every pass and their type is looked at."""
    model = tiny("llama")
    twin = Twin(LanguageModel(model, gear="compiled"))
    twin.prefill(20)
    twin.step([twin.chain(1)], [1], [[0]])
    with torch.no_grad():
        model.lm_head.weight.mul_(-2)
    twin.step([twin.chain(1)], [1], [[0]])
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    twin.step([twin.chain(1)], [1], [[0]])


@pytest.mark.parametrize(("name", "reason"), [("mamba", "store"), ("bloom", "position_ids"), ("t5", "encoder")])
def test_models_without_it(name: str, reason: str) -> None:
    """Others say why, and what to do."""
    model = tiny(name)
    with pytest.raises(UnsupportedError, match=f"{reason}.*leave out `gear`='compiled'"):
        LanguageModel(model, gear="compiled")
