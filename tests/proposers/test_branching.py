"""Branching drafts: trees hold the best nodes by joint probability, recomputed from scratch in every round."""

import math
import random
from unittest.mock import Mock

import pytest
import torch
from transformers import PreTrainedModel

from specdec.core.budget import Budget
from specdec.core.drafts import Commit, Proposer, Sampler
from specdec.core.tree import Tree, depths_of
from specdec.decoding.processors import Processors
from specdec.decoding.strategies import Coupled, Greedy
from specdec.models import LanguageModel
from specdec.proposers import ModelDraft
from tests.proposers.fakes import FakeSequence, take, task
from tests.tiny import tiny

NOTHING = Processors()
SAMPLER = Greedy(NOTHING).sampler
TASK = task(SAMPLER)
Path = tuple[int, ...]


@torch.no_grad()
def log_probs(model: PreTrainedModel, text: list[int]) -> list[float]:
    return torch.log_softmax(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1], -1).tolist()


def best_tree(model: PreTrainedModel, text: list[int], budget: Budget) -> dict[Path, float]:
    """Every path of the tree and its log-probability, by the definition: `branches` ends a level, two children each."""
    assert budget.branches is not None
    found: dict[Path, float] = {}
    ends: list[Path] = [()]
    for _ in range(budget.limit):
        children = {
            (*end, token): found.get(end, 0.0) + score
            for end in ends
            for token, score in enumerate(log_probs(model, [*text, *end]))
        }
        level = sorted(children, key=lambda path: -children[path])[: 2 * budget.branches]
        found |= {path: children[path] for path in level}
        ends = level[: budget.branches]
    best = sorted(found, key=lambda path: -found[path])[: budget.branches * budget.limit]
    return {path: found[path] for path in best}


def paths(tree: Tree) -> dict[Path, float]:
    belief = tree.confidence or []
    ways = [tree.path(node) for node in range(len(tree))]
    return {tuple(tree.tokens[n] for n in way): sum(math.log(belief[n]) for n in way) for way in ways}


def nodes_of(tree: Tree, tokens: list[int]) -> list[int]:
    """The nodes on the path that reads `tokens`."""
    children, found = tree.children(), [-1]
    for token in tokens:
        found.append(children[found[-1], token])
    return found[1:]


def search_on(session: Proposer, row: FakeSequence, proposal: Tree, rng: random.Random) -> None:
    """A round of a search with two beams of equal length somewhere in the branches; the session is told."""
    whole = row.tree.graft(proposal, row.leaves) if row.tree.tokens else proposal
    depths, children = depths_of(whole.parents), whole.children()
    depth = rng.choice([-1, *depths])
    parents = [rng.choice([n for n, d in enumerate(depths) if d == depth] or [-1]) for _ in range(2)]
    known = {parent: [(p, t) for p, t in children if p == parent] for parent in parents}
    ends = [rng.choice([*known[parent], (parent, rng.randrange(3, 64))]) for parent in parents]
    ends = list(dict.fromkeys(ends))
    ways = [whole.path(parent) for parent, _ in ends]
    shared = ways[0]
    for way in ways:
        shared = [node for node, other in zip(shared, way, strict=False) if node == other]
    rest = {n for way in ways for n in way} | {children[end] for end in ends if end in children}
    path = [*shared, *sorted(rest - set(shared))]
    number = {-1: -1} | {node: max(i - len(shared), -1) for i, node in enumerate(path)}
    kept = whole.part(path, len(shared))
    fresh = [end for end in ends if end not in children]
    row.tokens += [whole.tokens[node] for node in shared]
    row.tree = Tree(kept.tokens + [t for _, t in fresh], kept.parents + [number[p] for p, _ in fresh])
    made = {end: len(kept) + i for i, end in enumerate(fresh)}
    row.leaves = tuple(made[end] if end in made else number[children[end]] for end in ends)
    row.leaf_scores = tuple(-rng.random() for _ in ends)
    session.update([Commit(row, path, len(shared))])


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "qwen3_next", "bloom"])
def test_trees_are_the_best_nodes(name: str) -> None:
    """Ragged rows, whatever was accepted before; on attention, windows, positions from slots, and recurrence."""
    rng = random.Random(name)
    model = tiny(name)
    rows = [FakeSequence([rng.randrange(3, 64) for _ in range(n)], n, task=TASK) for n in (1, 4, 9)]
    session = ModelDraft(LanguageModel(model)).start(64)
    for turn in range(3):
        budgets = [Budget.sure(rng.choice([0, 1, 3]), branches=rng.choice([2, 3])) for _ in rows]
        for row, budget, tree in zip(rows, budgets, session.propose(rows, budgets), strict=True):
            expected = best_tree(model, row.tokens, budget)
            found = paths(tree)
            assert found.keys() == expected.keys()
            for path, score in expected.items():
                assert found[path] == pytest.approx(score, abs=1e-3)
            accepted = rng.choice([[], *map(list, found)])
            take(session, row, tree, nodes_of(tree, accepted), rng.randrange(3, 64))
        if turn == 1:
            session.drop([rows.pop(0).id])


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_what_was_accepted_is_not_read_again(name: str) -> None:
    """A path that the draft has fed becomes text; so much is fed as came after it."""
    session, row = ModelDraft(LanguageModel(tiny(name))).start(64), FakeSequence([5, 6, 7], task=TASK)
    budget = Budget.sure(3, branches=2)
    [tree] = session.propose([row], [budget])
    deepest = tree.path(max(range(len(tree)), key=depths_of(tree.parents).__getitem__))
    take(session, row, tree, deepest, 11)
    session._settle([row])
    [slot] = [cached.cache_row for cached in session._cached.values()]
    assert session._session.length(slot) == 3 + 2
    [tree] = session.propose([row], [budget])
    assert paths(tree).keys() == best_tree(tiny(name), row.tokens, budget).keys()


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_silence_and_rewinding(name: str) -> None:
    """A tree of which nothing was heard is forgotten, and so is text from where it was written anew."""
    model, budget = tiny(name), Budget.sure(3, branches=2)
    session, row = ModelDraft(LanguageModel(model)).start(64), FakeSequence([5, 6, 7, 8], task=TASK)
    for turn in range(5):
        [tree] = session.propose([row], [budget])
        assert paths(tree).keys() == best_tree(model, row.tokens, budget).keys()
        if turn == 1:
            row.tokens += [9]
        if turn == 2:
            take(session, row, tree, tree.path(len(tree) - 1), 4)
            row.tokens = [*row.tokens[:2], 3, 9, 20]


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "bloom"])
def test_branches_settle(name: str) -> None:
    """Whatever becomes of a search's branches, the proposal is that of a session which has heard of nothing."""
    rng, model = random.Random(name), LanguageModel(tiny(name))
    session = ModelDraft(model).start(64)
    rows = [FakeSequence([rng.randrange(3, 64) for _ in range(n)], n, task=TASK) for n in (2, 7)]
    for _ in range(8):
        budgets = [Budget.sure(rng.choice([0, 1, 2, 2]), branches=2) for _ in rows]
        trees = session.propose(rows, budgets)
        anew = ModelDraft(model).start(64).propose(rows, budgets)
        for row, tree, expected in zip(rows, trees, anew, strict=True):
            assert (tree.tokens, tree.parents) == (expected.tokens, expected.parents)
            assert tree.confidence == pytest.approx(expected.confidence, abs=1e-3)
            search_on(session, row, tree, rng)


def test_branches_are_kept_while_a_search_settles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next leaf alone is fed. (The text's last token and all branches were, where the text had not grown.)"""
    row = FakeSequence([5, 6, 7], tree=Tree.chain([8, 9]), leaves=(1,), task=TASK)
    session = ModelDraft(LanguageModel(tiny("llama"))).start(64)
    session.propose([row], [Budget.sure(1, branches=2)])
    monkeypatch.setattr(session._session, "run", run := Mock(wraps=session._session.run))
    row.tree, row.leaves = Tree.chain([8, 9, 10]), (2,)
    session.update([Commit(row, [0, 1], 0)])
    [tree] = session.propose([row], [Budget.sure(1, branches=2)])
    assert [call.args[0][0].num_new for call in run.call_args_list] == [1]
    assert paths(tree).keys() == best_tree(tiny("llama"), [*row.tokens, 8, 9, 10], Budget.sure(1, branches=2)).keys()


def test_no_branch_goes_on_after_the_end_of_the_text() -> None:
    """The likeliest guess ends the text: it is proposed, its siblings are continued, and it is not."""

    def guess(**more: frozenset[int]) -> set[Path]:
        row = FakeSequence([5, 6, 7], task=task(SAMPLER, **more))
        session = ModelDraft(LanguageModel(tiny("llama"))).start(64)
        return set(paths(session.propose([row], [Budget.sure(4, branches=3)])[0]))

    end = max(guess(), key=len)[0]
    found = guess(ends=frozenset({end}))
    assert (end,) in found
    assert not any(end in path[:-1] for path in found)
    assert any(len(path) > 1 for path in found)


def test_one_pass_per_level() -> None:
    """A tree costs as many draft passes as a chain of its depth, and the last one that finds no better nodes."""
    session = ModelDraft(LanguageModel(tiny("llama"))).start(64)
    [tree] = session.propose([FakeSequence([5, 6, 7], task=TASK)], [Budget.sure(4, branches=3)])
    assert len(tree) == 12
    assert tree.depth <= session._session.passes <= tree.depth + 1


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_chains_and_trees_in_turn(name: str) -> None:
    """Plans of one branch get the chain, in between others too; each kind reads the text that came without it."""
    model = tiny(name)
    rows = [FakeSequence([5, 6, 7], 0, task=TASK), FakeSequence([8, 9], 1, task=TASK)]
    session = ModelDraft(LanguageModel(model)).start(64)
    for turn, branches in enumerate((1, 1, 3, 1, 2, 2, 1)):
        budget = Budget.sure(3, branches=branches)
        for row, tree in zip(rows, session.propose(rows, [budget] * len(rows)), strict=True):
            if branches == 1:
                assert tree.is_chain
                alone = FakeSequence(list(row.tokens), task=task(SAMPLER))
                [chain] = ModelDraft(LanguageModel(model)).start(64).propose([alone], [budget])
                assert tree.tokens == chain.tokens
            else:
                assert paths(tree).keys() == best_tree(model, row.tokens, budget).keys()
            take(session, row, tree, tree.path(min(turn, len(tree)) - 1), 11)
        if turn == 3:
            session.drop([rows.pop(0).id])


@pytest.mark.parametrize("sampler", [SAMPLER, Coupled(NOTHING, 3).sampler])
def test_a_tree_begins_as_the_chain_does(sampler: Sampler) -> None:
    """With the same node, also where guesses repeat the target's noise."""
    draft = ModelDraft(LanguageModel(tiny("llama")))
    budgets = [Budget.sure(3, branches=branches) for branches in (1, 2)]
    chain, tree = (
        draft.start(64).propose([FakeSequence([5, 6, 7], task=task(sampler))], [budget])[0] for budget in budgets
    )
    assert tree.tokens[0] == chain.tokens[0]


def test_a_token_the_draft_does_not_know_silences_that_row_only() -> None:
    """It may stand anywhere in the text or in a search's branches. (Only the last one was looked at: IndexError.)"""
    rows = [
        FakeSequence([1, 5], 0, task=TASK),
        FakeSequence([3, 4], 1, task=TASK),
        FakeSequence([3, 55, 4], 2, task=TASK),
    ]
    session = ModelDraft(LanguageModel(tiny("llama", vocab=50))).start(64)
    budgets = [Budget.sure(2, branches=2)] * 3
    assert list(map(len, session.propose(rows, budgets))) == [4, 4, 0]
    rows[0].tokens += [55, 6]
    for tree, count in ((Tree.chain([55, 6]), 0), (Tree.chain([6]), 4)):
        rows[1].tree, rows[1].leaves = tree, (len(tree) - 1,)
        session.update([Commit(row, [], 0) for row in rows])
        assert list(map(len, session.propose(rows, budgets))) == [0, count, 0]
