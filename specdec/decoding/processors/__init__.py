"""Logits processors and warpers of one row: `(ids, logits) -> logits`."""

from specdec.decoding.processors.group_diversity import HammingDiversityLogitsProcessor
from specdec.decoding.processors.pipeline import Processors, build_processors
from specdec.decoding.processors.warpers import TopK, TopKTopP, TopP
from specdec.decoding.processors.whisper_timestamps import Timestamps

__all__ = [
    "HammingDiversityLogitsProcessor",
    "Processors",
    "Timestamps",
    "TopK",
    "TopKTopP",
    "TopP",
    "build_processors",
]
