"""What a call reads: prompts of every shape, as rows of token ids without padding."""

from specdec.inputs.prompts import NAMES, Prompt, Prompts, RowPrompt, pad_id, read_prompts

__all__ = ["NAMES", "Prompt", "Prompts", "RowPrompt", "pad_id", "read_prompts"]
