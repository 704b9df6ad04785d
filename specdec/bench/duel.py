"""One prompt continued with and without the draft, in turn: times and texts, for `specdec demo`."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import Any

from specdec.bench.machine import Watch
from specdec.bench.samples import Difference, differences
from specdec.generator.generation import Generation
from specdec.generator.generator import SpecGenerator

_RUNS = 2  # of both


@dataclass(frozen=True)
class Duel:
    """Plain and assisted runs of one prompt: the outputs of the last runs, mean tokens per second of all runs."""

    plain: Generation
    assisted: Generation
    plain_rate: float
    assisted_rate: float
    difference: Difference | None

    @property
    def speedup(self) -> float:
        return self.assisted_rate / self.plain_rate


def duel(assisted: SpecGenerator, plain: SpecGenerator, text: str, *, watch: Watch, **options: Any) -> Duel:
    """Times both in turn and compares each pair of texts; both have run before, and `watch` looks before every run."""
    outs, rates, difference = list[Generation](), list[float](), None
    for generator in (plain, assisted) * _RUNS:
        watch.look()
        outs.append(generator.generate(text, **options))
        rates.append(outs[-1].stats.tokens_per_second if outs[-1].stats is not None else 0.0)
        if generator is assisted:
            difference = difference or next(differences(*(out.new_tokens() for out in outs[-2:])), None)
    return Duel(*outs[-2:], mean(rates[::2]), mean(rates[1::2]), difference)
