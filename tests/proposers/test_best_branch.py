"""Drafts that know only sequences, at work on searches."""

import random

import pytest

from specdec.core.drafts import SequenceView
from specdec.core.tree import Tree
from specdec.proposers import FunctionDraft, ModelDraft, TextBridge, best_branch
from tests.proposers.fakes import FakeBudget, FakeModel, FakeSequence, one
from tests.proposers.test_other_tokenizer import Oracle, tokenizer


@pytest.mark.parametrize("seed", range(3))
def test_the_best_branch_is_the_text(seed: int) -> None:
    """Whichever branch is the best one, a draft continues it, and reads only what the last one had not."""
    rng, model = random.Random(seed), FakeModel()
    session, rows = ModelDraft(model).start(50), [FakeSequence([1, 2, 3], 0), FakeSequence([4], 1)]
    known: dict[int, list[int]] = {0: [], 1: []}
    for turn in range(12):
        views: list[SequenceView] = [best_branch(row) for row in rows]
        trees = session.propose(views, [FakeBudget(2)] * 2)
        for view, tree, fed in zip(views, trees, model.fed[2 * turn], strict=True):
            assert tree.tokens == model.greedy(view.tokens, 2)
            before = known[view.id]
            same = next((i for i, (a, b) in enumerate(zip(before, view.tokens, strict=False)) if a != b), len(before))
            assert fed == len(view.tokens) - min(same, len(view.tokens) - 1)
            known[view.id] = [*view.tokens, tree.tokens[0]]
        for row in rows:
            row.tokens += [rng.randrange(5) for _ in range(rng.randint(0, 1))]
            row.tree = Tree([rng.randrange(5) for _ in range(4)], [-1, -1, 0, 1])
            row.leaves = (rng.choice([2, 3]), rng.choice([2, 3]))


def test_continues_the_first_leaf() -> None:
    """A function is asked after every leaf, whichever is the best."""
    row = FakeSequence([5, 6, 7, 8, 9], tree=Tree([5, 6], [-1, -1]), leaves=(1, 0))
    session = FunctionDraft(lambda tokens, k: tokens[-1:]).start(50)
    assert one(session, row, 2) == [6, 5]
    assert best_branch(row).tokens == [5, 6, 7, 8, 9, 6]


def test_a_bridge_reads_the_new_best_branch() -> None:
    """Its own rows go back with the search's."""
    ours, theirs = tokenizer("bytes-320"), tokenizer("bytes-420")
    oracle = Oracle(theirs, "the lazy dog sleeps")
    session = TextBridge(oracle, ours, theirs).start(len(ours))
    text, wrong, right = (ours.encode(part) for part in ("the", " quick", " lazy"))
    tree = Tree(wrong + right, [*range(-1, len(wrong) - 1), -1, *range(len(wrong), len(wrong) + len(right) - 1)])
    row = FakeSequence(list(text), tree=tree, leaves=(len(wrong) - 1, len(tree) - 1))
    one(session, row)
    row.leaves = row.leaves[::-1]
    assert ours.decode(one(session, row, 20)).startswith(" dog")
    assert theirs.decode(oracle.seen[-1]) == "the lazy"
