"""The tokens-per-second rule: a node is worth drafting while its chance of becoming text pays for its seconds.

Let R be the tokens per second that decoding makes so far. A node whose path is accepted with probability P brings P
tokens and costs its marginal seconds c; it raises the rate exactly when P >= R * c (Dinkelbach's condition for the best
ratio). P comes from how often the draft's confidence was borne out, c from costs fitted to the rounds so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from specdec.types import Plan, Round, Row, RowRound

BINS = 8
_UNMEASURED = (0.3, 0.1)  # tokens that a draft pass and a verified node are taken to cost before they were measured


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How often drafted tokens were accepted, by the draft's confidence; only tokens that were tested count.

    `pooled` starts as two tokens of 0.8; every bin is shrunk towards it with the weight of two tokens.
    """

    accepted: tuple[float, ...] = (0.0,) * BINS
    tested: tuple[float, ...] = (0.0,) * BINS

    @property
    def mean(self) -> float:
        """The acceptance of a token about which nothing is known."""
        return (sum(self.accepted) + 0.8 * 2) / (sum(self.tested) + 2)

    def of(self, confidence: float) -> float:
        """The acceptance of a token that the draft believes in this much."""
        b = _bin(confidence)
        return (self.accepted[b] + self.mean * 2) / (self.tested[b] + 2)

    def path(self, confidence: Sequence[float]) -> float:
        """The chance that all of these, one after the other, are accepted."""
        chance = 1.0
        for c in confidence:
            chance *= self.of(c)
        return chance

    def after(self, row: RowRound) -> Acceptance:
        """With one row's outcome added; old outcomes fade with a memory of about 200 tokens."""
        tested = min(row.accepted + 1 if row.finish is None else row.accepted, row.depth)
        confidence = row.confidence if row.confidence is not None else [1.0] * row.depth
        new_accepted, new_tested = list(self.accepted), list(self.tested)
        for i in range(tested):
            b = _bin(confidence[i])
            new_accepted[b] += i < row.accepted
            new_tested[b] += 1
        fade = min(1.0, 200 / max(sum(new_tested), 1.0))
        return Acceptance(tuple(a * fade for a in new_accepted), tuple(t * fade for t in new_tested))


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of a target pass as `fixed + slope * nodes`, fitted with fading weights; the slope is never negative.

    A weak prior says that a node costs a fiftieth of a pass; it only matters while all passes had the same size.
    """

    weight: float = 0.0
    nodes: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def add(self, nodes: float, seconds: float) -> Line:
        """With one more pass; each older one loses 5% of its weight.

        A stall (a compilation, another program) counts as three usual passes; passes of a third of the usual time say
        that what was measured before was the stall.
        """
        usual = self.seconds / self.weight if self.weight else seconds
        if seconds < usual / 3:
            return Line().add(nodes, seconds)
        f, seconds = 0.95, min(seconds, 3 * usual)
        return Line(
            f * self.weight + 1,
            f * self.nodes + nodes,
            f * self.seconds + seconds,
            f * self.squares + nodes * nodes,
            f * self.products + nodes * seconds,
        )

    @property
    def slope(self) -> float:
        """Seconds of one more node in a pass."""
        mean_n, mean_s = self.nodes / self.weight, self.seconds / self.weight
        prior = 0.02 * mean_s
        variance = max(self.squares / self.weight - mean_n**2, 0.0)
        covariance = self.products / self.weight - mean_n * mean_s
        return min(max((covariance + prior) / (variance + 1.0), 0.0), mean_s / max(mean_n, 1.0))

    def at(self, nodes: float) -> float:
        """Seconds of a pass over this many nodes."""
        return self.seconds / self.weight + self.slope * (nodes - self.nodes / self.weight)


@dataclass(frozen=True)
class CostPlan:
    """One row's part of the rule; a node's costs are the tokens that its seconds would bring at the current rate."""

    limit: int
    acceptance: Acceptance
    draft_cost: float
    verify_cost: float

    def go_on(self, confidence: Sequence[float], width: int = 1) -> bool:
        """Before a draft pass: the next token, of unknown confidence, must pay for drafting and for verifying it."""
        if len(confidence) >= self.limit:
            return False
        cost = self.draft_cost + width * self.verify_cost
        return self.acceptance.path(confidence) * self.acceptance.mean >= cost

    def keep(self, confidence: Sequence[float]) -> bool:
        """After it: the token is paid for, it must only pay for its verification."""
        return self.acceptance.path(confidence) >= self.verify_cost


@dataclass(frozen=True)
class Cost:
    """Tokens per second decide (see the module); may draft nothing, and then tries again, ever more rarely.

    `k` bounds a path. Fitted costs and acceptance carry over to the next call of the same generator (`fresh`).
    """

    k: int = 32
    acceptance: Acceptance = Acceptance()
    passes: Line = Line()
    draft_seconds: Mapping[str, float] = field(default_factory=dict)  # of one draft pass by source, fading means
    other_seconds: float = 0.0  # of a round, outside draft and target
    roots: float = 1.0  # nodes that a row needs without a draft: its live branches
    width: float = 1.0  # nodes that a drafted token takes: a search's draft has many branches
    plain_seconds: float | None = None  # of a target pass per row when nothing is drafted, fading mean
    tokens: float = 0.0  # fading sums over rounds, for the rate
    seconds: float = 0.0
    idle: int = 0  # rounds since the last draft
    patience: int = 16  # rounds without a draft before the next try

    def plan(self, rows: Sequence[Row]) -> list[Plan]:
        """One plan per row; all of limit 0 while plain decoding is predicted to be faster."""
        if not self._measured:
            return [CostPlan(self.k, self.acceptance, *_UNMEASURED)] * len(rows)
        if self.plain_seconds is None and self.acceptance.mean < 0.6 and self.passes.weight > 1.5:
            return [CostPlan(0, self.acceptance, 0.0, 0.0)] * len(rows)  # one look at what not drafting costs
        if not self._pays(len(rows)):
            return [CostPlan(int(self.idle >= self.patience), self.acceptance, 0.0, 0.0)] * len(rows)
        rate = max(self.tokens / self.seconds if self.seconds else 0.0, self._plain_rate(len(rows)))
        # A draft that asks before each pass is the dearest; one that copies has nothing to ask.
        draft = rate * max(self.draft_seconds.values()) / len(rows)
        return [CostPlan(self.k, self.acceptance, draft, rate * self.passes.slope)] * len(rows)

    @property
    def _measured(self) -> bool:
        return bool(self.passes.weight and self.draft_seconds)

    def _pays(self, rows: int) -> bool:
        """Whether some number of tokens per row is predicted to beat plain decoding."""
        plain, mean, slope = self._plain_rate(rows), self.acceptance.mean, self.passes.slope
        seconds = self.passes.at(rows * self.roots) + self.other_seconds
        more = rows * self.width * slope + min(
            self.draft_seconds.values()
        )  # of one more token per row, from the cheapest source
        expected = chance = 1.0
        for k in range(1, self.k + 1):
            chance *= mean
            expected += chance
            if rows * expected > plain * (seconds + k * more):
                return True
        return False

    def _plain_rate(self, rows: int) -> float:
        """Tokens per second without a draft: as measured, or where there was no such pass yet, as predicted."""
        seconds = self.passes.at(rows * self.roots) if self.plain_seconds is None else rows * self.plain_seconds
        return rows / (seconds + self.other_seconds)

    def after(self, round: Round) -> Cost:
        """With this round's outcomes, costs and rate; a prompt's round teaches only acceptance."""
        acceptance = self.acceptance
        for row in round.rows:
            acceptance = acceptance.after(row)
        if any(row.prefill for row in round.rows):
            return replace(self, acceptance=acceptance)
        drafted = max(row.depth for row in round.rows)
        nodes, depths = sum(row.drafted for row in round.rows), sum(row.depth for row in round.rows)
        return replace(
            self,
            acceptance=acceptance,
            roots=_fading(self.roots, (round.nodes - nodes) / len(round.rows)),
            width=_fading(self.width, nodes / depths) if depths else self.width,
            passes=self.passes.add(round.nodes, round.verify_seconds),
            draft_seconds=self._drafting(round, drafted),
            plain_seconds=self.plain_seconds
            if drafted
            else _fading(self.plain_seconds, round.verify_seconds / len(round.rows)),
            other_seconds=_fading(self.other_seconds, round.seconds - round.draft_seconds - round.verify_seconds),
            tokens=0.9 * self.tokens + sum(len(row.steps) for row in round.rows),
            seconds=0.9 * self.seconds + round.seconds,
            idle=0 if drafted else self.idle + 1,
            patience=self._patience(round, drafted),
        )

    def _drafting(self, round: Round, drafted: int) -> Mapping[str, float]:
        """Seconds of a draft pass by source; a round with several sources teaches only about the longest draft's."""
        if not drafted:
            return self.draft_seconds
        source = max(round.rows, key=lambda row: row.depth).source
        old = self.draft_seconds.get(source)
        return {**self.draft_seconds, source: _fading(old, round.draft_seconds / drafted)}

    def _patience(self, round: Round, drafted: int) -> int:
        """A try that brought nothing doubles the wait for the next one; anything accepted makes it short again."""
        if any(row.accepted for row in round.rows):
            return 16
        tried = drafted and self._measured and not self._pays(len(round.rows))
        return min(2 * self.patience, 256) if tried else self.patience

    def fresh(self, k: int) -> Cost:
        """All that was learned, except the rate of the last call's rounds, for a call with this bound."""
        return replace(self, k=k, tokens=0.0, seconds=0.0, idle=self.patience // 2)


def _bin(confidence: float) -> int:
    return min(int(confidence * BINS), BINS - 1)


def _fading(old: float | None, new: float) -> float:
    """A mean that forgets, and that stalls move but little (see `Line.add`)."""
    new = max(new, 0.0)  # differences of clocks may round below it
    return new if not old or new < old / 3 else 0.8 * old + 0.2 * min(new, 3 * old)
