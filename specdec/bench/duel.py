"""One prompt continued with and without the draft, in turn: times and texts, for `specdec demo`."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter as clock
from typing import Any

from specdec.bench.machine import Watch
from specdec.bench.prompts import held_out_prompts
from specdec.bench.samples import Difference, differences
from specdec.generator.generation import Generation
from specdec.generator.generator import SpecGenerator

WARM_UP = 16
_PROMPTS = 12
_SECONDS = 6.0
_FALLBACK = (
    'class Stack:\n    """A last-in, first-out collection."""\n\n    def __init__(self):\n        self.items = []\n\n'
)


@dataclass(frozen=True)
class Duel:
    """Plain and assisted runs of one prompt: the outputs of the last runs, median tokens per second of all runs."""

    plain: Generation
    assisted: Generation
    plain_rate: float
    assisted_rate: float
    difference: Difference | None

    @property
    def speedup(self) -> float:
        return self.assisted_rate / self.plain_rate


def prompts() -> list[str]:
    """Held-out code of the standard library; a short class where its sources are not installed."""
    return held_out_prompts(_PROMPTS) or [_FALLBACK]


def duel(assisted: SpecGenerator, plain: SpecGenerator, text: str, *, watch: Watch, **options: Any) -> Duel:
    """Times both in turn and compares each pair of texts; short runs warm up, and `watch` looks before every run.

    It runs both twice, and a third time while less than `_SECONDS` have passed.
    """
    for generator in (plain, assisted):
        generator.generate(text, **{**options, "max_new_tokens": WARM_UP})
    rates: tuple[list[float], list[float]] = ([], [])
    difference: Difference | None = None
    began = clock()
    for repeat in range(3):
        if repeat > 1 and clock() - began > _SECONDS:
            break
        outs = []
        for generator in (plain, assisted):
            watch.look()
            outs.append(generator.generate(text, **options))
        difference = difference or next(differences(*(out.new_tokens() for out in outs)), None)
        for out, side in zip(outs, rates, strict=True):
            side.append(out.stats.tokens_per_second if out.stats is not None else 0.0)
    return Duel(outs[0], outs[1], median(rates[0]), median(rates[1]), difference)
