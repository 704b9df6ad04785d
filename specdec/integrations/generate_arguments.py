"""The arguments of `model.generate`, for a decoding method that replaces its own (`custom_generate=`).

transformers passes prepared inputs, but drops the streamer, the assistant and whether a cache came from the caller
(`GenerationMixin._extract_generation_mode_kwargs`). They are read from the running call's frame.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, GenerationConfig, GenerationMixin, MaxLengthCriteria, MaxTimeCriteria
from transformers.generation.logits_process import WhisperNoSpeechDetection
from transformers.generation.utils import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module
from transformers.utils import ModelOutput

from specdec.errors import OptionError, UnsupportedError

_CODE = inspect.unwrap(GenerationMixin.generate).__code__
_ARGUMENTS = (*inspect.signature(GenerationMixin.generate).parameters,)
GUESSES = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")


def generate_arguments() -> dict[str, Any]:
    """The arguments of the innermost running `GenerationMixin.generate`, free ones in `kwargs`.

    Raises OptionError outside of such a call.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _CODE:
        frame = frame.f_back
    if frame is None:
        raise OptionError("`custom_generate` decodes for transformers: pass it to `model.generate(custom_generate=…)`")
    return {name: frame.f_locals[name] for name in _ARGUMENTS}


def check_sharding(model: Any, synced_gpus: bool | None) -> None:
    """Raises UnsupportedError for weights sharded over processes, which must run passes together."""
    sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    several = several and torch.distributed.get_world_size() > 1
    if synced_gpus or (synced_gpus is None and sharded and several):
        raise UnsupportedError("`synced_gpus` is not supported: gather the weights on every process, and pass False")


def transformers_defaults() -> dict[str, Any]:
    """transformers' defaults of a generation config."""
    found: dict[str, Any] = GenerationConfig()._get_default_generation_params()
    return found


def chosen_guesses(config: Any) -> dict[str, Any]:
    """The options of draft lengths that differ from transformers' defaults."""
    defaults = transformers_defaults()
    return {name: value for name in GUESSES if (value := getattr(config, name, None)) != defaults.get(name)}


def own_criteria(given: Sequence[Any], config: Any) -> list[Any]:
    """The caller's criteria without a MaxLengthCriteria; a MaxTimeCriteria replaces `config.max_time`.

    Raises UnsupportedError for an EosTokenCriteria beside `config.eos_token_id`.
    """
    if config.eos_token_id is not None and any(type(one) is EosTokenCriteria for one in given):
        raise UnsupportedError("`stopping_criteria` with an EosTokenCriteria: pass its ids as `eos_token_id=` instead")
    if any(type(one) is MaxTimeCriteria for one in given):
        config.max_time = None
    return [one for one in given if type(one) is not MaxLengthCriteria]


def beam_filler(config: Any) -> int | None:
    """The padding id of beams: transformers replaces 0 by the first end-of-sequence id."""
    ends = [config.eos_token_id] if isinstance(config.eos_token_id, int) else list(config.eos_token_id or [])
    return ends[0] if ends and config.pad_token_id == 0 else config.pad_token_id


def split_detectors(processors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Whisper's silence detectors, and the other processors."""
    detectors = [one for one in processors if isinstance(one, WhisperNoSpeechDetection)]
    return detectors, [one for one in processors if one not in detectors]


def detect_silence(detectors: Sequence[Any], ids: Tensor, logits: Tensor) -> None:
    """Calls detectors, which need whole batches, with the first `logits` `[rows, vocab]` after the prompts `ids`."""
    for detector in detectors:
        detector(ids, logits.log_softmax(-1) if detector.is_scores_logprobs else logits)


def as_transformers(out: ModelOutput, *, encoder: bool, beams: bool) -> ModelOutput:
    """`out` as the class that `generate` returns, without a cache."""
    kinds = {
        (False, False): GenerateDecoderOnlyOutput,
        (True, False): GenerateEncoderDecoderOutput,
        (False, True): GenerateBeamDecoderOnlyOutput,
        (True, True): GenerateBeamEncoderDecoderOutput,
    }
    kind = kinds[encoder, beams]
    return kind(**{name: value for name, value in out.items() if name in kind.__dataclass_fields__})
