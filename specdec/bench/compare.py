"""Whether an assisted text equals plain decoding's; where it does not, how far apart the target's best logits are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from specdec.bench.samples import Mismatch, Sample
from specdec.generator.generation import Generation
from specdec.generator.generator import SpecGenerator


class Difference(NamedTuple):
    """The first new position at which two rows differ, and the token of each there; None past its end."""

    row: int
    position: int
    plain: int | None
    other: int | None


def differences(plain: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> Iterator[Difference]:
    """One difference for each row of new ids that differs."""
    for row, (mine, theirs) in enumerate(zip(plain, other, strict=True)):
        for position, (a, b) in enumerate(zip_longest(mine, theirs)):
            if a != b:
                yield Difference(row, position, a, b)
                break


def explain(plain: Sample, other: Sample, generator: SpecGenerator, call: Mapping[str, Any]) -> list[Mismatch]:
    """The mismatches of a sample; `generator` repeats plain decoding's `call` to get its logits."""
    found = list(differences(plain.tokens, other.tokens))
    out = generator.generate(**call, output_logits=True) if found else None
    return [Mismatch(*other.key, *difference, _gap(out, difference)) for difference in found]


def _gap(out: Generation | None, at: Difference) -> float | None:
    """Best minus second-best logit at the position; None for a search, and where the plain text had ended."""
    if out is None or out.logits is None or at.plain is None:
        return None
    if out.beam_indices is not None or out.sequences_scores is not None:
        return None
    best = out.logits[at.position][at.row].float().topk(2).values
    return float(best[0] - best[1])
