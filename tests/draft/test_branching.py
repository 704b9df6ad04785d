"""Branching drafts: trees hold the best nodes by joint probability, recomputed from scratch in every round."""

from __future__ import annotations

import math
import random

import pytest
import torch
from transformers import PreTrainedModel

from specdec.draft import ModelDrafter, lookahead
from specdec.logits import Processors
from specdec.models import LanguageModel
from specdec.schedule.rules import Limit
from specdec.select import Coupled, Greedy, PerRow, Rejection
from specdec.types import Tree
from tests.tiny import tiny

from .fakes import FakeRow, call

NOTHING = Processors()
Path = tuple[int, ...]


@torch.no_grad()
def log_probs(model: PreTrainedModel, text: list[int]) -> list[float]:
    return torch.log_softmax(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1], -1).tolist()


def best_tree(model: PreTrainedModel, text: list[int], plan: Limit) -> dict[Path, float]:
    """Every path of the tree and its log-probability, by the definition: `branches` ends a level, two children each."""
    assert plan.branches is not None
    found: dict[Path, float] = {}
    ends: list[Path] = [()]
    for _ in range(plan.limit):
        children = {
            (*end, token): found.get(end, 0.0) + score
            for end in ends
            for token, score in enumerate(log_probs(model, [*text, *end]))
        }
        level = sorted(children, key=lambda path: -children[path])[: 2 * plan.branches]
        found |= {path: children[path] for path in level}
        ends = level[: plan.branches]
    best = sorted(found, key=lambda path: -found[path])[: plan.branches * plan.limit]
    return {path: found[path] for path in best}


def paths(tree: Tree) -> dict[Path, float]:
    belief = tree.confidence or []
    ways = [tree.path(node) for node in range(len(tree))]
    return {tuple(tree.tokens[n] for n in way): sum(math.log(belief[n]) for n in way) for way in ways}


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "qwen3_next", "bloom"])
def test_trees_are_the_best_nodes(name: str) -> None:
    """Ragged rows, whatever was accepted before; on attention, windows, positions from slots, and recurrence."""
    rng = random.Random(name)
    model = tiny(name)
    rule = Greedy(NOTHING, width=64).rule
    rows = [FakeRow([rng.randrange(3, 64) for _ in range(n)], n) for n in (1, 4, 9)]
    rules = PerRow({row.key: rule for row in rows})
    session = ModelDrafter(LanguageModel(model)).start(call(rule, vocab_size=64, branching=rules))
    for turn in range(3):
        plans = [Limit(rng.choice([0, 1, 3]), branches=rng.choice([2, 3])) for _ in rows]
        for row, plan, tree in zip(rows, plans, session.propose(rows, plans), strict=True):
            expected = best_tree(model, row.tokens, plan)
            found = paths(tree)
            assert found.keys() == expected.keys()
            for path, score in expected.items():
                assert found[path] == pytest.approx(score, abs=1e-3)
            accepted = rng.choice([[], *map(list, found)])
            row.tokens += [*accepted, rng.randrange(3, 64)]
        if turn == 1:
            session.release([rows.pop(0).key])


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_text_that_grew_long_without_the_draft(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read in chunks like a prompt. (Old branches were taken for its beginning.)"""
    monkeypatch.setattr(lookahead, "PREFILL_CHUNK", 4)
    model, plan = tiny(name), Limit(3, branches=2)
    rule, rows = Greedy(NOTHING, width=64).rule, [FakeRow([5, 6, 7], 0), FakeRow([8, 9], 1)]
    rules = PerRow({row.key: rule for row in rows})
    session = ModelDrafter(LanguageModel(model)).start(call(rule, vocab_size=64, branching=rules))
    for more in ([1], [9] * 6, [11, 12, 13], [4] * 9, [3]):
        for row, tree in zip(rows, session.propose(rows, [plan] * 2), strict=True):
            assert paths(tree).keys() == best_tree(model, row.tokens, plan).keys()
        rows[0].tokens += more
        rows[1].tokens += [3]


def test_branches_are_kept_while_a_search_settles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next leaf alone is fed. (The text's last token and all branches were, where the text had not grown.)"""
    strategy, row = Greedy(NOTHING, width=64), FakeRow([5, 6, 7], tree=Tree.chain([8, 9]), leaves=(1,))
    rules = PerRow({0: strategy.rule})
    session = ModelDrafter(LanguageModel(tiny("llama"))).start(call(strategy.rule, vocab_size=64, branching=rules))
    session.propose([row], [Limit(1, branches=2)])
    fed, inner = [], session._session
    forward = inner.forward

    def counting(trees, *rest):  # type: ignore[no-untyped-def]
        fed.append(len(trees[0]) - len(inner.crowns[0]))
        return forward(trees, *rest)

    monkeypatch.setattr(inner, "forward", counting)
    row.tree, row.leaves = Tree.chain([8, 9, 10]), (2,)
    [tree] = session.propose([row], [Limit(1, branches=2)])
    assert fed == [1]
    assert paths(tree).keys() == best_tree(tiny("llama"), [*row.tokens, 8, 9, 10], Limit(1, branches=2)).keys()


def test_no_branch_goes_on_after_the_end_of_the_text() -> None:
    """The likeliest guess ends the text: it is proposed, its siblings are continued, and it is not."""
    rule, row = Greedy(NOTHING, width=64).rule, FakeRow([5, 6, 7])
    rules = PerRow({0: rule})

    def guess(**more: frozenset[int]) -> set[Path]:
        session = ModelDrafter(LanguageModel(tiny("llama"))).start(call(rule, 64, branching=rules, **more))
        return set(paths(session.propose([row], [Limit(4, branches=3)])[0]))

    end = max(guess(), key=len)[0]
    found = guess(ends=frozenset({end}))
    assert (end,) in found
    assert not any(end in path[:-1] for path in found)
    assert any(len(path) > 1 for path in found)


def test_one_pass_per_level() -> None:
    """A tree costs as many draft passes as a chain of its depth, and the last one that finds no better nodes."""
    model = LanguageModel(tiny("llama"))
    strategy, row = Greedy(NOTHING, width=64), FakeRow([5, 6, 7])
    rules = PerRow({0: strategy.rule})
    session = ModelDrafter(model).start(call(strategy.rule, vocab_size=64, branching=rules))
    [tree] = session.propose([row], [Limit(4, branches=3)])
    assert len(tree) == 12
    assert tree.depth <= session._session.passes <= tree.depth + 1


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_chains_and_trees_in_turn(name: str) -> None:
    """Plans of one branch get the chain, in between others too; each kind reads the text that came without it."""
    model = tiny(name)
    rule, rows = Greedy(NOTHING, width=64).rule, [FakeRow([5, 6, 7], 0), FakeRow([8, 9], 1)]
    rules = PerRow({row.key: rule for row in rows})
    session = ModelDrafter(LanguageModel(model)).start(call(rule, vocab_size=64, branching=rules))
    chains = ModelDrafter(LanguageModel(model)).start(call(rule, vocab_size=64))
    for turn, branches in enumerate((1, 1, 3, 1, 2, 2, 1)):
        plan = Limit(3, branches=branches)
        for row, tree in zip(rows, session.propose(rows, [plan] * len(rows)), strict=True):
            if branches == 1:
                assert tree.is_chain
                assert [tree.tokens] == [t.tokens for t in chains.propose([row], [plan])]
            else:
                assert paths(tree).keys() == best_tree(model, row.tokens, plan).keys()
            row.tokens += [*tree.tokens[:turn], 11]
        if turn == 3:
            session.release([rows.pop(0).key])


@pytest.mark.parametrize("kind", [Greedy, Coupled, Rejection])
def test_one_branch_begins_as_the_chain_does(kind: type) -> None:
    """The first node is the one that a chain has, for every way to guess that repeats itself."""
    model = LanguageModel(tiny("llama"))
    strategy = kind(NOTHING, width=64) if kind is Greedy else kind(NOTHING, 3, width=64)
    row, chain = FakeRow([5, 6, 7]), ModelDrafter(model).start(call(strategy.rule, vocab_size=64))
    tree = ModelDrafter(model).start(call(strategy.rule, vocab_size=64, branching=PerRow({0: strategy.rule})))
    [ours] = tree.propose([row], [Limit(3, branches=1)])
    [theirs] = chain.propose([row], [Limit(3, branches=1)])
    if kind is Rejection:
        assert ours.is_chain
        assert ours.q is not None
        assert float(ours.q[0].sum()) == pytest.approx(1)
    else:
        assert ours.tokens[0] == theirs.tokens[0]


def test_a_token_the_draft_does_not_know_silences_that_row_only() -> None:
    """It may stand anywhere in the text or in a search's branches. (Only the last one was looked at: IndexError.)"""
    rule = Greedy(NOTHING, width=64).rule
    rows = [FakeRow([1, 5], 0), FakeRow([3, 4], 1), FakeRow([3, 55, 4], 2)]
    rules = PerRow({row.key: rule for row in rows})
    session = ModelDrafter(LanguageModel(tiny("llama", vocab=50))).start(call(rule, vocab_size=64, branching=rules))
    plans = [Limit(2, branches=2)] * 3
    assert list(map(len, session.propose(rows, plans))) == [4, 4, 0]
    rows[0].tokens += [55, 6]
    rows[1].tree, rows[1].leaves = Tree.chain([55, 6]), (1,)
    assert list(map(len, session.propose(rows, plans))) == [0, 0, 0]
    rows[1].tree, rows[1].leaves = Tree.chain([6]), (0,)
    assert list(map(len, session.propose(rows, plans))) == [0, 4, 0]
