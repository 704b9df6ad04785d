"""The simple schedules: a constant length, the +2/−1 heuristic, and a confidence threshold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from specdec.types import Plan, Round, Row


class Schedule(Protocol):
    """Decides how much every row may draft; a value: `after` returns the next one and changes nothing."""

    def plan(self, rows: Sequence[Row]) -> list[Plan]:
        """One plan per row for the coming round."""
        ...

    def after(self, round: Round) -> Schedule:
        """The schedule that has learned from this round."""
        ...


@dataclass(frozen=True, slots=True)
class Limit:
    """A plan with a fixed length, and if `threshold` is set, no further node after one the draft believes in less."""

    limit: int
    threshold: float = 0.0
    branches: int | None = None

    def go_on(self, paths: Sequence[Sequence[float]], width: int = 1) -> bool:
        """Whether another node may follow any of these."""
        return any(len(path) < self.limit and (not path or path[-1] >= self.threshold) for path in paths)

    def keep(self, confidence: Sequence[float]) -> bool:
        """Every drafted node is kept, down to the first one that the draft believes in less than the threshold."""
        return len(confidence) < 2 or confidence[-2] >= self.threshold


@dataclass(frozen=True)
class Constant:
    """`k` tokens in every round, fewer where the draft believes in one less than `threshold`.

    With `branches` a draft model guesses as many nodes as that many chains have, where they are likeliest.
    """

    k: int = 5
    threshold: float = 0.0
    branches: int | None = None

    def plan(self, rows: Sequence[Row]) -> list[Plan]:
        """The same limit for every row."""
        return [Limit(self.k, self.threshold, self.branches)] * len(rows)

    def after(self, round: Round) -> Constant:
        """Nothing to learn."""
        return self


@dataclass(frozen=True)
class Confidence(Constant):
    """Up to `k` tokens, until the draft's own probability of one falls below `threshold` (DISCO, arXiv 2405.04304)."""

    k: int = 20
    threshold: float = 0.4


@dataclass(frozen=True)
class Heuristic:
    """The dynamic rule of the original report, per row: all drafted tokens accepted, +2; otherwise −1, at least 1."""

    start: int = 5
    threshold: float = 0.0
    branches: int | None = None
    lengths: Mapping[int, int] = field(default_factory=dict)

    def plan(self, rows: Sequence[Row]) -> list[Plan]:
        """Every row's own length."""
        return [Limit(self.lengths.get(row.key, self.start), self.threshold, self.branches) for row in rows]

    def after(self, round: Round) -> Heuristic:
        """Lengths after this round; rows that had nothing drafted keep theirs."""
        lengths = dict(self.lengths)
        for row in round.rows:
            if row.drafted:
                k = lengths.get(row.key, self.start)
                lengths[row.key] = k + 2 if row.accepted >= row.depth else max(1, k - 1)
        return replace(self, lengths=lengths)
