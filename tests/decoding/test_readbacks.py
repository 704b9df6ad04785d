"""On an accelerator: how often a strategy reads a value and so waits for it, and that its texts are the same."""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, SuppressTokensLogitsProcessor, TemperatureLogitsWarper

from specdec.core.drafts import Branch
from specdec.core.strategies import View
from specdec.core.tree import Tree
from specdec.decoding import device_reads
from specdec.decoding.processors import Processors, Top
from specdec.decoding.stopping import Stopping
from specdec.decoding.strategies import BeamSearch, Block, Coupled, Greedy, Match, Rejection
from specdec.decoding.strategies.beam_scoring import Beams
from tests.decoding.toys import NOTHING, Table, logits_of, propose, sprout, table, verify, walk
from tests.matrix import in_pairs
from tests.proposers.fakes import FakeBudget, FakeSequence

V = 40
TARGET, DRAFT = table(21, V), table(22, V)
WARPED = Processors((SuppressTokensLogitsProcessor([3]), TemperatureLogitsWarper(0.8), Top(9), Top(p=0.9)))
READING = Processors((RepetitionPenaltyLogitsProcessor(1.3), Top(9, 0.9)))
LOOKS = {"item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
STRATEGIES: dict[str, Any] = {
    "greedy": partial(Greedy, width=V),
    **{kind.__name__.lower(): partial(kind, seed=5, width=V) for kind in (Coupled, Match, Rejection, Block)},
}


def own(ids: Any, logits: Any) -> Any:
    """A user's processor, which is asked as the walk goes."""
    return logits + (ids[:, -1:] % 3 == 0) * torch.arange(V) * 0.1


OWN = Processors((own, *WARPED.items))
PROCESSORS = {"none": NOTHING, "warpers": WARPED, "ids": READING}


GUESSING = ("greedy", "coupled", "rejection")  # the others guess as one of these


class Far(torch.Tensor):
    """Stands for a tensor of an accelerator: whatever is made of it is one too, unless it is copied from there."""

    looks: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in LOOKS or (name == "where" and len(args) == 1):
            cls.looks.append(name)
        made = super().__torch_function__(func, types, args, kwargs or {})
        return made.as_subclass(torch.Tensor) if name == "cpu" else made


class Apple(Far):
    """Stands for a tensor of a GPU without float64."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs)
        if getattr(func, "__name__", "") == "to" and isinstance(args[-1], torch.device):  # the CPU, as all devices here
            return made.as_subclass(torch.Tensor)
        assert not isinstance(made, Apple) or made.dtype != torch.float64
        assert not any(type(one) is torch.Tensor and one.dtype == torch.float64 for one in args)  # of the CPU
        return made


def far(table: Table, kind: type[Far] = Far) -> Table:
    return lambda prefix: table(prefix).as_subclass(kind)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every look at a value of a far tensor, by the name of what looked."""
    monkeypatch.setattr(device_reads, "is_local", lambda values: not isinstance(values, Far))
    Far.looks.clear()
    return Far.looks


@in_pairs(name=[*STRATEGIES], processors=[*PROCESSORS], branches=[1, 3])
def test_one_look_in_a_round(name: str, processors: str, branches: int, looks: list[str]) -> None:
    """Chains and trees, with processors that read ids or do not; log-probabilities come with it."""
    row, strategy = FakeSequence([0, 4, 7]), STRATEGIES[name](PROCESSORS[processors], ranked=True)
    if branches == 1:
        proposal = propose(strategy.sampler, row, far(TARGET), 5)
    else:
        proposal = sprout(strategy.sampler, row, far(TARGET), 3, branches)
    scores = verify(row, proposal, far(TARGET))
    looks.clear()
    walk(strategy, row, scores)
    assert len(looks) == 1


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_same_is_said_on_an_accelerator(name: str, branches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of every round, from chains and trees of a draft that is often wrong, drawn by the same rule."""
    strategy = STRATEGIES[name]

    def results() -> list[Any]:
        rounds = []
        for processors in (*PROCESSORS.values(), *[OWN] * (name != "block")):
            for length in range(1, 12):
                row = FakeSequence([0, *range(length)])
                sampler = strategy(processors).sampler
                tree = propose(sampler, row, DRAFT, 4) if branches == 1 else sprout(sampler, row, DRAFT, 3, branches)
                rounds.append((tree.tokens, walk(strategy(processors), row, verify(row, tree, TARGET))))
        return rounds

    here = results()
    monkeypatch.setattr(device_reads, "is_local", lambda values: False)
    assert results() == here


@in_pairs(name=[*STRATEGIES], processors=[*PROCESSORS], branches=[1, 3])
def test_gpus_without_float64(
    name: str, processors: str, branches: int, looks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What needs it is computed on the CPU, and gives the same tokens. (Top-p, trees and rejection failed.)"""
    monkeypatch.setattr(device_reads, "has_float64", lambda values: False)

    def tokens(kind: type[Far]) -> Any:
        row, strategy = FakeSequence([0, 4, 7]), STRATEGIES[name](PROCESSORS[processors])
        sampler, target, draft = strategy.sampler, far(TARGET, kind), far(DRAFT, kind)
        tree = propose(sampler, row, draft, 5) if branches == 1 else sprout(sampler, row, draft, 3, branches)
        return tree.tokens, walk(strategy, row, verify(row, tree, target))

    assert tokens(Apple) == tokens(Far)


@pytest.mark.parametrize("confident", [True, False])
@pytest.mark.parametrize("name", GUESSING)
def test_a_guess_takes_one_look(name: str, confident: bool, looks: list[str]) -> None:
    """Token, confidence and whether there is a guess at all come together."""
    sampler = STRATEGIES[name](WARPED).sampler
    token, sure, _ = sampler.pick(FakeSequence([0]), [], far(DRAFT)([0]), confident=confident)
    assert len(looks) == 1
    assert (sure == 1.0) != confident
    assert 0 <= token < V


@in_pairs(name=GUESSING, bad=[math.nan, math.inf], local=[True, False], confident=[True, False])
def test_a_draft_that_overflowed_has_no_guess(
    name: str, bad: float, local: bool, confident: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without its confidence."""
    monkeypatch.setattr(device_reads, "is_local", lambda values: local)
    logits = DRAFT([0]).clone()
    logits[5] = bad
    assert math.isnan(STRATEGIES[name](NOTHING).sampler.pick(FakeSequence([0]), [], logits, confident=confident)[1])


@pytest.mark.parametrize("name", GUESSING)
def test_a_level_of_a_tree_takes_one_look_for_an_end(name: str, looks: list[str]) -> None:
    """The likeliest children are found together; those of one end are drawn without looking."""
    ends, logits = [Branch([], 0.0)], far(DRAFT)([0])[None]
    found = STRATEGIES[name](WARPED).sampler.expand(FakeSequence([0]), ends, logits, FakeBudget(3, branches=3))
    assert len(found) >= 3
    assert len(looks) == 1


def three_steps(search: BeamSearch, views: Callable[[list[list[int]]], list[View]]) -> Beams:
    """The state after three steps, whose texts have these `views`."""
    state = search.begin()
    for _ in range(3):
        texts = [[0, *beam.tokens] for beam in state.live[: 3 if state.length else 1]]
        state = search.advance(FakeSequence([0]), state, views(texts), []).state
    return state


@pytest.mark.parametrize("seed", [None, 4])
def test_a_step_of_beams_takes_one_look(seed: int | None, looks: list[str]) -> None:
    """And returns the same as with local logits, with and without drawing."""

    def steps(target: Table) -> Beams:
        search = BeamSearch(
            processors=WARPED, stop=Stopping(max_length=6), num_beams=3, max_new_tokens=5, width=V, seed=seed
        )

        def views(texts: list[list[int]]) -> list[View]:
            out = logits_of(Tree.chain([0] * len(texts)), torch.stack([target(text) for text in texts]))
            return [View(out, at) for at in range(len(texts))]

        return three_steps(search, views)

    here = steps(TARGET)
    looks.clear()
    assert steps(far(TARGET)) == here
    assert len(looks) == 3


@pytest.mark.parametrize("processors", [NOTHING, Processors((SuppressTokensLogitsProcessor([3]),))])
def test_steps_of_beams_within_a_pass_take_one_look(processors: Any, looks: list[str]) -> None:
    """All nodes of the pass are looked at together; the steps then only add."""
    vocab, target = 6, table(5, 6)
    texts = [[0, *tail] for length in range(3) for tail in product(range(vocab), repeat=length)]
    tree = Tree.chain([0] * len(texts))

    def steps(logits: torch.Tensor) -> Beams:
        whole = logits_of(tree, logits)
        search = BeamSearch(
            processors=processors, stop=Stopping(frozenset([2]), 9), num_beams=3, max_new_tokens=8, width=vocab
        )
        return three_steps(search, lambda found: [View(whole, texts.index(text)) for text in found])

    logits = torch.stack([target(text) for text in texts])
    here = steps(logits)
    looks.clear()
    assert steps(logits.as_subclass(Far)) == here
    assert len(looks) == 1


def test_an_error_waits_until_the_walk_comes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejected node without any token left raises nothing."""
    from specdec.errors import SpecdecError

    monkeypatch.setattr(device_reads, "is_local", lambda values: False)
    nothing = torch.full((V,), -torch.inf)
    logits = torch.stack([DRAFT([0]), nothing])
    strategy = Coupled(NOTHING, 5)
    token = strategy.emit(FakeSequence([0]), [], logits_of(Tree.chain([0, 1]), logits), 0).token
    out = logits_of(Tree.chain([0, token]), logits)
    assert strategy.emit(FakeSequence([0]), [], out, 0).token == token
    with pytest.raises(SpecdecError, match="no token is left"):
        strategy.emit(FakeSequence([0]), [token], out, 1)
