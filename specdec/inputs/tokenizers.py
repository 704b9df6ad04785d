"""Tokenizers that callers hand in, or that lie beside a model which they name."""

from __future__ import annotations

from contextlib import suppress
from os import PathLike
from typing import Any

from transformers import AutoTokenizer

from specdec import zoo
from specdec.errors import OptionError
from specdec.loading import split_gguf


def check_tokenizer(name: str, tokenizer: Any) -> None:
    """Raises OptionError unless `tokenizer`, the caller's argument `name`, is None or can encode and decode."""
    if tokenizer is not None and (isinstance(tokenizer, bytes) or not hasattr(tokenizer, "decode")):
        way_out = "load it with transformers.AutoTokenizer.from_pretrained"
        raise OptionError.of(name, "a transformers tokenizer", tokenizer, way_out)


def tokenizer_beside(source: str, *, gguf_file: str | PathLike[str] | None = None, **options: Any) -> Any:
    """The tokenizer in the folder or hub repository of a model, or of a pair of the zoo; None where there is none.

    Where nothing lies beside a GGUF file, it is the one in the file.
    """
    folder, file = split_gguf(zoo.locate(source, "target"))  # a pair has one tokenizer
    file = file or (gguf_file and str(gguf_file))
    for place in ({}, {"gguf_file": file}) if file else ({},):
        with suppress(OSError, ValueError, KeyError, ImportError if file else ()):
            return AutoTokenizer.from_pretrained(folder, **place, **options)
    return None
