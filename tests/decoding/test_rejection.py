"""Rejection and block verification give the target's law, by enumerating every random decision of the real code."""

from collections import defaultdict

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import NoRepeatNGramLogitsProcessor, PreTrainedTokenizerFast, TemperatureLogitsWarper

from specdec.core.tree import Tree
from specdec.core.work import Logits
from specdec.decoding import noise
from specdec.decoding.processors import Processors, Top
from specdec.decoding.strategies import Block, Match, Rejection
from specdec.decoding.strategies.sampling import child_weight, drawn_children, without_child
from specdec.errors import OptionError
from specdec.proposers import ModelDraft, TextBridge
from tests.decoding.toys import (
    NOTHING,
    Branching,
    decode,
    logits_of,
    propose,
    sprout,
    table,
    target_law,
    verify,
    walk,
    wrong,
)
from tests.matrix import in_pairs
from tests.proposers.fakes import FakeBudget, FakeModel, FakeSequence

V = 3
TARGET = table(1, V)
DRAFTS = {"other": table(2, V), "perfect": TARGET, "wrong": wrong(TARGET), "certain": table(3, V, 60.0)}


def law_of(branching, play) -> dict[tuple[int, ...], float]:
    law: dict[tuple[int, ...], float] = defaultdict(float)
    for weight, text in branching.runs(play):
        law[text] += weight
    return law


def assert_law(law, expected) -> None:
    assert sum(law.values()) == pytest.approx(1, abs=1e-5)
    for text in law.keys() | expected.keys():
        assert law.get(text, 0) == pytest.approx(expected.get(text, 0), abs=2e-6), text


@pytest.mark.parametrize("kind", [Rejection, Block])
def test_law_after_processors_that_read_the_prefix(monkeypatch, kind) -> None:
    """p and q are what processors leave: no token twice in a row, at half temperature, two candidates."""
    processors = Processors((NoRepeatNGramLogitsProcessor(1), TemperatureLogitsWarper(2.0), Top(2)))
    target, draft = table(4, 4), table(5, 4)

    def processed(prefix, logits):
        return processors(torch.tensor([prefix]), logits[None])[0]

    branching = Branching(monkeypatch)
    law = law_of(branching, lambda: decode(kind(processors, 0), target, draft, length=3, k=2)[0])
    assert_law(law, target_law(target, 3, processed))


@pytest.mark.parametrize("kind", [Rejection, Block, Match])
def test_guesses_leave_the_law_alone(monkeypatch, kind) -> None:
    """One-hot drafts (`q=None`), right or wrong: no law but the target's."""
    branching = Branching(monkeypatch)
    guesses = lambda row, k: Tree.chain([len(row.tokens) % V, 1][:k])  # noqa: E731
    law = law_of(branching, lambda: decode(kind(NOTHING, 0), TARGET, None, length=3, k=2, guesses=guesses)[0])
    assert_law(law, target_law(TARGET, 3))


def letters(*tokens: str) -> PreTrainedTokenizerFast:
    """A tokenizer of these tokens, the third of which joins the first two."""
    model = BPE({token: i for i, token in enumerate(tokens)}, [tokens[:2]])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))


@pytest.mark.parametrize("kind", [Rejection, Block])
def test_law_with_a_draft_of_another_tokenizer(monkeypatch, kind) -> None:
    """Guesses that come over the text bridge are one-hot: no law but the target's."""
    branching, sizes = Branching(monkeypatch), set()
    bridge = TextBridge(ModelDraft(FakeModel(V)), letters("a", "b", "ab"), letters("b", "a", "ba"))

    def play():
        proposer = bridge.start(V)

        def guesses(row, k):
            [tree] = proposer.propose([row], [FakeBudget(k)])
            sizes.add(len(tree))
            return tree

        return decode(kind(NOTHING, 0), TARGET, None, length=4, k=3, guesses=guesses)[0]

    assert_law(law_of(branching, play), target_law(TARGET, 4))
    assert sizes >= {1, 2, 3}


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("kind", [Rejection, Block])
def test_law_with_several_drawn_children(monkeypatch, kind, replace) -> None:
    """Two children drawn at the root, with and without replacement, the second told as what it was drawn from."""
    branching = Branching(monkeypatch)
    draft = DRAFTS["other"]

    def guesses(row, k):
        if not k:
            return Tree([], [])
        logits = draft(row.tokens)
        first = noise.draw(logits, noise.key(0, 90, len(row.tokens), 0))
        rest = logits.clone()
        if not replace:
            rest[first] = float("-inf")
        second = noise.draw(rest, noise.key(0, 90, len(row.tokens), 1))
        below = draft([*row.tokens, second])
        third = noise.draw(below, noise.key(0, 90, len(row.tokens), 2))
        return Tree([first, second, third], [-1, -1, 1], q=[x.softmax(-1) for x in (logits, rest, below)])

    law = law_of(branching, lambda: decode(kind(NOTHING, 0), TARGET, None, length=2, k=1, guesses=guesses)[0])
    assert_law(law, target_law(TARGET, 2))


@in_pairs(kind=[Rejection, Block], draft=[*DRAFTS], branches=[1, 2, 3])
def test_law_is_the_targets(monkeypatch, kind, draft, branches) -> None:
    """Chains, and trees drawn without replacement, of two levels; every decision of the first tokens enumerated."""
    length = 3 if branches < 3 else 2

    def play():
        selector = kind(NOTHING, 0)
        if branches == 1:
            return decode(selector, TARGET, DRAFTS[draft], length=length, k=2)[0]
        guesses = lambda row, k: sprout(selector.sampler, row, DRAFTS[draft], k, branches)  # noqa: E731
        return decode(selector, TARGET, None, length=length, k=2, guesses=guesses)[0]

    assert_law(law_of(Branching(monkeypatch), play), target_law(TARGET, length))


@pytest.mark.parametrize("kind", [Rejection, Block])
@pytest.mark.parametrize(("vocab", "depth", "branches", "margin", "seed"), [(2, 5, 4, 1.5, 10), (3, 3, 6, 1.5, 14)])
def test_law_where_branches_run_out_of_tokens(monkeypatch, kind, vocab, depth, branches, margin, seed) -> None:
    """An end with fewer possible tokens than its share leaves the rest to others, below it and beside it.

    So what was drawn in one subtree shapes its elder and younger siblings'. Every decision of a round is enumerated;
    the target itself goes on from there.
    """
    target, full = table(seed, vocab), table(seed + 50, vocab)
    trees = {}

    def narrow(prefix):
        logits = full(prefix)
        return logits.masked_fill(logits < logits.max() - margin, -torch.inf)

    def play():
        selector, row = kind(NOTHING, 0), FakeSequence([0])
        tree = sprout(selector.sampler, row, narrow, depth, branches)
        trees[tuple(tree.tokens), tuple(tree.parents)] = tree
        return tuple(walk(selector, row, verify(row, tree, target))[0])

    law = law_of(Branching(monkeypatch), play)
    assert any(len(counts) > 1 for counts in shares(trees.values()).values()), "no share depends on other branches"
    assert_law(continued(law, target, depth + 1), target_law(target, depth + 1))


def shares(trees) -> dict[tuple[tuple[int, int], ...], set[int]]:
    """The numbers of children that a node has in all trees, by the tokens and places among siblings that lead to it."""
    counts = defaultdict(set)
    for tree in trees:
        lineage, children = (
            {-1: ()},
            {node: [child for child, _ in drawn_children(tree, node)] for node in range(-1, len(tree))},
        )
        for node, below in children.items():
            counts[lineage[node]].add(len(below))
            lineage |= {child: (*lineage[node], (tree.tokens[child], i)) for i, child in enumerate(below)}
    return counts


def continued(law, target, length) -> dict[tuple[int, ...], float]:
    """The law of texts of this length that begin as `law` says and go on as the target does."""
    for done in range(1, length):
        grown = defaultdict(float)
        for text, weight in law.items():
            after = target([0, *text]).double().softmax(-1).tolist() if len(text) == done else None
            for token, p in enumerate(after or [1.0]):
                grown[text if after is None else (*text, token)] += weight * p
        law = grown
    return law


def test_draws_that_do_not_pay_are_not_made() -> None:
    """A budget may forbid a draw by its odds alone; no drawn node is missing from the tree."""
    sampler, row = Rejection(NOTHING, 0).sampler, FakeSequence([0])
    assert len(sprout(sampler, row, TARGET, 1, 3, least=0.1)) == 2  # a third child is accepted in 6% of cases at best
    assert len(sprout(sampler, row, TARGET, 1, 3, least=0.0)) == 3
    assert not sprout(sampler, row, TARGET, 1, 3, least=0.9).tokens


def accepted(monkeypatch, kind, draft, k: int = 3, branches: int = 1) -> float:
    """Expected number of drafted tokens that one round accepts."""
    branching = Branching(monkeypatch)

    def play():
        selector, row = kind(NOTHING, 0), FakeSequence([0])
        sampler = selector.sampler
        tree = propose(sampler, row, draft, k) if branches == 1 else sprout(sampler, row, draft, k, branches)
        return walk(selector, row, verify(row, tree, TARGET))[1]

    return sum(weight * count for weight, count in branching.runs(play))


def test_block_accepts_no_less_and_here_more(monkeypatch) -> None:
    """Enumerated over one round of a chain of three, and of a tree of two levels, which beats its chain as well."""
    for name, draft in DRAFTS.items():
        for k, branches in ((3, 1), (2, 2)):
            ours, theirs = (accepted(monkeypatch, kind, draft, k, branches) for kind in (Block, Rejection))
            assert ours >= theirs * (1.01 if name == "other" else 1.0) - 1e-6
        assert ours >= accepted(monkeypatch, Block, draft, 2) - 1e-6
    assert accepted(monkeypatch, Block, TARGET) == pytest.approx(3, abs=1e-5)


def scores_of(p: list[float], tokens: list[int], q: list[list[float]] | None) -> Logits:
    tree = Tree.chain([0]).graft(Tree.chain(tokens, q=None if q is None else [torch.tensor(x) for x in q]))
    return logits_of(tree, torch.tensor([p] * len(tree)).log())


def test_r_of_zero_does_not_accept_the_impossible(monkeypatch) -> None:
    """`r * q < p` is strict: with `<=`, r = 0 let a token of target probability 0 pass."""
    monkeypatch.setattr(noise, "uniform", lambda address: 0.0)
    step = Rejection(NOTHING, 0).emit(FakeSequence([0]), [], scores_of([0.0, 1.0], [0], [[1.0, 0.0]]), 0)
    assert step.token == 1


@pytest.mark.parametrize("kind", [Rejection, Block])
def test_q_of_zero_divides_nothing(kind) -> None:
    for p, expected in (([0.0, 1.0], 1), ([1.0, 0.0], 0)):
        assert kind(NOTHING, 0).emit(FakeSequence([0]), [], scores_of(p, [0], [[0.0, 1.0]]), 0).token == expected


def test_chances_of_a_perfect_path_are_one() -> None:
    """0/0 in the block rule means acceptance."""
    p = torch.tensor([0.5, 0.5])
    assert child_weight(1.0, p, p, 0) == 1.0
    weight, rest = without_child(1.0, p, p)
    assert weight == 1.0
    assert torch.equal(rest, p)


def test_draft_is_warped_once() -> None:
    """q is the draft's softmax after one pass of the processors, not two (T, not T squared)."""
    sampler = Rejection(Processors((TemperatureLogitsWarper(2.0),)), 0).sampler
    logits = torch.randn(4)
    token, sure, q = sampler.pick(FakeSequence([0]), [], logits)
    torch.testing.assert_close(q, (logits / 2).softmax(-1))
    assert sure == pytest.approx(float(q[token]))


def test_block_refuses_processors_it_may_not_ask_ahead() -> None:
    """A user's processor may keep state: the error names it and the way out."""

    class Counting:
        def __call__(self, ids, logits):
            return logits

    with pytest.raises(OptionError, match=r'Counting.*sampling="rejection"'):
        Block(Processors((Counting(),)), 0)


def test_block_goes_on_when_its_last_token_is_the_drafts(monkeypatch) -> None:
    """The residual of a block may hold the very token that was drafted: the walk then goes on, past the verdict."""
    monkeypatch.setattr(noise, "uniform", lambda address: 0.999999)
    monkeypatch.setattr(noise, "draw", lambda logits, address: 1)
    selector, row = Block(NOTHING, 0), FakeSequence([0])
    new, count = walk(selector, row, scores_of([0.4, 0.6], [1, 1], [[0.6, 0.4], [0.4, 0.6]]))
    assert (new, count) == ([1, 1, 1], 2)


@pytest.mark.parametrize("kind", [Rejection, Block])
def test_long_chains_are_accepted_whole(kind) -> None:
    """1,200 tokens of a perfect draft. (Block verification went down one call per token: RecursionError.)"""
    selector, row = kind(NOTHING, 0), FakeSequence([0])
    ragged = lambda prefix: torch.zeros(V)  # noqa: E731
    scores = verify(row, propose(selector.sampler, row, ragged, 1200), ragged)
    assert walk(selector, row, scores)[1] == 1200
