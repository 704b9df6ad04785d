"""The simple schedules: a constant length, the +2/−1 heuristic, and a confidence threshold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from specdec.core.draft_schedules.budget import MOST_NODES, Limit, ScheduleSetup, check_nodes

if TYPE_CHECKING:
    from specdec.core.drafts import Plan, SequenceView
    from specdec.core.rounds import Round


@dataclass(frozen=True)
class Constant:
    """`k` tokens in every round; a path ends after a token of lower confidence than `threshold`.

    With `branches`, a draft model guesses as many nodes as that many chains have, where they are likeliest. Raises
    OptionError for more than `MOST_NODES` nodes.
    """

    k: int = 5
    threshold: float = 0.0
    branches: int | None = None
    takes_threshold: ClassVar[bool] = True
    grows_trees: ClassVar[bool] = False
    learns: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_nodes(self.k, self.branches)

    @classmethod
    def of(cls, setup: ScheduleSetup) -> Constant:
        threshold = cls.threshold if setup.threshold is None else setup.threshold
        return cls(setup.tokens_or(cls.k), threshold, setup.branches)

    @property
    def max_branches(self) -> int:
        return self.branches or 1

    def plan(self, seqs: Sequence[SequenceView]) -> list[Plan]:
        return [Limit(self.k, self.threshold, self.branches)] * len(seqs)

    def after(self, round: Round) -> Constant:
        return self


@dataclass(frozen=True)
class Confidence(Constant):
    """Up to `k` tokens, until the draft's own probability of one falls below `threshold` (DISCO, arXiv 2405.04304)."""

    k: int = 20
    threshold: float = 0.4


@dataclass(frozen=True)
class Heuristic(Constant):
    """The dynamic rule of the original report, per sequence: +2 tokens if all were accepted, else −1, at least 1.

    A sequence begins with `k` tokens; `lengths`: its next number, by its id. A tree never exceeds `MOST_NODES`.
    """

    lengths: Mapping[int, int] = field(default_factory=dict)

    def plan(self, seqs: Sequence[SequenceView]) -> list[Plan]:
        return [Limit(self.lengths.get(seq.id, self.k), self.threshold, self.branches) for seq in seqs]

    def after(self, round: Round) -> Heuristic:
        """With the lengths after this round; sequences without a proposal keep theirs."""
        lengths, most = dict(self.lengths), MOST_NODES // (self.branches or 1)
        for seq in round.seqs:
            if seq.finish is not None:
                lengths.pop(seq.id, None)
            elif seq.drafted:
                k = lengths.get(seq.id, self.k)
                lengths[seq.id] = min(k + 2, most) if seq.accepted >= seq.depth else max(1, k - 1)
        return replace(self, lengths=lengths)
