"""What the cost rule learns from rounds: how often a draft is right, and what passes cost."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.types import RowRound

_EDGES = (0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95)
BINS = len(_EDGES) + 1
_LEAST = 0.001  # of a pass: no number of passes proves that a node costs nothing


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How far a draft's confidence is borne out; only tokens that were tested count.

    Of several guesses at one depth at most one is accepted: `levels` of them were tested. The `mean` starts as two
    levels of 0.8. `believed` is the summed confidence of the tested guesses. What a bin's guesses bring for their
    confidence is shrunk towards what all guesses bring, with the weight of two tokens *expected*: unlikely guesses
    are not given up after a few misses, which is what they are mostly.
    """

    accepted: tuple[float, ...] = (0.0,) * BINS
    believed: tuple[float, ...] = (0.0,) * BINS
    levels: float = 0.0

    @property
    def mean(self) -> float:
        """The acceptance of the next level, when nothing is known of its tokens."""
        return (sum(self.accepted) + 0.8 * 2) / (self.levels + 2)

    def of(self, confidence: float) -> float:
        """The acceptance of a token that the draft believes in this much."""
        b, borne_out = _bin(confidence), (sum(self.accepted) + 0.8 * 2) / (sum(self.believed) + 0.8 * 2)
        return min(confidence * (self.accepted[b] + borne_out * 2) / (self.believed[b] + 2), 1.0)

    def path(self, confidence: Sequence[float]) -> float:
        """The chance that all of these, one after the other, are accepted."""
        chance = 1.0
        for c in confidence:
            chance *= self.of(c)
        return chance

    def after(self, row: RowRound) -> Acceptance:
        """With one row's outcome added; old outcomes fade with a memory of about 200 levels."""
        accepted, believed = list(self.accepted), list(self.believed)
        for confidence, came_true in row.tested:
            b = _bin(confidence)
            accepted[b] += came_true
            believed[b] += confidence
        levels = self.levels + row.levels
        fade = min(1.0, 200 / max(levels, 1.0))
        return Acceptance(tuple(n * fade for n in accepted), tuple(n * fade for n in believed), levels * fade)


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of a target pass as `fixed + slope * nodes`, fitted with fading weights; the slope is always positive.

    Beforehand a node is taken to cost the share `steepness` of a pass, which counts as `trust` passes whose numbers of
    nodes differ by one: by default a little, so that it only matters while all passes have about the same size.
    """

    weight: float = 0.0
    nodes: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    steepness: float = 0.02
    trust: float = 1.0

    def add(self, nodes: float, seconds: float) -> Line:
        """With one more pass; each older one loses 5% of its weight.

        A stall (a compilation, another program) counts as three usual passes, or where there are more nodes than usual,
        as many times that; passes of a third of the usual time say that what was measured before was the stall.
        """
        usual = self.seconds / self.weight if self.weight else seconds
        if seconds < usual / 3:
            return Line(steepness=self.steepness, trust=self.trust).add(nodes, seconds)
        wider = max(nodes * self.weight / self.nodes, 1.0) if self.nodes else 1.0
        f, seconds = 0.95, min(seconds, 3 * wider * usual)
        return Line(
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
        return self.seconds / self.weight + self.slope * (nodes - self.nodes / self.weight)


def _bin(confidence: float) -> int:
    return bisect_right(_EDGES, confidence)
