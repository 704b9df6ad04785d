"""What transformers and torch keep to themselves and this package needs all the same, one function each, with why.

What is the very subject of one module is reached there and nowhere else: caches in `recurrent_state` and `buffers`,
methods that derive positions in `positions`, rotary modules in `rotary`, accelerate's hooks in `offload`, bitsandbytes'
layers in `quantize`, the compiler in `compiled`, Whisper's modules in `whisper` and `alignment`.
`tests/models/test_compat.py` says of each name which release has changed it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import modeling_gguf_pytorch_utils, utils
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import output_capturing

CAPTURING = output_capturing.__name__  # of the hooks that stay once a pass was asked for hidden states
TAKES_MASKS = ("sdpa", "eager")  # the attentions to whose scores a mask of ours is added


def attention_of(config: Any) -> str:
    """Which attention a model computes with: `attn_implementation` is an argument of loading, without a getter."""
    kind: str = config._attn_implementation
    return kind


def set_attention(config: Any, kind: str | None) -> None:
    """Says which attention modules compute with that are made of a config, without the model that would ask for it."""
    config._attn_implementation = kind


def hidden_states_of(layers: bool | Sequence[int]) -> bool | Sequence[int]:
    """The `output_hidden_states` that keeps no more than these: 5.17 counts the layers of a list in another way."""
    return layers if isinstance(layers, bool) or hasattr(output_capturing, "selected_hidden_states") else bool(layers)


def gives_hidden_states(decoder: Any) -> bool:
    """Whether a decoder takes `output_hidden_states`: as an argument, or by the hooks that newer classes declare."""
    return "output_hidden_states" in inspect.signature(decoder.forward).parameters or "hidden_states" in (
        getattr(decoder, "_can_record_outputs", None) or {}
    )


def note_outputs(model: Any) -> None:
    """Has a model that was not constructed here give hidden states: constructors note what their class can record."""
    parts = [module for module in model.modules() if getattr(module, "_can_record_outputs", None)]
    registry = output_capturing._CAN_RECORD_REGISTRY
    registry.update({str(type(part)): part._can_record_outputs for part in parts})


def forget_outputs(model: Any) -> None:
    """Takes off a model the hooks that its first hidden states put there, as they cannot be pickled."""
    for module in model.modules():
        vars(module).pop("_output_capturing_hooks_installed", None)
        hooks = module._forward_hooks
        for number, hook in list(hooks.items()):
            if getattr(hook, "__module__", None) == output_capturing.__name__:
                del hooks[number]


def loads(auto_class: Any, config: Any) -> bool:
    """Whether an `AutoModelFor…` class has a model for this config: asking it for one would be the other way."""
    return type(config) in auto_class._model_mapping


def skipped_keys(model: Any) -> Any:
    """Arguments that accelerate must not move between devices: `from_pretrained` knows them, `dispatch_model` asks."""
    return model._skip_keys_device_placement


def quantizes(model: Any) -> Callable[[str], bool]:
    """Which modules quantization converts, by name: all but head, ties and float32, as for transformers' quantizers."""
    kept = [*get_keys_to_not_convert(model), *(model._keep_in_fp32_modules or ())]
    return partial(should_convert_module, patterns=kept)


def int8_linear(rows: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """`rows` `[n, in]` times int8 `weight` `[out, in]` and `scale` `[out]`: no public kernel reads int8 as it is."""
    return torch._weight_int8pack_mm(rows, weight, scale)


def whole_gguf() -> Any:
    """What makes floats of all GGUF weights; None before `GgufConfig`, when transformers did nothing else."""
    config = getattr(transformers, "GgufConfig", None)
    return None if config is None else config(dequantize=True)


@contextmanager
def gguf_bars() -> Iterator[None]:
    """Lets `disable_progress_bar` of transformers reach the bar over a GGUF file's tensors, which is not its own."""
    tqdm, modeling_gguf_pytorch_utils.tqdm = modeling_gguf_pytorch_utils.tqdm, utils.logging.tqdm
    try:
        yield
    finally:
        modeling_gguf_pytorch_utils.tqdm = tqdm


def cached(name: str, file: str, revision: str | None) -> str:
    """The path of a file of a hub repository, downloaded if need be, in the cache that `from_pretrained` uses.

    Raises OSError where there is none.
    """
    path: str | None = utils.cached_file(name, file, revision=revision)
    if path is None:  # of a missing config.json nothing is raised
        raise FileNotFoundError(f"{name} has no file {file}")
    return path


def transcript(
    tokenizer: Any, outputs: Sequence[Mapping[str, Any]], *, timestamps: Any, language: Any, seconds: float
) -> tuple[str, dict[str, Any]]:
    """Text and chunks of a Whisper tokenizer's overlapping outputs: the pipeline's merging, which has no other door."""
    text, rest = tokenizer._decode_asr(
        outputs, return_timestamps=timestamps, return_language=language, time_precision=seconds
    )
    return text, rest
