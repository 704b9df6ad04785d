"""How much one sequence may draft in a round, in numbers that Python and C++ both read."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

SIBLINGS = 3
"""The most tokens that are proposed beside a guess of a chain."""
_DOUBT = 0.01  # the least confidence that all other tokens together are taken to have


@dataclass(frozen=True)
class Budget:
    """How much one sequence may draft in this round, as its schedule decided.

    `limit`: the most nodes on a path, of which `path_limit` may allow fewer; 0: no draft. `branches`: how many nodes
    each draft pass may continue; 1: propose a chain; None: the draft chooses, and built-in drafts then make chains for
    texts and follow all branches of a search.

    `edges` divide the draft's confidence into bins; a node of confidence p in bin b is accepted with the chance
    min(bases[b] + p * rates[b], 1), and a path with the product. A node of unknown confidence has the chance `first` at
    the beginning of a path, and `later` after others. `node_cost` of a node in the passes of draft and target, and
    `pass_cost` of a draft pass for all its sequences together, are in tokens that decoding makes in the same seconds.
    `pace`: how many times as fast as plain decoding rounds were of late. In the bins `untested`, few guesses were
    verified yet: the first guess of a chain is proposed anyway, to learn. `siblings`: beside each guess of a chain,
    other tokens that are worth their node may be proposed; no pass continues them. `match`: a chain also ends where its
    last tokens, so many, stand in the text, and a token follows them there; 0: nowhere.
    """

    limit: int
    branches: int | None = None
    edges: Sequence[float] = ()
    bases: Sequence[float] = (1.0,)
    rates: Sequence[float] = (0.0,)
    first: float = 1.0
    later: float = 1.0
    node_cost: float = 0.0
    pass_cost: float = 0.0
    pace: float = 1.0
    untested: frozenset[int] = frozenset()
    siblings: bool = False
    match: int = 0
    _chances: dict[tuple[float, ...], float] = field(default_factory=dict, init=False, compare=False, repr=False)

    @classmethod
    def sure(cls, limit: int, threshold: float = 0.0, branches: int | None = None) -> Budget:
        """A fixed length; with a `threshold`, no node follows one of lower confidence."""
        if threshold <= 0:
            return cls(limit, branches)
        return cls(limit, branches, edges=(threshold,), bases=(0.0, 1.0), rates=(0.0, 0.0))

    @property
    def needs_confidence(self) -> bool:
        """Whether anything depends on the draft's confidence."""
        return bool(self.edges)

    def gain(self, paths: Sequence[Sequence[float]], width: int = 1) -> float:
        """The tokens that a further draft pass brings this sequence beyond its `width` nodes' cost.

        `paths`: the confidence of each node on the paths that the pass would continue; the branches of a search count
        as one path. Not above 0: the pass leaves the sequence out.
        """
        if max(map(len, paths)) >= self.limit:
            return 0.0
        mean = self.later if any(paths) else self.first
        return sum(map(self._chance, paths)) * mean - width * self.node_cost

    def keep(self, path: Sequence[float]) -> bool:
        """Whether a path's last node is worth verifying. Asked for each node that is proposed, unless it was drawn."""
        is_trial = len(path) == 1 and self.branches in (None, 1) and bisect_right(self.edges, path[0]) in self.untested
        return is_trial or (self._chance(path[:-1]) > 0 and self._chance(path) >= self.node_cost)

    def keeps_sibling(self, path: Sequence[float], confidence: float) -> bool:
        """Whether a token of this confidence, beside the last node of a path, is worth verifying.

        Where that node is wrong, each of the other tokens is right with its share of their confidence.
        """
        if not self.siblings:
            return False
        share = confidence / max(1 - path[-1], _DOUBT)
        return self._chance(path[:-1]) * (1 - self.chance(path[-1])) * share >= self.node_cost

    def _chance(self, path: Sequence[float]) -> float:
        """The chance that a whole path is accepted."""
        if not path or not self.edges:
            return self.bases[0] ** len(path)
        whole = tuple(path)
        if whole not in self._chances:
            before = self._chances.get(whole[:-1]) or math.prod(map(self.chance, whole[:-1]))
            self._chances[whole] = before * self.chance(whole[-1])
        return self._chances[whole]

    def chance(self, confidence: float) -> float:
        """The chance of one node."""
        number = bisect_right(self.edges, confidence)
        return min(self.bases[number] + self.rates[number] * confidence, 1.0)


def pays(budgets: Sequence[Budget], gains: Sequence[float]) -> bool:
    """Whether a draft pass over sequences with these budgets and gains pays."""
    gain = sum(gains)
    return gain > 0 and gain >= max(budget.pass_cost for budget in budgets)
