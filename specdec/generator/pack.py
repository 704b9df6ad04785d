"""A model on disk as specdec computes with it: loaded once, written, and loaded in seconds from then on."""

from __future__ import annotations

from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import AutoProcessor

from specdec.errors import OptionError
from specdec.generator.tokenizers import tokenizer_beside
from specdec.models.loading.load import save_loaded
from specdec.options import bundled_models
from specdec.options.load import Loading


def pack_model(target: str | PathLike[str], folder: str | PathLike[str], **options: Any) -> None:
    """Writes the model at `target`, loaded with these `options` of loading, its tokenizer and chat template.

    The folder is new or empty. Loading it takes the time of reading it: weights that `quantization` or a GGUF file put
    into few bits lie as they are multiplied. Raises OptionError for options that do not load a model, and for a folder
    that cannot be written to; UnsupportedError for models that cannot be packed; LoadError for broken models.
    """
    how, others = Loading.split(options)
    if others:
        raise OptionError.of("options", "options of loading", next(iter(others)))
    save_loaded(str(target), Path(folder), how)
    tokenizer = _processor(str(target), how) or tokenizer_beside(str(target), **how.beside)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _processor(target: str, how: Loading) -> Any:
    """The processor of recordings and texts for a model that hears; None for other models."""
    with suppress(Exception):  # most models have none, and each kind raises another error
        hub = {"revision": how.revision, "trust_remote_code": how.trust_remote_code}
        processor = AutoProcessor.from_pretrained(bundled_models.locate(target, "target"), **hub)
        return processor if hasattr(processor, "feature_extractor") else None
