"""Tiny models of every family that summarises, with tokenizers that read and write text."""

from typing import Any

import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.folders import WIDTH, byte_tokenizer
from tests.tiny import tiny

FAMILIES = ("t5", "bart", "pegasus")
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ '' if loop.last else '|' }}{% endfor %}"
    "{% if add_generation_prompt %}|<assistant>{% endif %}"
)
NEW = 12
# Random models write what is no text; these are the ids of all but printable ASCII.
UNPRINTABLE = [i for i in range(3, WIDTH) if not ((c := byte_tokenizer().decode([i])).isascii() and c.isprintable())]


def tokenizer(*, ends: bool = False, most: int | None = None) -> PreTrainedTokenizerFast:
    """One token per byte; `ends`: with </s> after the text, as encoders read it; `most` is its model_max_length."""
    made = byte_tokenizer()
    if ends:
        made.backend_tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    if most is not None:
        made.model_max_length = most
    return made


def model(family: str, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A tiny model over bytes; `settings` are its own for summarization."""
    made = tiny(family, vocab=WIDTH, seed=seed)
    if settings:
        made.config.task_specific_params = {"summarization": settings}
    return made


def written(target: PreTrainedModel, ids: list[int], **options: Any) -> list[int]:
    """What transformers' own generate writes after, or about, these ids; without what begins it."""
    options = {"do_sample": False, **options}
    given = torch.tensor([ids])
    out = target.generate(given, attention_mask=torch.ones_like(given), **options)[0].tolist()
    return out[1:] if target.config.is_encoder_decoder else out[len(ids) :]
