"""A toy target and draft without models, the engine's walk in miniature, and randomness that can be enumerated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from specdec.core.drafts import Branch
from specdec.core.tree import Tree
from specdec.core.work import Logits, Work
from specdec.decoding.processors import Processors
from tests.proposers.fakes import FakeBudget, FakeSequence

Table = Callable[[list[int]], Tensor]
"""From a prefix to logits `[vocab]`."""


def table(seed: int, vocab: int, sharpness: float = 1.5) -> Table:
    """Logits that depend on the whole prefix."""

    def logits(prefix: list[int]) -> Tensor:
        number = seed
        for token in prefix:
            number = (number * 31 + token + 1) % 1_000_003
        return torch.randn(vocab, generator=torch.Generator().manual_seed(number)) * sharpness

    return logits


def wrong(target: Table) -> Table:
    """A draft that believes what the target does not."""
    return lambda prefix: -3 * target(prefix)


def propose(sampler: Any, row: FakeSequence, draft: Table, k: int) -> Tree:
    """A chain of k tokens as a draft model makes it."""
    guesses: list[int] = []
    qs = []
    for _ in range(k):
        token, _, q = sampler.pick(row, guesses, draft(row.tokens + guesses))
        guesses.append(token)
        qs.append(q)
    return Tree.chain(guesses, q=qs if sampler.needs_q and qs else None)


def sprout(sampler: Any, row: FakeSequence, draft: Table, k: int, branches: int, least: float = 0.0) -> Tree:
    """A tree of k levels as a draft model grows it, of nodes whose chance is at least `least`."""
    ends, at, nodes, parents = [Branch([], 0.0)], [-1], [], []
    for _ in range(k):
        logits = torch.stack([draft(row.tokens + end.tokens) for end in ends])
        found = sampler.expand(row, ends, logits, FakeBudget(k, drop=least, branches=branches))
        if not found:
            break
        parents += [at[end] for end, _ in found]
        at = list(range(len(nodes), len(nodes) + len(found)))
        ends = [branch for _, branch in found]
        nodes += ends
    drawn = [node.q for node in nodes if node.q is not None]
    return Tree([node.tokens[-1] for node in nodes], parents, [node.confidence for node in nodes], drawn or None)


def verify(row: FakeSequence, proposal: Tree, target: Table) -> Logits:
    """The target's logits after the last token and after every proposed one."""
    tree = Tree.chain(row.tokens[-1:]).graft(proposal)
    prefixes = [row.tokens + [tree.tokens[n] for n in tree.path(node)[1:]] for node in range(len(tree))]
    return logits_of(tree, torch.stack([target(prefix) for prefix in prefixes]))


def logits_of(tree: Tree, logits: torch.Tensor, unconditional: torch.Tensor | None = None) -> Logits:
    """The output of a pass over `tree`, with `logits` `[nodes, vocab]` at its last nodes."""
    return Logits(Work(0, tree, len(logits)), logits, unconditional)


def walk(selector: Any, row: FakeSequence, out: Logits) -> tuple[list[int], int]:
    """The tokens of one round, and how many of them were proposed."""
    children, node, new = out.work.tree.children(), 0, []
    while True:
        new.append(selector.emit(row, new, out, node).token)
        child = children.get((node, new[-1]))
        if child is None:
            return new, len(new) - 1
        node = child


def decode(selector: Any, target: Table, draft: Table | None, *, length: int, k: int, guesses: Any = None):
    """`length` tokens and the number of rounds; `guesses(row, k)` replaces the draft by a tree without a model."""
    row, rounds = FakeSequence([0]), 0
    while len(row.tokens) <= length:
        room = min(k, length - len(row.tokens))
        if guesses is not None:
            proposal = guesses(row, room)
        else:
            proposal = propose(selector.sampler, row, draft, room) if draft is not None else Tree([], [])
        row.tokens += walk(selector, row, verify(row, proposal, target))[0]
        rounds += 1
    return tuple(row.tokens[1 : length + 1]), rounds


class Branching:
    """Stands in for `specdec.decoding.noise`: every random decision branches, and `runs` goes through all of them.

    No address may be asked twice within one run: then the decisions are independent, as the enumeration assumes.
    """

    def __init__(self, monkeypatch) -> None:
        from specdec.decoding import noise

        monkeypatch.setattr(noise, "uniform", self._uniform)
        monkeypatch.setattr(noise, "draw", self._draw)

    def runs(self, play: Callable[[], Any]) -> Iterator[tuple[float, Any]]:
        """Probability and result of every way that `play` can go."""
        script: list[tuple[int, int]] = []  # (branch taken, number of branches) of the path to repeat
        while True:
            self._script, self._at, self._weight, self._seen = script, 0, 1.0, set()
            result = play()
            yield self._weight, result
            while script and script[-1][0] + 1 == script[-1][1]:
                script.pop()
            if not script:
                return
            script[-1] = (script[-1][0] + 1, script[-1][1])

    def choose(self, probs: list[float], address: int) -> int:
        assert address not in self._seen, "one address, two decisions"
        self._seen.add(address)
        possible = [i for i, prob in enumerate(probs) if prob > 0]
        if self._at == len(self._script):
            self._script.append((0, len(possible)))
        chosen = possible[self._script[self._at][0]]
        self._at += 1
        self._weight *= probs[chosen]
        return chosen

    def _draw(self, logits: Tensor, address: int) -> int:
        return self.choose(logits.double().softmax(-1).tolist(), address)

    def _uniform(self, address: int) -> Any:
        branching = self

        class R:
            """A number in [0, 1) of which only comparisons are known."""

            def __init__(self, scale: float = 1.0) -> None:
                self.scale = scale

            def __mul__(self, scale: float) -> R:
                return R(scale)

            def __lt__(self, bound: float) -> bool:
                chance = min(1.0, bound / self.scale) if self.scale > 0 else float(bound > 0)
                return branching.choose([1 - chance, chance], address) == 1

        return R()


def target_law(target: Table, length: int, processed: Callable[[list[int], Tensor], Tensor] = lambda _, x: x):
    """The probability of every continuation of `[0]` under the target."""
    law = {(): 1.0}
    for _ in range(length):
        grown = {}
        for text, weight in law.items():
            prefix = [0, *text]
            for token, p in enumerate(processed(prefix, target(prefix)).double().softmax(-1).tolist()):
                if p > 0:
                    grown[(*text, token)] = weight * p
        law = grown
    return law


NOTHING = Processors()
