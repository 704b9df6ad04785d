"""What samples come to: speedups with intervals, percentiles, acceptance by position, and the predicted speedup."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specdec.bench.samples import Sample

RESAMPLES = 2000
CONFIDENCE = 0.95
PERCENTILES = (50, 90, 99)
_SAME = 0.02  # a speedup this near 1 is called none where there is no interval


class Speedup(NamedTuple):
    """How many times faster than plain decoding, with its 95% interval where several requests were measured."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def state(self) -> str:
        """`faster`, `slower` or `same`: which side of 1 the interval lies on."""
        low = self.value - _SAME if self.low is None else self.low
        high = self.value + _SAME if self.high is None else self.high
        return "faster" if low > 1 else "slower" if high < 1 else "same"

    def in_words(self) -> str:
        """One sentence."""
        known = self.low is not None and self.high is not None
        interval = f" (95% interval {self.low:.2f} to {self.high:.2f})" if known else ""
        return {
            "faster": f"{self.value:.2f}× faster than plain decoding{interval}",
            "slower": f"assistance is SLOWER here: {self.value:.2f}× plain decoding's speed{interval}",
            "same": f"no clear difference from plain decoding: {self.value:.2f}×{interval}",
        }[self.state]


class Request(NamedTuple):
    """One batch of prompts: median seconds over the repetitions, and its new tokens."""

    seconds: float
    tokens: float


def requests(samples: Sequence[Sample]) -> dict[int, Request]:
    """The requests of one system, by the number of their batch."""
    return {
        batch: Request(statistics.median(s.seconds for s in own), statistics.median(s.count for s in own))
        for batch, own in _repetitions(samples).items()
    }


def typical(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Of every request the repetition that took the median time, or the two around it."""
    ordered = [sorted(own, key=lambda s: s.seconds) for own in _repetitions(samples).values()]
    return [own[(len(own) - 1) // 2 : len(own) // 2 + 1] for own in ordered]


def _repetitions(samples: Sequence[Sample]) -> dict[int, list[Sample]]:
    """The samples of every request, by the number of its batch."""
    by_batch: dict[int, list[Sample]] = {}
    for sample in samples:
        by_batch.setdefault(sample.batch, []).append(sample)
    return by_batch


def per_token(samples: Sequence[Sample]) -> float:
    """Seconds per new token over all requests; infinite without any."""
    found = requests(samples).values()
    tokens = sum(r.tokens for r in found)
    return sum(r.seconds for r in found) / tokens if tokens else float("inf")


def speedup(plain: Sequence[Sample], other: Sequence[Sample]) -> Speedup | None:
    """Plain seconds per token over the other system's, on the requests that both have; None where there are none.

    The interval is a percentile bootstrap over requests (Efron and Tibshirani 1993, chapter 13), paired and seeded.
    """
    from scipy.stats import bootstrap

    mine, theirs = requests(plain), requests(other)
    both = [(*mine[batch], *theirs[batch]) for batch in sorted(mine.keys() & theirs.keys())]
    if not both:
        return None
    columns = np.array(both, dtype=float).T
    value = float(_ratio(*columns))
    if len(both) < 2:
        return Speedup(value)
    found = bootstrap(
        tuple(columns),
        _ratio,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Speedup(value, float(found.low), float(found.high))


def _ratio(
    seconds: np.ndarray, tokens: np.ndarray, other_seconds: np.ndarray, other_tokens: np.ndarray, axis: int = -1
) -> np.ndarray:
    """Seconds per token of the first system over the second's."""
    plain = seconds.sum(axis) / tokens.sum(axis)
    result: np.ndarray = plain / (other_seconds.sum(axis) / other_tokens.sum(axis))
    return result


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90 and p99, interpolated between neighbours; None without values."""
    if not values:
        return None
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}


class Position(NamedTuple):
    """Drafted tokens at one place of their chain: how many there were, how many were tested, how many accepted.

    A token is tested when all before it were accepted.
    """

    drafted: int
    tested: int
    accepted: int


def acceptance_by_position(drafted: Sequence[int], accepted: Sequence[int]) -> list[Position]:
    """From the tokens that every round drafted and accepted, along a chain."""
    steps = list(zip(drafted, accepted, strict=True))
    return [
        Position(
            sum(d > place for d, _ in steps),
            sum(d > place and a >= place for d, a in steps),
            sum(a > place for _, a in steps),
        )
        for place in range(max(drafted, default=0))
    ]


class Prediction(NamedTuple):
    """What the speedup of a constant number of drafted tokens should be.

    `alpha` is the chance that a tested token is accepted, `cost` the seconds of one drafted token over those of a
    target pass.
    """

    alpha: float
    cost: float

    def speedup(self, k: int) -> float:
        """Theorem 3.8 of Leviathan et al. 2023, arXiv 2211.17192: a pass over k + 1 tokens costs one over a token."""
        expected = k + 1 if self.alpha >= 1 else (1 - self.alpha ** (k + 1)) / (1 - self.alpha)
        return float(expected / (k * self.cost + 1))


def predict(plain: Sequence[Sample], sweep: Sequence[Sample]) -> Prediction | None:
    """From plain decoding and all samples of a sweep over k; None where nothing was drafted."""
    places = [acceptance_by_position(s.drafted, s.accepted) for s in sweep]
    tested = sum(place.tested for own in places for place in own)
    drafted = sum(sum(s.drafted) for s in sweep)
    passes = sum(s.passes for s in plain)
    if not tested or not passes:
        return None
    accepted = sum(place.accepted for own in places for place in own)
    a_pass = sum(s.verify_seconds + s.select_seconds for s in plain) / passes
    return Prediction(accepted / tested, sum(s.draft_seconds for s in sweep) / drafted / a_pass)
