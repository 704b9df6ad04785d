"""A Whisper draft without an encoder runs on the target's."""

from __future__ import annotations

from typing import Any

import torch

from specdec.errors import OptionError
from specdec.models.hf.private_api import attention_of

_DECODER = ("activation_function", "max_target_positions", "scale_embedding", "vocab_size")


def on_encoder_of(target: Any, draft: Any) -> Any:
    """A `WhisperForCausalLM` draft joined to the target's encoder, sharing all weights; any other draft unchanged.

    Raises OptionError if the decoder's width differs from the encoder's.
    """
    if type(draft).__name__ != "WhisperForCausalLM" or target.config.model_type != "whisper":
        return draft
    from transformers import WhisperForConditionalGeneration

    width = target.config.d_model
    if draft.config.d_model != width:
        raise OptionError.of("draft", f"a decoder of the target's width, {width}", draft.config.d_model)
    own = draft.config.to_dict()
    parts = {name: own[name] for name in own if name.startswith("decoder_") or name in _DECODER}
    options = {**target.config.to_dict(), **parts, "attn_implementation": attention_of(draft.config)}
    config = type(target.config)(**options)
    with torch.device("meta"):
        model = WhisperForConditionalGeneration(config)
    model.model.encoder, model.model.decoder = target.get_encoder(), draft.get_decoder()
    model.proj_out, model.generation_config = draft.proj_out, draft.generation_config
    return model.train(draft.training)
