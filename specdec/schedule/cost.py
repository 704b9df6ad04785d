"""The tokens-per-second rule: a node is worth drafting while its chance of becoming text pays for its seconds.

Let R be the tokens per second that decoding makes so far. A node whose path is accepted with probability P brings P
tokens and costs its marginal seconds c; it raises the rate exactly when P >= R * c (Dinkelbach's condition for the best
ratio). P comes from how often the draft's confidence was borne out, c from costs fitted to the rounds so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from specdec.schedule.estimates import Acceptance, Line
from specdec.schedule.rules import check_nodes
from specdec.types import Plan, Round, Row

_TOO_MUCH = 3  # rounds without a draft that a draft may waste before it is given up for a while
_CREDIT = 12  # such rounds of gains are set against later waste: texts have easy parts and hard ones
_WORTH_LEVELS = 15  # draft passes that a target pass must cost where trees are taken
_CARRIED = 0.1  # of the weight of the last call's tokens per second goes over to the next one
_STEP = 4  # times as many nodes as in the widest pass of late are in the next one, at most


class _Belief(NamedTuple):
    """What is taken for granted of a target until its passes say otherwise.

    `unmeasured`: tokens that a draft pass and a verified node cost. `steepness`, `trust`: see `Line`. `trees` are worth
    it where a pass costs as much as so many nodes: side branches bring fewer tokens than their confidence promises.
    """

    unmeasured: tuple[float, float]
    steepness: float
    trust: float
    trees: int


_NEAR = _Belief((0.3, 0.1), 0.02, 1.0, 100)
# A pass that must read weights from afar takes no longer for more nodes, and too irregularly to doubt that at once.
_FAR = _Belief((0.05, 0.01), 0.003, 64.0, 30)


@dataclass(frozen=True)
class CostPlan:
    """One row's part of the rule; a node's costs are the tokens that its seconds would bring at the current rate."""

    limit: int
    acceptance: Acceptance
    draft_cost: float
    verify_cost: float
    branches: int | None = None

    def go_on(self, paths: Sequence[Sequence[float]], width: int = 1) -> bool:
        """Before a draft pass: the next tokens, of unknown confidence, must pay for drafting and for verifying them."""
        if max(map(len, paths)) >= self.limit:
            return False
        cost = self.draft_cost + width * self.verify_cost
        return sum(map(self.acceptance.path, paths)) * self.acceptance.mean >= cost

    def keep(self, confidence: Sequence[float]) -> bool:
        """After it: the token is paid for, it must only pay for its verification."""
        return self.acceptance.path(confidence) >= self.verify_cost


@dataclass(frozen=True)
class Cost:
    """Tokens per second decide (see the module); may draft nothing, and then tries again, ever more rarely.

    `k` bounds a path, `branches` what one draft pass continues; without it, the rule itself takes trees of up to
    `widest` where a pass costs as much as many more nodes, and chains (of one branch) elsewhere. Fitted costs
    and acceptance carry over to the next call of the same family with the same draft (`fresh`): what a search pays for
    is not what a chain pays for. `far` says beforehand that a pass reads weights that are not in memory.
    """

    k: int = 32
    branches: int | None = None
    widest: int | None = None
    far: bool = False
    acceptance: Acceptance = field(default_factory=Acceptance)
    passes: Line = field(default_factory=Line)
    drafts: Mapping[str, Line] = field(default_factory=dict)  # draft passes by source, over the nodes of one level
    other_seconds: float = 0.0  # of a round, outside draft and target
    roots: float = 1.0  # nodes that a row needs without a draft: its live branches
    seen: float = 1.0  # nodes of a row in the widest pass of late
    width: float = 1.0  # nodes that a drafted token takes: a search's draft has many branches
    plain: Line = field(default_factory=Line)  # whole rounds in which nothing was drafted, over their rows
    trial: int = 0  # rounds in which something was, since drafting was last given up
    waste: float = 0.0  # seconds that they took beyond what their tokens take without a draft; less than 0 after gains
    tokens: float = 0.0  # fading sums over rounds, for the rate
    seconds: float = 0.0
    idle: int = 0  # rounds since the last draft
    patience: int = 16  # rounds without a draft before the next try
    lost: bool = False  # drafting was seen to be slower, whatever was predicted
    price: Line = field(default_factory=Line)  # `plain` at that time; another trial is due when it grows
    wait: int = 32  # rounds without a draft before it gets another trial

    def __post_init__(self) -> None:
        check_nodes(self.k, self.branches or self.widest)

    def plan(self, rows: Sequence[Row]) -> list[Plan]:
        """One plan per row; all of limit 0 while plain decoding is predicted to be faster."""
        if not self._measured:
            return [self._plan(self.k, *self._belief.unmeasured)] * len(rows)
        if self._curious or self.lost:
            return [self._plan(0, 0.0, 0.0)] * len(rows)
        if not self._pays(len(rows)):
            return [self._plan(int(self.idle >= self.patience), 0.0, 0.0)] * len(rows)
        rate = max(self.tokens / self.seconds if self.seconds else 0.0, self._plain_rate(len(rows)))
        # A draft that asks before each pass is the dearest; one that copies has nothing to ask.
        dearest = max(self.drafts.values(), key=lambda line: line.at(1))
        draft, node = dearest.at(0) / len(rows), self.passes.slope + dearest.slope
        return [self._plan(self.k, rate * draft, rate * node)] * len(rows)

    def _plan(self, limit: int, draft_cost: float, verify_cost: float) -> CostPlan:
        # A look at a single token need not be a wide one.
        if self.branches or not self.widest or limit <= 1 or not self._nodes_are_cheap:
            return CostPlan(limit, self.acceptance, draft_cost, verify_cost, self.branches or (self.widest and 1))
        # What a wide pass costs is a guess until one was seen, so trees grow step by step.
        nodes = int(_STEP * self.seen)
        branches = min(self.widest, max(2, nodes // limit))
        return CostPlan(min(limit, max(nodes // branches, 4)), self.acceptance, draft_cost, verify_cost, branches)

    @property
    def _nodes_are_cheap(self) -> bool:
        """Whether trees may pay: for their nodes, and for the draft passes that look at several of them."""
        if not self._measured:
            return False
        draft = min(line.at(1) for line in self.drafts.values())
        return self.passes.at(self.roots) >= max(self._belief.trees * self.passes.slope, _WORTH_LEVELS * draft)

    @property
    def _belief(self) -> _Belief:
        return _FAR if self.far else _NEAR

    @property
    def _measured(self) -> bool:
        return bool(self.passes.weight and self.drafts)

    @property
    def _curious(self) -> bool:
        """Whether to look what a round without a draft costs: at once where the draft is poor, else now and then."""
        looks = self.plain.weight
        due = self.trial >= 8 * (looks + 1) or (self.acceptance.mean < 0.6 and not looks)
        return looks < 2.5 and due and self.passes.weight > 1.5

    def _pays(self, rows: int) -> bool:
        """Whether some number of tokens per row is predicted to beat plain decoding."""
        plain, mean, slope = self._plain_rate(rows), self.acceptance.mean, self.passes.slope
        seconds = self.passes.at(rows * self.roots) + self.other_seconds
        # One more token per row, from the cheapest source.
        more = rows * self.width * slope + min(line.at(self.width) for line in self.drafts.values())
        expected = chance = 1.0
        for k in range(1, self.k + 1):
            chance *= mean
            expected += chance
            if rows * expected > plain * (seconds + k * more):
                return True
        return False

    def _plain_rate(self, rows: int) -> float:
        """Tokens per second without a draft: as measured, or where there was no such pass yet, as predicted."""
        predicted = self.passes.at(rows * self.roots) + self.other_seconds
        return rows / (self.plain.at(rows) if self.plain.weight else predicted)

    def after(self, round: Round) -> Cost:
        """With this round's outcomes, costs and rate; a prompt's round teaches only acceptance."""
        acceptance = self.acceptance
        for row in round.rows:
            acceptance = acceptance.after(row)
        if any(row.prefill for row in round.rows):
            return replace(self, acceptance=acceptance)
        return replace(self, acceptance=acceptance)._learned(round)._judged(round)

    def _learned(self, round: Round) -> Cost:
        """With the costs and the rate of a round."""
        drafted = max(row.depth for row in round.rows)
        tokens = sum(len(row.steps) for row in round.rows)
        nodes, depths = sum(row.drafted for row in round.rows), sum(row.depth for row in round.rows)
        return replace(
            self,
            roots=_fading(self.roots, (round.nodes - nodes) / len(round.rows)),
            seen=max(round.nodes / len(round.rows), 0.95 * self.seen),
            width=_fading(self.width, nodes / depths) if depths else self.width,
            passes=self.passes.add(round.nodes, round.verify_seconds),
            drafts=self._drafting(round, drafted),
            plain=self.plain if drafted else self.plain.add(len(round.rows), round.seconds),
            trial=self.trial + bool(drafted),
            other_seconds=_fading(self.other_seconds, round.seconds - round.draft_seconds - round.verify_seconds),
            tokens=0.9 * self.tokens + tokens,
            seconds=0.9 * self.seconds + round.seconds,
            idle=0 if drafted else self.idle + 1,
            patience=self._patience(round, drafted),
        )

    def _judged(self, round: Round) -> Cost:
        """With the verdict on drafting by what it was seen to bring, not by what was predicted (CUSUM, Page 1954)."""
        if self.lost:
            dearer = self.plain.at(len(round.rows)) > 1.3 * self.price.at(len(round.rows))
            return replace(self, lost=self.idle < self.wait and not dearer)
        if not (self.plain.weight and any(row.depth for row in round.rows)):
            return self
        once = self.plain.at(len(round.rows))
        tokens = sum(len(row.steps) for row in round.rows)
        # A stall counts as one round at most.
        waste = max(self.waste + min(round.seconds - once * tokens / len(round.rows), once), -_CREDIT * once)
        if waste > _TOO_MUCH * once:
            return replace(self, lost=True, price=self.plain, trial=0, waste=0.0, wait=min(2 * self.wait, 512))
        return replace(self, waste=waste, wait=32 if self.trial >= 64 else self.wait)

    def _drafting(self, round: Round, drafted: int) -> Mapping[str, Line]:
        """Draft passes by source; a round with several sources teaches only about the longest draft's."""
        if not drafted:
            return self.drafts
        longest = max(round.rows, key=lambda row: row.depth)
        line = self.drafts.get(longest.source, Line())
        return {**self.drafts, longest.source: line.add(longest.drafted / drafted, round.draft_seconds / drafted)}

    def _patience(self, round: Round, drafted: int) -> int:
        """A try that brought nothing doubles the wait for the next one; anything accepted makes it short again."""
        if any(row.accepted for row in round.rows):
            return 16
        tried = drafted and self._measured and not self._pays(len(round.rows))
        return min(2 * self.patience, 256) if tried else self.patience

    def fresh(self, k: int, branches: int | None = None, widest: int | None = None, *, far: bool = False) -> Cost:
        """All that was learned, for a call with these bounds; of the last call's rate a little, as texts differ.

        Rounds without a draft add up over calls: however short they are, the next try comes.
        """
        idle = max(self.idle, self.patience // 2)
        tokens, seconds = _CARRIED * self.tokens, _CARRIED * self.seconds
        found = replace(self, k=k, branches=branches, widest=widest, far=far, idle=idle, tokens=tokens, seconds=seconds)
        belief = found._belief
        return replace(found, passes=replace(self.passes, steepness=belief.steepness, trust=belief.trust))


def _fading(old: float | None, new: float) -> float:
    """A mean that forgets, and that stalls move but little (see `Line.add`)."""
    new = max(new, 0.0)  # differences of clocks may round below it
    return new if not old or new < old / 3 else 0.8 * old + 0.2 * min(new, 3 * old)
