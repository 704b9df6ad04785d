"""The two sides of a model: what its encoder and its decoder read, each of which may be any module.

transformers' `EncoderDecoderModel`, `VisionEncoderDecoderModel` and `SpeechEncoderDecoderModel` are composites: they
hand each argument whose name begins with `decoder_` to their decoder, a model itself, without that beginning, and all
others to their encoder.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from specdec.errors import UnsupportedError

_READ_IDS_ALONE: dict[type, bool] = {}  # by the class of the encoder


def input_names(side: Any) -> frozenset[str]:
    """The arguments of a side's class; a side need not be a `PreTrainedModel`, which has `main_input_name`."""
    return frozenset(inspect.signature(type(side).forward).parameters)


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


def text_config(model: Any) -> Any:
    """The config of a model's text: its decoder's config, unless one class describes both sides.

    Of a config for both sides the library would build a renamed copy, with defaults for missing fields.
    """
    if not model.config.is_encoder_decoder:
        return model.config.get_text_config(decoder=True)
    config = getattr(model.get_decoder(), "config", model.config)
    return model.config if type(config) is type(model.config) else config


def text_embedding(model: Any) -> Any:
    """The embedding of the text's tokens, which is the decoder's; UnsupportedError for a model that names none."""
    decoder = model.get_decoder() if model.config.is_encoder_decoder else model
    for side in (decoder, model):
        with suppress(AttributeError, NotImplementedError):  # modules raise these, and classes without a name for it
            return side.get_input_embeddings()
    raise UnsupportedError(f"{type(model).__name__} has no embedding of tokens: call `model.generate`")


def encoder_inputs(model: Any) -> frozenset[str]:
    """The arguments of a model's encoder; none without an encoder."""
    return input_names(model.get_encoder()) if model.config.is_encoder_decoder else frozenset()


def num_ids(model: Any) -> int | None:
    """How many ids a model's text may hold: the size of the embedding that its decoder reads; None if it has none."""
    return _num_ids(model.get_decoder() if model.config.is_encoder_decoder else model)


def num_source_ids(model: Any) -> int | None:
    """How many ids a model's encoder reads; None without an encoder, or if that looks up no ids."""
    return _num_ids(model.get_encoder()) if "input_ids" in encoder_inputs(model) else None


def _num_ids(side: Any) -> int | None:
    embedding = getattr(side, "embed_tokens", None)
    with suppress(AttributeError, NotImplementedError):  # modules raise these, and models that look up hashes of ids
        embedding = side.get_input_embeddings()
    count = getattr(embedding, "num_embeddings", None)
    return None if count is None else int(count)


def adds_zero_types(model: Any) -> bool:
    """Whether a model of text reads tokens of type 0 where it gets no types, as BERT's kin does and GPT-2 does not."""
    return any(name.rpartition(".")[2] == "token_type_embeddings" for name, _ in model.named_modules())


@torch.no_grad()
def reads_ids_alone(model: Any) -> bool:
    """Whether a model's encoder reads ids, and needs nothing beside them, as UDOP's needs boxes."""
    encoder = model.get_encoder()
    if type(encoder) not in _READ_IDS_ALONE:
        reads = "input_ids" in encoder_inputs(model)
        if reads:
            try:
                encoder(input_ids=trial_ids(num_source_ids(model), 2).to(model.device))
            except Exception:  # whatever a family says
                reads = False
        _READ_IDS_ALONE[type(encoder)] = reads
    return _READ_IDS_ALONE[type(encoder)]


def source_width(model: Any) -> int:
    """The width of what a model's encoder returns."""
    config = getattr(model.get_encoder(), "config", model.config)
    width = getattr(model, "encoder_output_dim", None) or getattr(config, "d_model", None)  # speech with adapters
    return int(width or getattr(config, "hidden_size", None) or config.get_text_config().hidden_size)


def frame_mask(model: Any, output: Any, input_mask: Any) -> Tensor | None:
    """Which frames `[rows, frames]` of an encoder's output the decoder sees, as the model's forward says; None: all.

    Encoders of text have a frame for each input. Encoders of sound have fewer, and say which in their output or by a
    private method.
    """
    hidden = output["last_hidden_state"]
    if isinstance(mask := output.get("attention_mask"), Tensor):
        return mask
    if not isinstance(input_mask, Tensor):
        return None
    if input_mask.shape == hidden.shape[:2]:
        return input_mask
    encoder, frames = model.get_encoder(), hidden.shape[1]
    owner: Any
    for owner in (encoder, getattr(encoder, "prenet", None)):  # Speech2Text, Wav2Vec2 and its kin; SpeechT5
        if hasattr(owner, "_get_feature_vector_attention_mask"):
            valid: Tensor = owner._get_feature_vector_attention_mask(frames, input_mask)
            return valid
    for owner in (model, encoder):  # SeamlessM4T
        if hasattr(owner, "_compute_sub_sample_lengths_from_attention_mask"):
            lengths = owner._compute_sub_sample_lengths_from_attention_mask(input_mask)
            return (torch.arange(frames, device=hidden.device) < lengths.to(hidden.device)[:, None]).long()
    return None


def trial_ids(count: int | None, length: int) -> Tensor:
    """Ids `[1, length]` of `count`, far from special tokens, which stand at the ends."""
    most = count or length
    return (torch.arange(length) + most // 2)[None] % most
