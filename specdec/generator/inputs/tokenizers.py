"""Tokenizers: checked, or loaded from the folder or repository of a model."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from os import PathLike
from typing import Any

from transformers import AutoProcessor, AutoTokenizer

from specdec.errors import OptionError
from specdec.options import bundled_models
from specdec.options.load import split_gguf


def check_tokenizer(name: str, tokenizer: Any) -> None:
    """Raises OptionError about the argument `name` unless `tokenizer` is None or can decode."""
    if tokenizer is not None and (isinstance(tokenizer, bytes) or not hasattr(tokenizer, "decode")):
        way_out = "load it with transformers.AutoTokenizer.from_pretrained"
        raise OptionError.of(name, "a transformers tokenizer", tokenizer, way_out)


def ids_of(tokenizer: Any, text: str, **how: Any) -> list[int]:
    """The ids of a text; raises OptionError for one with half of a character, as JSON and names of files may hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"half of a character (the lone surrogate {text[error.start]!r}, at {error.start})"
        raise OptionError(f"the text holds {half}: leave it out") from None
    ids: list[int] = tokenizer(text, **how)["input_ids"]
    return ids


def tokenizer_beside(
    source: str, *, sees: bool = False, gguf_file: str | PathLike[str] | None = None, **options: Any
) -> Any:
    """The tokenizer in the folder or hub repository of a model, or of a `zoo:` pair; None where none exists.

    For a GGUF file without a tokenizer beside it: the one in the file. For a model that `sees`: its processor, if that
    works here.
    """
    folder, own = split_gguf(bundled_models.locate(source, "target"))  # a pair has one tokenizer
    file = own or gguf_file
    if sees:
        with suppress(OSError, ValueError, KeyError, ImportError, TypeError):
            processor = AutoProcessor.from_pretrained(folder, **options)
            if hasattr(processor, "image_processor"):
                return processor
    places: list[dict[str, str]] = [{}]
    if file is not None and find_spec("gguf") is not None:
        places.append({"gguf_file": str(file)})
    for place in places:
        with suppress(OSError, ValueError, KeyError):
            return AutoTokenizer.from_pretrained(folder, **place, **options)
    return None
