"""Figures of samples: speedups with intervals, percentiles, acceptance by position, and the predicted speedup."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specdec.bench.samples import Sample
from specdec.core.stats import Stats

RESAMPLES = 2000
CONFIDENCE = 0.95
PERCENTILES = (50, 90, 99)


class Speedup(NamedTuple):
    """Plain decoding's seconds per token over another system's, with the 95% interval of several requests."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def state(self) -> str:
        """`faster`, `slower` or `same`: on which side of 1 the interval lies; `unknown` without one."""
        if self.low is None or self.high is None:
            return "unknown"
        return "faster" if self.low > 1 else "slower" if self.high < 1 else "same"

    def in_words(self) -> str:
        if self.state == "unknown":
            return f"{self.value:.2f}× plain decoding's speed (one request, no interval)"
        interval = f" (95% interval {self.low:.2f} to {self.high:.2f})"
        return {
            "faster": f"{self.value:.2f}× faster than plain decoding{interval}",
            "slower": f"assistance is SLOWER here: {self.value:.2f}× plain decoding's speed{interval}",
            "same": f"no clear difference from plain decoding: {self.value:.2f}×{interval}",
        }[self.state]


class BatchTiming(NamedTuple):
    """One batch of prompts: median seconds and new tokens over its repetitions."""

    seconds: float
    tokens: float


def requests(samples: Sequence[Sample]) -> dict[int, BatchTiming]:
    """The requests of one system, by batch."""
    return {
        batch: BatchTiming(statistics.median(s.seconds for s in own), statistics.median(s.count for s in own))
        for batch, own in _repetitions(samples).items()
    }


def typical(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The repetition of median time of each request, or the two around it."""
    ordered = [sorted(own, key=lambda s: s.seconds) for own in _repetitions(samples).values()]
    return [own[(len(own) - 1) // 2 : len(own) // 2 + 1] for own in ordered]


def _repetitions(samples: Sequence[Sample]) -> dict[int, list[Sample]]:
    """The samples of each request, by batch."""
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
    """The speedup of `other` on the requests that both systems have; None without any.

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
    """p50, p90 and p99, interpolated; None without values."""
    if not values:
        return None
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}


class Position(NamedTuple):
    """Counts of the tokens drafted at one position; a token is tested where all before it were accepted."""

    drafted: int
    tested: int
    accepted: int


def acceptance_by_position(stats: Stats) -> list[Position]:
    """Counts by position, where every round drafted a chain."""
    steps = list(zip(stats.per_step_drafted, stats.per_step_accepted, strict=True))
    return [
        Position(
            sum(d > place for d, _ in steps),
            sum(d > place and a >= place for d, a in steps),
            sum(a > place for _, a in steps),
        )
        for place in range(max(stats.per_step_drafted, default=0))
    ]


class PredictedSpeedup(NamedTuple):
    """The expected speedup by draft length.

    `alpha` is the chance that a tested token is accepted, `cost` a drafted token's seconds over a target pass's.
    """

    alpha: float
    cost: float

    def speedup(self, k: int) -> float:
        """Theorem 3.8 of Leviathan et al. 2023, arXiv 2211.17192: a pass over k + 1 tokens costs one over a token."""
        expected = k + 1 if self.alpha >= 1 else (1 - self.alpha ** (k + 1)) / (1 - self.alpha)
        return float(expected / (k * self.cost + 1))


def predict(plain: Stats, sweep: Stats) -> PredictedSpeedup | None:
    """The prediction from plain decoding and all calls of a sweep; None where nothing was drafted."""
    places = acceptance_by_position(sweep)
    if not places:
        return None
    alpha = sum(place.accepted for place in places) / sum(place.tested for place in places)
    a_pass = (plain.verify_seconds + plain.select_seconds) / plain.num_target_passes
    return PredictedSpeedup(alpha, sweep.draft_seconds / sweep.num_draft_tokens / a_pass)
