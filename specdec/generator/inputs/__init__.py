"""Prompts of every shape as rows of token ids without padding, and tokenizers."""

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
    "pad_id",
    "read_prompts",
    "tokenizer_beside",
    "with_predictions",
]
