"""The simple schedules: a constant length, the +2/−1 heuristic, and a confidence threshold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from specdec.errors import OptionError
from specdec.types import Plan, Round, Row

MOST_NODES = 1024
"""Of one row's tree in one pass: beyond it the work around the nodes outweighs whatever a pass over weights costs."""


class Schedule(Protocol):
    """Decides how much every row may draft; a value: `after` returns the next one and changes nothing.

    Only a schedule with an attribute `branches`, or `widest`, above 1 gets trees of guesses, as wide as its plans say;
    any other gets chains.
    """

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


def check_nodes(tokens: int, branches: int | None) -> None:
    """Raises OptionError for trees of more than `MOST_NODES` nodes."""
    if branches is not None and branches > 1 and tokens * branches > MOST_NODES:
        raise OptionError(
            f"{branches} branches (`num_assistant_branches`) of {tokens} tokens (`num_assistant_tokens`) are "
            f"{branches * tokens} nodes for every row, and a pass checks at most {MOST_NODES}: lower one of them"
        )


@dataclass(frozen=True)
class Constant:
    """`k` tokens in every round, fewer where the draft believes in one less than `threshold`.

    With `branches` a draft model guesses as many nodes as that many chains have, where they are likeliest; OptionError
    where these are more than `MOST_NODES`.
    """

    k: int = 5
    threshold: float = 0.0
    branches: int | None = None

    def __post_init__(self) -> None:
        check_nodes(self.k, self.branches)

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
    """The dynamic rule of the original report, per row: all drafted tokens accepted, +2; otherwise −1, at least 1.

    `branches` as in `Constant`; their tree never grows beyond `MOST_NODES`.
    """

    start: int = 5
    threshold: float = 0.0
    branches: int | None = None
    lengths: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_nodes(self.start, self.branches)

    def plan(self, rows: Sequence[Row]) -> list[Plan]:
        """Every row's own length."""
        return [Limit(self.lengths.get(row.key, self.start), self.threshold, self.branches) for row in rows]

    def after(self, round: Round) -> Heuristic:
        """Lengths after this round; rows that had nothing drafted keep theirs."""
        lengths, most = dict(self.lengths), MOST_NODES // (self.branches or 1)
        for row in round.rows:
            if row.drafted:
                k = lengths.get(row.key, self.start)
                lengths[row.key] = min(k + 2, most) if row.accepted >= row.depth else max(1, k - 1)
        return replace(self, lengths=lengths)
