"""Prompts of every shape as rows of token ids without padding, and tokenizers."""

from specdec.generator.inputs.pictures import open_picture, split
from specdec.generator.inputs.predictions import with_predictions
from specdec.generator.inputs.prompts import FEATURES, NAMES, Prompt, Prompts, RowPrompt, pad_id, read_prompts
from specdec.generator.inputs.tokenizers import check_tokenizer, tokenizer_beside

__all__ = [
    "FEATURES",
    "NAMES",
    "Prompt",
    "Prompts",
    "RowPrompt",
    "check_tokenizer",
    "open_picture",
    "pad_id",
    "read_prompts",
    "split",
    "tokenizer_beside",
    "with_predictions",
]
