"""Every architecture: what a session computes is what the model computes from scratch."""

import functools
import random

import pytest

from specdec.models import LanguageModel
from tests.matrix import slow
from tests.models.exact import TOLERANCE, twin_of
from tests.tiny import NAMES, tiny

pytestmark = pytest.mark.filterwarnings("ignore")  # missing kernels of recurrent models

COMMON = (
    *("llama", "gpt2", "mistral", "gemma2", "gpt_neo", "bloom", "mamba", "mamba2", "qwen3_next"),
    *("t5", "bart", "whisper"),
)
CASES = [n if n in COMMON else slow(n) for n in NAMES]


@functools.lru_cache(maxsize=2)
def _language(name: str) -> LanguageModel:
    return LanguageModel(tiny(name))


@pytest.mark.parametrize("name", CASES)
def test_a_row(name: str) -> None:
    """A prompt, chains and trees of which a part is kept or nothing, text that is taken back, guesses of a draft."""
    twin = twin_of(_language(name))
    twin.step([twin.chain(20)], [3], [list(range(20))])
    twin.step([twin.chain(1)], [1], [[0]])
    for size, kept in ((5, [0, 1]), (3, []), (3, [0, 1, 2])):
        twin.step([twin.chain(size)], [size], [kept])
    twin.truncate([15])
    twin.step([twin.tree()], [7], [[0, 2, 4]])
    twin.step([twin.tree()], [4], [[5, 6]])
    twin = twin_of(_language(name))
    twin.prefill(20)
    for accepted in (2, 0, 3):
        length = len(twin.texts[0])
        for _ in range(3):
            tree = twin.chain(1)
            assert twin.run([tree], [1]) < TOLERANCE
            twin.commit([tree], [[0]], final=False)
        twin.truncate([length + accepted])
        twin.step([twin.chain(2)], [2], [[0, 1]])


@pytest.mark.parametrize("name", CASES)
def test_ragged_rows(name: str) -> None:
    """Rows of different lengths, sitting out, reordered, repeated, leaving and joining, each as if it were alone."""
    twin = twin_of(_language(name), 3)
    twin.prefill(20, 4, 13)
    twin.step([twin.chain(1) for _ in range(3)], [1, 1, 1], [[0]] * 3)
    twin.step([twin.chain(3), twin.chain(0), twin.chain(5)], [3, 0, 2], [[0], [], [0, 1, 2]])
    twin.step([twin.tree(), twin.chain(2), twin.tree()], [7, 1, 5], [[5, 6], [0], [0, 2, 4]])
    for rows in ([2, 0, 0, 1], [1, 1, 0, 3], [3, 2], [1, 0, 1]):
        twin.select(rows)
        trees = [twin.tree() for _ in rows]
        twin.step(trees, [7] * len(rows), [[0, 1, 3] if i % 2 else [0] for i in range(len(rows))])
    twin.add(1)
    trees = [twin.chain(size) for size in (1, 2, 0, 9)]
    twin.step(trees, [1, 2, 0, 1], [[0], [0], [], list(range(9))])
    twin.step([twin.chain(2) for _ in range(4)], [2] * 4, [[0, 1]] * 4)


@pytest.mark.parametrize("seed", [0, slow(1)])
@pytest.mark.parametrize("name", CASES)
def test_any_sequence_of_operations(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows join, run in any order and company, branch, go back, fork and leave: each is what it would be alone."""
    rng = random.Random(f"{name} {seed}")
    twin = twin_of(_language(name), 3)
    twin.random = rng
    monkeypatch.setattr(twin.language, "weight_bytes", [0, 10**9][seed])  # rows share no pass, or all do
    for _ in range(14):
        chosen = rng.sample(range(len(twin.rows)), rng.randint(1, len(twin.rows)))
        twin.some(chosen, trees=rng.random() < 0.7, branches=rng.choice([0.0, 0.7]))
        match rng.randrange(5):
            case 0 if len(twin.rows) > 1:
                twin.leave(rng.randrange(len(twin.rows)))
            case 1:
                row = rng.randrange(len(twin.rows))
                twin.fork(row, rng.choice([len(twin.texts[row]), rng.randint(0, len(twin.texts[row]))]))
            case 2:
                twin.truncate([rng.randint(len(text) // 2, len(text)) for text in twin.texts])
            case 3:
                twin.add(rng.randrange(3))
    twin.branch(1)
    for length in (None, 1):
        twin.fork(0, length)
    for _ in range(2):
        twin.some(range(len(twin.rows)))
