"""Whether an assisted text is plain decoding's own; where it is not, how near a tie the target was there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from specdec.bench.samples import Mismatch, Sample
from specdec.generator.generation import Generation
from specdec.generator.generator import SpecGenerator


class Difference(NamedTuple):
    """The first new position at which a row differs, and what each wrote there, None past its end."""

    row: int
    position: int
    plain: int | None
    other: int | None


def differences(plain: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> Iterator[Difference]:
    """One for every row of new ids that differs."""
    for row, (mine, theirs) in enumerate(zip(plain, other, strict=True)):
        for position, (a, b) in enumerate(zip_longest(mine, theirs)):
            if a != b:
                yield Difference(row, position, a, b)
                break


def explain(plain: Sample, other: Sample, generator: SpecGenerator, call: Mapping[str, Any]) -> list[Mismatch]:
    """The mismatches of a sample, with the gap between the target's two best logits.

    `generator` and `call` are plain decoding's, which is repeated to see its logits.
    """
    found = list(differences(plain.tokens, other.tokens))
    out = generator.generate(**call, output_logits=True) if found else None
    return [Mismatch(*other.key, *difference, _gap(out, difference)) for difference in found]


def _gap(out: Generation | None, at: Difference) -> float | None:
    """Best minus second-best logit before the token in question; None for a search, and where plain had ended."""
    if out is None or out.logits is None or at.plain is None:
        return None
    if out.beam_indices is not None or out.sequences_scores is not None:
        return None
    best = out.logits[at.position][at.row].float().topk(2).values
    return float(best[0] - best[1])
