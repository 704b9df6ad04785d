"""Drafts that know only sequences, at work on searches."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from specdec.core.drafts import Commit, DraftSession, Plan, SequenceView
from specdec.core.tree import Tree
from specdec.proposers import BestBranch, FunctionDrafter, NgramDrafter, TextBridge
from tests.proposers.fakes import FakePlan, FakeSequence, follow, one
from tests.proposers.test_other_tokenizer import Oracle, tokenizer


class Told(DraftSession):
    """Notes what it hears, and keeps texts by that alone."""

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}
        self.commits: list[Commit] = []
        self.released: list[int] = []

    def propose(self, rows: Sequence[SequenceView], plans: Sequence[Plan]) -> list[Tree]:
        for row in rows:
            held = self.texts.setdefault(row.id, [])
            held += row.tokens[len(held) :]
            assert held == row.tokens
            assert not row.tree.tokens
            assert row.leaves == (-1,)
        return [Tree.chain([7, 8][: plan.limit]) for plan in plans]

    def commit(self, commits: Sequence[Commit]) -> None:
        self.commits += commits

    def rewind(self, row: SequenceView, length: int) -> None:
        del self.texts[row.id][length:]

    def release(self, seq_ids: Sequence[int]) -> None:
        self.released += seq_ids


def test_texts_pass_through() -> None:
    """A row without branches is the inner session's own row, and it hears what became of its proposal."""
    inner = Told()
    session, row = BestBranch(inner), FakeSequence([1, 2])
    follow(session, row, one(session, row), 1, 5)
    assert inner.commits == [Commit(row, [0], 1)]
    assert inner.texts == {0: [1, 2]}
    session.release([0, 3])
    assert inner.released == [0, 3]


@pytest.mark.parametrize("seed", range(3))
def test_the_best_branch_is_the_text(seed: int) -> None:
    """Whichever branch is the best one, the inner session is told where its text is another one."""
    rng, inner = random.Random(seed), Told()
    session, rows = BestBranch(inner), [FakeSequence([1, 2, 3], 0), FakeSequence([4], 1)]
    for turn in range(12):
        for tree in session.propose(rows, [FakePlan(2)] * 2):
            assert tree.tokens == [7, 8]
        for row in rows:
            row.tokens += [rng.randrange(5) for _ in range(rng.randint(0, 1))]
            row.tree = Tree([rng.randrange(5) for _ in range(4)], [-1, -1, 0, 1])
            row.leaves = (rng.choice([2, 3]), rng.choice([2, 3]))
        session.commit([Commit(row, [], 0) for row in rows])
        assert turn == 0 or not inner.commits[2:]


def test_copies_after_the_best_branch() -> None:
    """The proposal continues the first leaf."""
    row = FakeSequence([5, 6, 7, 8, 9], tree=Tree([5, 6], [-1, -1]), leaves=(1, 0))
    assert one(BestBranch(NgramDrafter().start(50)), FakeSequence([5, 6, 7, 8, 5, 6]), 2) == [7, 8]
    session = BestBranch(FunctionDrafter(lambda tokens, k: tokens[-1:]).start(50))
    assert one(session, row, 2) == [6]
    row.leaves = (0, 1)
    assert one(session, row, 2) == [5]


def test_a_bridge_reads_the_new_best_branch() -> None:
    """Its own rows go back with the search's."""
    ours, theirs = tokenizer("bytes-320"), tokenizer("bytes-420")
    oracle = Oracle(theirs, "the lazy dog sleeps")
    session = BestBranch(TextBridge(oracle, ours, theirs).start(len(ours)))
    text, wrong, right = (ours.encode(part) for part in ("the", " quick", " lazy"))
    tree = Tree(wrong + right, [*range(-1, len(wrong) - 1), -1, *range(len(wrong), len(wrong) + len(right) - 1)])
    row = FakeSequence(list(text), tree=tree, leaves=(len(wrong) - 1, len(tree) - 1))
    one(session, row)
    row.leaves = row.leaves[::-1]
    assert ours.decode(one(session, row, 20)).startswith(" dog")
    assert theirs.decode(oracle.seen[-1]) == "the lazy"
