"""Models around a decoder that is a model itself: their part for text, and how they hand on its arguments.

transformers' `EncoderDecoderModel`, `VisionEncoderDecoderModel` and `SpeechEncoderDecoderModel` hand each argument
whose name begins with `decoder_` to their decoder, without that beginning, and all others to their encoder.
"""

from __future__ import annotations

import inspect
from typing import Any

from transformers import PreTrainedConfig


def is_composite(config: Any) -> bool:
    """Whether this config holds a config of an encoder and a config of a decoder."""
    return bool(config.is_encoder_decoder) and isinstance(getattr(config, "decoder", None), PreTrainedConfig)


def decoder_config(config: Any) -> Any:
    """The text decoder's part of a model's config; a flat config for both sides as it is.

    Of a flat config the library would build a renamed copy, with defaults for missing fields.
    """
    parts = (getattr(config, name, None) for name in ("decoder", "generator", "text_config"))
    is_flat = config.is_encoder_decoder and not any(isinstance(part, PreTrainedConfig) for part in parts)
    return config if is_flat else config.get_text_config(decoder=True)


def model_inputs(model: Any) -> frozenset[str]:
    """The arguments of a model's forward, with the ones that it hands to its decoder."""
    names = frozenset(inspect.signature(model.forward).parameters)
    if is_composite(model.config):
        names |= {f"decoder_{name}" for name in inspect.signature(model.get_decoder().forward).parameters}
    return names


def position_padding(decoder: Any) -> int | None:
    """The padding id after which a decoder's table of positions begins, as in RoBERTa and its kin; None if at 0."""
    tables = (module for name, module in decoder.named_modules() if name.endswith("position_embeddings"))
    return next((padding for table in tables if (padding := getattr(table, "padding_idx", None)) is not None), None)


def decoder_of(model: Any) -> Any:
    """The innermost decoder, whose layers hold the cache; a composite's decoder is a model with a head around it."""
    decoder = model.get_decoder()
    return decoder if decoder is model or not hasattr(decoder, "get_decoder") else decoder_of(decoder)
