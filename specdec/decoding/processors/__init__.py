"""Logits processors and warpers of one row: `(ids, logits) -> logits`."""

from specdec.decoding.processors.builtin import Timestamps
from specdec.decoding.processors.pipeline import Processors, build_processors
from specdec.decoding.processors.warpers import Top

__all__ = ["Processors", "Timestamps", "Top", "build_processors"]
