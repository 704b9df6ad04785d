"""What the cost rule learns from rounds: how often guesses are accepted, and the seconds of passes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import sqrt
from typing import Any, NamedTuple

from specdec.core.budget import Budget

_EDGES = (0.0001, 0.001, 0.003, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95)
BINS = len(_EDGES) + 1
_MEMORY = 200  # levels, the last ones, that count
_TRIALS = 4  # guesses of about one confidence that tell little yet
_LEAST = 0.001  # the least cost of a node, as a share of a pass
_IDLE = 0.99  # the weight of passes after each round without them


@dataclass(frozen=True)
class Acceptance:
    """How often guesses are accepted, by the draft's confidence in them; only tested guesses count.

    `bins` of confidence hold, with fading weights, how many guesses were tested and accepted, and the sum of their
    confidence. `levels`: how many depths were tested; of several guesses at one depth at most one is accepted.
    `later_accepted` and `later_levels`: without the first depths of proposals. The prior is two levels with an
    acceptance of 0.8, of all depths and of the later ones.
    """

    bins: tuple[tuple[float, float, float], ...] = ((0.0, 0.0, 0.0),) * BINS
    levels: float = 0.0
    later_accepted: float = 0.0
    later_levels: float = 0.0

    @cached_property
    def mean(self) -> float:
        """The acceptance of a level whose tokens are not known yet, wherever it stands."""
        return (sum(accepted for _, accepted, _ in self.bins) + 0.8 * 2) / (self.levels + 2)

    @property
    def hoped(self) -> float:
        """The mean and one standard error more: what may be hoped for after so few levels."""
        return min(self.mean + sqrt(self.mean * (1 - self.mean) / (self.levels + 2)), 1.0)

    @cached_property
    def later(self) -> float:
        """The acceptance of a level after accepted ones: higher, since drafts go on where they are sure."""
        return (self.later_accepted + 0.8 * 2) / (self.later_levels + 2)

    @cached_property
    def chances(self) -> tuple[list[float], list[float]]:
        """Per bin, a and b of the chance a + b * confidence of a guess.

        They are a line over all bins, times the guesses that the bin accepted beside those that the line expects there,
        shrunk towards 1 with the weight of two expected ones: a few misses of unlikely guesses change little. The line
        of likeliest tokens begins near 0. The line of tokens drawn with the target's own noise begins far higher, since
        unlikely ones are accepted nearly as often as others.
        """
        base, slope = self._line
        rates = [(accepted + 2) / (base * tested + slope * believed + 2) for tested, accepted, believed in self.bins]
        return [base * rate for rate in rates], [slope * rate for rate in rates]

    @property
    def _line(self) -> tuple[float, float]:
        """Base and slope of the acceptance over confidence, by least squares over the means of bins.

        The prior is two guesses of confidence 1 with an acceptance of 0.8, and two of confidence 0 with none.
        """
        bins = [(2.0, 1.6, 2.0), (2.0, 0.0, 0.0), *(sums for sums in self.bins if sums[0])]
        count, accepted, believed = (sum(sums) for sums in zip(*bins, strict=True))
        mean, goal = believed / count, accepted / count
        variance = sum(belief**2 / n for n, _, belief in bins) / count - mean**2
        covariance = sum(belief * right / n for n, right, belief in bins) / count - mean * goal
        slope = max(covariance / variance, 0.0)
        base = goal - slope * mean
        return (base, slope) if base > 0 else (0.0, goal / mean)

    @cached_property
    def untested(self) -> frozenset[int]:
        """The bins in which hardly a guess was tested."""
        return frozenset(number for number, (tested, _, _) in enumerate(self.bins) if tested < _TRIALS)

    def budget(
        self, limit: int, pass_cost: float, node_cost: float, branches: int | None = None, **others: Any
    ) -> Budget:
        """A budget whose chances are these, with these `others` of a budget's fields."""
        budget = Budget(limit, branches, _EDGES, node_cost=node_cost, pass_cost=pass_cost, **others)
        return adapt_budget(budget, self)

    def after(self, tested: Sequence[tuple[float, bool]], levels: float) -> Acceptance:
        """With these (confidence, accepted) guesses of a proposal on `levels` levels."""
        if not levels:
            return self
        bins = list(self.bins)
        for confidence, came_true in tested:
            count, accepted, believed = bins[b := bisect_right(_EDGES, confidence)]
            bins[b] = count + 1, accepted + came_true, believed + confidence
        hits = [came_true for _, came_true in tested]
        return Acceptance(
            tuple(bins),
            self.levels + levels,
            self.later_accepted + sum(hits) - any(hits),
            self.later_levels + levels - 1,
        ).faded(_MEMORY)

    def faded(self, most: float) -> Acceptance:
        """The same with the weight of at most so many levels."""
        fade = most / self.levels if self.levels > most else 1.0
        return Acceptance(
            tuple((count * fade, accepted * fade, believed * fade) for count, accepted, believed in self.bins),
            fade * self.levels,
            fade * self.later_accepted,
            fade * self.later_levels,
        )


class LinearFit(NamedTuple):
    """Seconds of a pass as `fixed + slope * nodes`, by least squares over passes with fading weights.

    `weight`: the sum of weights; `nodes`, `seconds`, `squares` (of nodes), `products` (nodes * seconds): weighted sums.
    The prior of the slope is the share `steepness` of a pass per node, with the weight of `trust` passes that differ by
    one node; by default it only matters while all passes have about the same size. The slope is always positive.
    `stalled`: the last pass took so long that it does not count.
    """

    weight: float = 0.0
    nodes: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    steepness: float = 0.02
    trust: float = 1.0
    stalled: bool = False

    def add(self, nodes: float, seconds: float) -> LinearFit:
        """With one more pass; each older one loses 5% of its weight.

        A pass of more than three times the mean time, more in proportion for more nodes, is a stall (another program,
        say), which does not count. The second in a row counts as three times the mean. A pass of less than a third,
        less in proportion for fewer nodes, shows that the earlier ones were stalls: it takes their place, and counts as
        two passes.
        """
        usual = self.seconds / self.weight if self.weight else seconds
        wider = nodes * self.weight / self.nodes if self.nodes else 1.0
        if seconds < min(wider, 1.0) * usual / 3:
            return LinearFit(steepness=self.steepness, trust=self.trust).add(nodes, seconds).add(nodes, seconds)
        most = 3 * max(wider, 1.0) * usual
        if seconds > most and not self.stalled:
            return self._replace(stalled=True)
        f, seconds = 0.95, min(seconds, most)
        return LinearFit(
            f * self.weight + 1,
            f * self.nodes + nodes,
            f * self.seconds + seconds,
            f * self.squares + nodes * nodes,
            f * self.products + nodes * seconds,
            self.steepness,
            self.trust,
        )

    @property
    def is_measured(self) -> bool:
        """Whether passes were measured twice: one alone may have been a stall, as the first after loading often is."""
        return self.weight > 1

    def idle(self) -> LinearFit:
        """With a little less weight, after a round in which other sources drafted: it is measured again in the end."""
        return LinearFit._make((*(_IDLE * value for value in self[:5]), *self[5:]))

    @property
    def slope(self) -> float:
        """Seconds of one more node in a pass."""
        mean_n, mean_s = self.nodes / self.weight, self.seconds / self.weight
        prior = self.trust * self.steepness * mean_s
        variance = max(self.squares - mean_n * self.nodes, 0.0)
        covariance = self.products - mean_n * self.seconds
        fitted = (covariance + prior) / (variance + self.trust)
        return min(max(fitted, _LEAST * mean_s), mean_s / max(mean_n, 1.0))

    def at(self, nodes: float) -> float:
        """Seconds of a pass over this many nodes."""
        seconds = self.seconds / self.weight + self.slope * (nodes - self.nodes / self.weight)
        return max(seconds, 0.0)  # differences may round below it


def adapt_budget(budget: Budget, acceptance: Acceptance | None, costs: tuple[float, float] | None = None) -> Budget:
    """A learned budget for guesses of this acceptance; None: their confidence is their chance.

    `costs`: other costs of a pass and of a node, unless nodes are free to try. One of a fixed length is unchanged.
    """
    if budget.edges is not _EDGES:
        return budget
    changes: dict[str, Any] = {"bases": (0.0,) * BINS, "rates": (1.0,) * BINS}
    if acceptance is not None:
        changes = {"first": acceptance.mean, "later": acceptance.later, "untested": acceptance.untested}
        changes["bases"], changes["rates"] = acceptance.chances
    if costs is not None and budget.node_cost:
        changes["pass_cost"], changes["node_cost"] = costs
    return replace(budget, **changes)
