"""Tokenizers that callers hand in, or that lie beside a model which they name."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from specdec import zoo
from specdec.errors import OptionError


def check_tokenizer(name: str, tokenizer: Any) -> None:
    """Raises OptionError unless `tokenizer`, the caller's argument `name`, is None or can encode and decode."""
    if tokenizer is not None and (isinstance(tokenizer, bytes) or not hasattr(tokenizer, "decode")):
        way_out = "load it with transformers.AutoTokenizer.from_pretrained"
        raise OptionError.of(name, "a transformers tokenizer", tokenizer, way_out)


def tokenizer_beside(source: str, **options: Any) -> Any:
    """The tokenizer in the folder or hub repository of a model, or of a pair of the zoo; None where there is none."""
    try:
        return AutoTokenizer.from_pretrained(zoo.locate(source, "target"), **options)  # a pair has one tokenizer
    except (OSError, ValueError, KeyError):
        return None
