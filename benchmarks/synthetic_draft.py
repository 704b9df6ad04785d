"""SYNTHETIC drafts, for targets without a small sibling: they know the text, and cost the passes of a real draft.

At each position the target's token is the draft's first guess, its second, … or none, drawn once (seeded) with given
chances. Their results are always marked.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from specdec.core.budget import Budget, pays
from specdec.core.drafts import Draft, Proposer, SequenceView, path_limit
from specdec.core.tree import Tree
from specdec.core.work import Work
from specdec.decoding.samplers import WIDER
from specdec.models import LanguageModel

DraftPass = Callable[[int], None]  # a draft pass over this many nodes


def passes_of(draft: LanguageModel, prefix: int = 256) -> DraftPass:
    """Real passes of a draft model over siblings after `prefix` tokens."""
    session = draft.session()
    row = session.add()
    session.run([Work.text(row, [5] * prefix)])
    session.commit([row], [list(range(prefix))])

    def work(nodes: int) -> None:
        session.run([Work(row, Tree([7] * nodes, [-1] * nodes), nodes)])
        session.commit([row], [[]])

    return work


class Oracle:
    """The target's new tokens in each row of a call, and the rank of the guess that each will be.

    `rates` are the chances of the first guess, the second, ….
    """

    def __init__(self, texts: Sequence[list[int]], rates: Sequence[float], vocab_size: int, seed: int = 0) -> None:
        self.texts, self._vocab_size = texts, vocab_size
        source, weights = random.Random(seed), [*rates, 1.0 - sum(rates)]
        self._ranks = [source.choices(range(len(weights)), weights, k=len(text)) for text in texts]

    def guess(self, row: int, position: int, rank: int) -> tuple[int, bool]:
        """The guess of this rank for the new token at `position`, and whether it is right."""
        if position >= len(self.texts[row]):
            return rank, False
        right = self._ranks[row][position] == rank
        token = self.texts[row][position]
        return (token if right else (token + 1 + rank) % self._vocab_size), right


@dataclass
class _Node:
    """A guess: its number and its parent's, the chances on its path, and whether all of the path is right."""

    number: int
    parent: int
    token: int
    path: list[float]
    chance: float
    right: bool


class SyntheticDraft(Draft, Proposer):
    """SYNTHETIC: grows the likeliest nodes level by level, as a draft model does, and does `work` for each level.

    `rates` are the chances of its guesses (see `Oracle`). `oracle` is that of the next call; without one all guesses
    are wrong.
    """

    guesses_trees = True

    def __init__(self, rates: Sequence[float], work: DraftPass) -> None:
        self.rates, self._work = list(rates), work
        self.oracle: Oracle | None = None

    def __repr__(self) -> str:
        return f"SyntheticDraft({self.rates})"

    def start(self, vocab_size: int) -> SyntheticDraft:
        """The draft itself, which has no state of rows."""
        return self

    def propose(self, rows: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Tree]:
        return [self._tree(row, budget) for row, budget in zip(rows, budgets, strict=True)]

    def _tree(self, row: SequenceView, budget: Budget) -> Tree:
        limit, branches = path_limit(row, budget), budget.branches or 1
        oracle, number, new = self.oracle, row.task.encoder_row, row.tokens[row.prompt_length :]
        is_known = oracle is not None and oracle.texts[number][: len(new)] == new
        nodes: list[_Node] = []
        ends = [_Node(-1, -1, -1, [], 1.0, is_known)]
        for depth in range(limit):
            if not ends or not pays([budget], [budget.gain([end.path for end in ends], len(ends))]):
                break
            self._work(len(ends))
            level: list[_Node] = []
            ranks = range(len(self.rates) if branches > 1 else 1)
            pairs = sorted(product(ends, ranks), key=lambda pair: -pair[0].chance * self.rates[pair[1]])
            for end, rank in pairs[: WIDER * branches if branches > 1 else 1]:
                path = [*end.path, self.rates[rank]]
                if not budget.keep(path):
                    continue
                token, right = rank, False
                if oracle is not None:
                    token, right = oracle.guess(number, len(new) + depth, rank)
                known = token, path, end.chance * path[-1], end.right and right
                level.append(_Node(len(nodes) + len(level), end.number, *known))
            nodes += level
            best = {node.number for node in self._best(nodes, branches * limit)}
            ends = [node for node in level if node.number in best][:branches]
        kept = self._best(nodes, branches * limit)
        place = {node.number: i for i, node in enumerate(kept)} | {-1: -1}
        parents, chances = [place[node.parent] for node in kept], [node.path[-1] for node in kept]
        return Tree([node.token for node in kept], parents, chances, source="synthetic")

    @staticmethod
    def _best(nodes: Sequence[_Node], count: int) -> list[_Node]:
        """The `count` likeliest in order of creation; no node is likelier than its parent."""
        return sorted(sorted(nodes, key=lambda node: -node.chance)[:count], key=lambda node: node.number)
