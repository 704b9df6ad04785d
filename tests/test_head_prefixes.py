"""Heads of all kinds beside other requests: prompts that begin alike, come late, and are read in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specdec import SpecGenerator
from specdec.draft.hidden import HeadSession
from specdec.types import Plan, Row, Tree
from tests.heads import dflash_folder, eagle_folder
from tests.test_blocks import PEAGLE
from tests.test_gemma4 import _all_shared, pair  # noqa: F401
from tests.test_heads import RUN, target
from tests.test_mtp import with_layers

FIRST = [(7 * i) % 50 + 5 for i in range(40)]
DRAFTING: dict[str, Any] = {**RUN, "schedule": "constant", "num_assistant_tokens": 3}
KINDS = [
    "eagle",
    "mtp2",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("peagle", "dflash", "mtp", "gemma4")),
]


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], list[int]]:
    """What was guessed after every text."""
    seen: dict[tuple[int, ...], list[int]] = {}
    propose = HeadSession.propose

    def spied(self: HeadSession, rows: Sequence[Row], plans: Sequence[Plan]) -> list[Tree]:
        trees = propose(self, rows, plans)
        seen.update((tuple(row.tokens), tree.tokens) for row, tree in zip(rows, trees, strict=True) if tree.tokens)
        return trees

    monkeypatch.setattr(HeadSession, "propose", spied)
    return seen


def made(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A tiny target and a head of a kind."""
    if kind == "gemma4":
        return pair(window=5)
    if kind in ("mtp", "mtp2"):
        return with_layers(monkeypatch, "deepseek_v3", 2 if kind == "mtp2" else 1), "mtp"
    model = target()
    more = PEAGLE if kind == "peagle" else {}
    return model, dflash_folder(folder, model) if kind == "dflash" else eagle_folder(folder, **more)


@pytest.mark.parametrize("kind", KINDS)
def test_what_others_have_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proposals: dict[tuple[int, ...], list[int]]
) -> None:
    """A request that comes late continues a running one, in the head too, and guesses as if it had come alone.

    So does the running one. (Later layers for multi-token prediction lacked a feature of one token, and took that of
    another one.) What only rows that have left had read is read again, since their hidden states are gone.
    """
    model, draft = made(kind, tmp_path / "head", monkeypatch)
    prompts = [[*FIRST, 30], [*FIRST[:32], 9, 8, 7, *FIRST]]
    generator = SpecGenerator(model, draft, prefix_cache=True)
    stream = generator.stream([FIRST], **{**DRAFTING, "max_new_tokens": 40})
    next(stream)
    late = [generator.generate([prompt], **DRAFTING, prefill_chunk_size=7) for prompt in prompts]
    assert list(stream)
    beside = dict(proposals)
    again = generator.generate([FIRST], **DRAFTING)
    assert [out.stats.cached_prompt_tokens for out in late] == [39, 31]
    assert again.stats.cached_prompt_tokens == 0
    for prompt, out in zip([*prompts, FIRST], [*late, again], strict=True):
        proposals.clear()
        alone = SpecGenerator(model, draft, prefix_cache=False).generate([prompt], **DRAFTING)
        assert out.sequences.tolist() == alone.sequences.tolist()
        assert out.sequences.tolist() == SpecGenerator(model).generate([prompt], **RUN).sequences.tolist()
        assert out.stats.num_draft_tokens > 0
        assert proposals
        assert all(beside[text][: len(guesses)] == guesses for text, guesses in proposals.items())
