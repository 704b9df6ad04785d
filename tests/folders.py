"""Tiny models saved with a byte-level tokenizer, as `from_pretrained` reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import tiny

SPECIALS = ["<pad>", "<s>", "</s>"]
WIDTH = len(SPECIALS) + 256


def byte_tokenizer(*, backwards: bool = False) -> PreTrainedTokenizerFast:
    """One token per byte; `backwards` numbers the same bytes in the other direction."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=backwards)
    bpe = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*SPECIALS, *alphabet])}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def saved_model(folder: Path, seed: int = 0, *, backwards: bool = False) -> str:
    """A tiny Llama with a byte-level tokenizer, saved in `folder`."""
    byte_tokenizer(backwards=backwards).save_pretrained(folder)
    tiny("llama", vocab=WIDTH, seed=seed).save_pretrained(folder)
    return str(folder)


def saved(name: str, folder: Path, **options: Any) -> str:
    """A tiny model without a tokenizer, saved in `folder`."""
    tiny(name, **options).save_pretrained(folder)
    return str(folder)
