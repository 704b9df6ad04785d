"""Figures of samples: speedups with intervals, and percentiles."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from specdec.bench.samples import Sample

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
        """`faster`, `slower` or `same`: on which side of 1 the interval lies; `unknown` without an interval."""
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


def requests(samples: Sequence[Sample]) -> dict[int, tuple[float, float]]:
    """The requests of one system by batch: median seconds and new tokens over its repetitions."""
    by_batch: dict[int, list[Sample]] = {}
    for sample in samples:
        by_batch.setdefault(sample.batch, []).append(sample)
    return {batch: (median(s.seconds for s in some), median(s.count for s in some)) for batch, some in by_batch.items()}


def per_token(samples: Sequence[Sample]) -> float:
    """Seconds per new token over all requests; infinite without any."""
    timings = requests(samples).values()
    tokens = sum(tokens for _, tokens in timings)
    return sum(seconds for seconds, _ in timings) / tokens if tokens else float("inf")


def speedup(plain: Sequence[Sample], assisted: Sequence[Sample]) -> Speedup | None:
    """The speedup of `assisted` on the requests that both systems have; None if they share none.

    The interval is a percentile bootstrap over requests (Efron and Tibshirani 1993, chapter 13), paired and seeded.
    """
    first, second = requests(plain), requests(assisted)
    pairs = [(*first[batch], *second[batch]) for batch in sorted(first.keys() & second.keys())]
    if not pairs:
        return None
    columns = np.array(pairs, dtype=float).T
    value = float(_ratio(*columns))
    if len(pairs) < 2:
        return Speedup(value)
    picks = np.random.default_rng(0).integers(len(pairs), size=(RESAMPLES, len(pairs)))
    low, high = np.percentile(_ratio(*columns[:, picks]), [50 - 50 * CONFIDENCE, 50 + 50 * CONFIDENCE])
    return Speedup(value, float(low), float(high))


def _ratio(seconds: np.ndarray, tokens: np.ndarray, other_seconds: np.ndarray, other_tokens: np.ndarray) -> np.ndarray:
    """Seconds per token of the first system over the second's `[...]`, from their requests `[..., requests]`."""
    plain = seconds.sum(-1) / tokens.sum(-1)
    result: np.ndarray = plain / (other_seconds.sum(-1) / other_tokens.sum(-1))
    return result


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90 and p99, interpolated; None without values."""
    if not values:
        return None
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}
