"""Logits processors and warpers of one row: `(ids, logits) -> logits`."""

from specdec.logits.diversity import HammingDiversityLogitsProcessor
from specdec.logits.processors import Processors, build_processors
from specdec.logits.timestamps import Timestamps
from specdec.logits.warpers import TopK, TopKTopP, TopP

__all__ = [
    "HammingDiversityLogitsProcessor",
    "Processors",
    "Timestamps",
    "TopK",
    "TopKTopP",
    "TopP",
    "build_processors",
]
