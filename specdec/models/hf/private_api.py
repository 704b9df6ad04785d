"""Private names of transformers and torch that this package needs, one function each, with the reason.

Private names at the heart of one module are used there alone: caches in `recurrent_state` and `buffers`, derived
positions in `positions`, accelerate's hooks in `device_hooks`, bitsandbytes' layers in `quantizers`, Whisper's modules
in `frame_encoder`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    utils,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.masking_utils import create_causal_mask
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import output_capturing

CAPTURING = output_capturing.__name__  # module of the hooks that stay after a pass with hidden states
# The argument by which models and their layers take a cache: 5.24 renamed it.
CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
_WITH_HEADS: dict[bool, tuple[Any, ...]] = {  # by whether there is an encoder
    False: (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM),
    True: (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoModelForImageTextToText),
}
TAKES_MASKS = ("sdpa", "eager")  # attentions that add a mask to scores


def attention_of(config: Any) -> str:
    """The attention implementation of a model, an argument of loading without a getter."""
    return config._attn_implementation


def set_attention(config: Any, kind: str | None) -> None:
    """Sets the attention of modules that are made of a config, without the model's own checks."""
    config._attn_implementation = kind


def with_experts(config: Any, kind: str) -> Any:
    """A copy of a config; its modules compute experts by the function of this name."""
    other = copy(config)
    other._experts_implementation = kind
    return other


def hidden_states_of(layers: bool | Sequence[int]) -> bool | Sequence[int]:
    """The `output_hidden_states` that keeps only these layers; 5.17 counts the layers of a list in another way."""
    return layers if isinstance(layers, bool) or hasattr(output_capturing, "selected_hidden_states") else bool(layers)


def per_layer(output: Any, name: str) -> Sequence[Any]:
    """The states or attentions of this name in an output, one per layer: encoder-decoders prefix their decoder's."""
    return output.get(name) or output.get(f"decoder_{name}") or ()


def gives_hidden_states(decoder: Any) -> bool:
    """Whether a decoder returns hidden states: by an argument, or by hooks that newer classes declare."""
    return "output_hidden_states" in inspect.signature(decoder.forward).parameters or "hidden_states" in (
        getattr(decoder, "_can_record_outputs", None) or {}
    )


def gathers_weights(model: Any) -> bool:
    """Whether each pass gathers weights from all processes (FSDP, ZeRO-3), by helpers of transformers' trainer."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.integrations.fsdp import is_fsdp_managed_module

    return bool(is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))


def class_of(auto_class: Any, config: Any) -> Any:
    """The class of an `AutoModelFor…` class for this config; None if it has none."""
    return auto_class._model_mapping.get(type(config), None)


def auto_class(config: Any) -> Any:
    """The `AutoModelFor…` class that loads a config as a model with a language head; the commonest if none does."""
    kinds = _WITH_HEADS[bool(config.is_encoder_decoder)]
    return next((kind for kind in kinds if class_of(kind, config)), kinds[0])


def text_class(model: Any) -> str | None:
    """The `AutoModelFor…` class that loads a model's config as another class, with a language head."""
    kinds = _WITH_HEADS[bool(model.config.is_encoder_decoder)]
    return next((kind.__name__ for kind in kinds if class_of(kind, model.config) not in (None, type(model))), None)


def skipped_keys(model: Any) -> Any:
    """Arguments that accelerate must not move between devices: `dispatch_model` needs what `from_pretrained` knows."""
    return model._skip_keys_device_placement


def quantizes(model: Any) -> Callable[[str], bool]:
    """Whether a module, by name, is quantized, as transformers decides: not heads, ties and float32."""
    patterns = [*get_keys_to_not_convert(model), *(model._keep_in_fp32_modules or ())]
    return partial(should_convert_module, patterns=patterns)


def int8_linear(rows: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """`rows` `[n, in]` times int8 `weight` `[out, in]` and `scale` `[out]`: no public kernel reads int8 weights."""
    return torch._weight_int8pack_mm(rows, weight, scale)


def module_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """The names in a model of modules that its checkpoint names otherwise: the rules are part of loading alone."""
    rules = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    state, prefix = model.state_dict(), model.base_model_prefix
    weights = {name: rename_source_key(f"{name}.weight", rules, [], prefix, state)[0] for name in names}
    return {name: weight.removesuffix(".weight") for name, weight in weights.items()}


def cached(name: str, file: str, revision: str | None) -> str:
    """The path of a hub repository's file, downloaded if need be; raises OSError if it does not exist."""
    path: str | None = utils.cached_file(name, file, revision=revision)
    if path is None:  # a missing config.json raises nothing
        raise FileNotFoundError(f"{name} has no file {file}")
    return path


class _WithSpecialIds:
    """A tokenizer whose special tokens include `ids`, which the files of some checkpoints do not mark as special."""

    def __init__(self, tokenizer: Any, ids: Collection[int]) -> None:
        self._tokenizer, self.all_special_ids = tokenizer, [*tokenizer.all_special_ids, *ids]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def transcript(
    tokenizer: Any,
    outputs: Sequence[Mapping[str, Any]],
    *,
    timestamps: Any,
    language: Any,
    languages: Collection[int],
    seconds: float,
) -> tuple[str, dict[str, Any]]:
    """Text and chunks of a Whisper tokenizer's overlapping outputs, merged as the library's pipeline does.

    `languages`: the tokens that name a language.
    """
    options = {"return_timestamps": timestamps, "return_language": language, "time_precision": seconds}
    return type(tokenizer)._decode_asr(_WithSpecialIds(tokenizer, languages), outputs, **options)
