"""What the cost rule learns from rounds: how often guesses are accepted, and the seconds of passes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

_EDGES = (0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95)
BINS = len(_EDGES) + 1
_FEW = tuple(min(2.0, 8 * edge) for edge in (*_EDGES, 1.0))  # expected tokens of eight guesses of a bin, at most two
_TRIALS = 4  # guesses of about one confidence that tell little yet
_LEAST = 0.001  # the least cost of a node, as a share of a pass


@dataclass(frozen=True)
class Acceptance:
    """How often guesses are accepted, by the draft's confidence in them; only tested guesses count.

    Per bin of confidence, with fading weights: `accepted` guesses, and `believed`, the summed confidence of all.
    `levels`: how many depths were tested; of several guesses at one depth at most one is accepted.

    The rate of a bin, accepted / believed, is shrunk towards that of all bins with the weight of two *expected* tokens,
    so that a few misses of unlikely guesses change little, or with that of eight guesses where it is higher so: at high
    temperatures unlikely guesses hold as often as others, and a few hits say it. The prior is two levels with an
    acceptance of 0.8.
    """

    accepted: tuple[float, ...] = (0.0,) * BINS
    believed: tuple[float, ...] = (0.0,) * BINS
    levels: float = 0.0
    edges: ClassVar[tuple[float, ...]] = _EDGES

    @cached_property
    def mean(self) -> float:
        """The acceptance of a level whose tokens are not known yet."""
        return (sum(self.accepted) + 0.8 * 2) / (self.levels + 2)

    @cached_property
    def rates(self) -> list[float]:
        """Per bin, the chance of a guess divided by the draft's confidence in it."""
        overall = (sum(self.accepted) + 0.8 * 2) / (sum(self.believed) + 0.8 * 2)
        bins = zip(self.accepted, self.believed, _FEW, strict=True)
        return [max((a + overall * w) / (b + w) for w in (2.0, few)) for a, b, few in bins]

    def of(self, confidence: float) -> float:
        """The chance of a guess of this confidence."""
        return min(confidence * self.rates[_bin(confidence)], 1.0)

    def is_unknown(self, confidence: float) -> bool:
        """Whether hardly a guess of about this confidence was tested."""
        return self.believed[_bin(confidence)] < _TRIALS * confidence

    def after(self, tested: Sequence[tuple[float, bool]], levels: float) -> Acceptance:
        """With these (confidence, accepted) guesses on `levels` levels; the memory is about 200 levels long."""
        if not (tested or levels):
            return self
        accepted, believed = list(self.accepted), list(self.believed)
        for confidence, came_true in tested:
            b = _bin(confidence)
            accepted[b] += came_true
            believed[b] += confidence
        levels += self.levels
        fade = min(1.0, 200 / max(levels, 1.0))
        return Acceptance(tuple(n * fade for n in accepted), tuple(n * fade for n in believed), levels * fade)


class LinearFit(NamedTuple):
    """Seconds of a pass as `fixed + slope * nodes`, by least squares over passes with fading weights.

    `weight`: the sum of weights; `nodes`, `seconds`, `squares` (of nodes), `products` (nodes * seconds): weighted sums.
    The prior of the slope is the share `steepness` of a pass per node, with the weight of `trust` passes that differ by
    one node; by default it only matters while all passes have about the same size. The slope is always positive.
    """

    weight: float = 0.0
    nodes: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    steepness: float = 0.02
    trust: float = 1.0

    def add(self, nodes: float, seconds: float) -> LinearFit:
        """With one more pass; each older one loses 5% of its weight.

        A stall (a compilation, another program) must not count in full: seconds are cut to three times those of a mean
        pass, more in proportion for more nodes. A pass of less than a third of the mean time shows that the earlier
        ones were stalls: they are dropped.
        """
        usual = self.seconds / self.weight if self.weight else seconds
        if seconds < usual / 3:
            return LinearFit(steepness=self.steepness, trust=self.trust).add(nodes, seconds)
        wider = max(nodes * self.weight / self.nodes, 1.0) if self.nodes else 1.0
        f, seconds = 0.95, min(seconds, 3 * wider * usual)
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
    def slope(self) -> float:
        """Seconds of one more node in a pass."""
        mean_n, mean_s = self.nodes / self.weight, self.seconds / self.weight
        prior = self.trust * self.steepness * mean_s
        variance = max(self.squares / self.weight - mean_n**2, 0.0)
        covariance = self.products / self.weight - mean_n * mean_s
        fitted = (covariance + prior) / (variance + self.trust)
        return min(max(fitted, _LEAST * mean_s), mean_s / max(mean_n, 1.0))

    def at(self, nodes: float) -> float:
        """Seconds of a pass over this many nodes."""
        seconds = self.seconds / self.weight + self.slope * (nodes - self.nodes / self.weight)
        return max(seconds, 0.0)  # differences may round below it


def _bin(confidence: float) -> int:
    return bisect_right(_EDGES, confidence)
