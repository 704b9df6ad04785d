"""What a call reads: prompts of every shape, as rows of token ids without padding, and tokenizers."""

from specdec.inputs.limits import check_least, check_vocabulary, length_limit
from specdec.inputs.predictions import with_predictions
from specdec.inputs.prompts import FEATURES, NAMES, Prompt, Prompts, RowPrompt, pad_id, read_prompts
from specdec.inputs.tokenizers import check_tokenizer, tokenizer_beside

__all__ = [
    "FEATURES",
    "NAMES",
    "Prompt",
    "Prompts",
    "RowPrompt",
    "check_least",
    "check_tokenizer",
    "check_vocabulary",
    "length_limit",
    "pad_id",
    "read_prompts",
    "tokenizer_beside",
    "with_predictions",
]
