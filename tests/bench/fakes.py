"""Samples, results and lies made by hand."""

from typing import Any

from specdec import SpecGenerator
from specdec.bench.results import Speedup
from specdec.bench.samples import Sample
from specdec.bench.systems import measure
from specdec.core.stats import Stats


def sample(system: str = "plain", batch: int = 0, repeat: int = 0, **values: Any) -> Sample:
    """Ten tokens in a second, unless `values` say otherwise."""
    common: dict[str, Any] = {
        **{"group": "g", "category": "code", "tokens": [list(range(10))], "stats": Stats(), "seconds": 1.0},
        **{"first_token": 0.1, "gaps": [0.1] * 9, "memory": 2**20, "spin": 0.001},
    }
    return Sample(system=system, batch=batch, repeat=repeat, **{**common, **values})


def reported(found: Speedup) -> dict[str, Any]:
    """A speedup as it stands in results."""
    return {**found._asdict(), "state": found.state, "words": found.in_words()}


def lie(generator: SpecGenerator, call: dict[str, Any]) -> Any:
    """A measured call whose assisted text has a wrong third-to-last token."""
    out, measured = measure(generator, call)
    if generator.draft is not None:
        out.sequences[0, -3] += 1
    return out, measured
