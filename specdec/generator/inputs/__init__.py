"""Prompts of every shape as rows of token ids without padding."""

from specdec.generator.inputs.pictures import open_picture, split
from specdec.generator.inputs.prompts import (
    FEATURES,
    NAMES,
    Prompt,
    Prompts,
    RowPrompt,
    pad_id,
    read_prompts,
    with_predictions,
)

__all__ = [
    "FEATURES",
    "NAMES",
    "Prompt",
    "Prompts",
    "RowPrompt",
    "open_picture",
    "pad_id",
    "read_prompts",
    "split",
    "with_predictions",
]
