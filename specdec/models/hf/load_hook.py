"""A hook of transformers' loading: a model without weights is changed before they are read into it, one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.quantizers import HfQuantizer, register_quantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

_METHOD = "specdec"
Part = TypeVar("Part")


class LoadHook(QuantizationConfigMixin):  # type: ignore[misc]
    """A `quantization_config` of `from_pretrained` that calls `prepare(model, files)` with the checkpoint's files.

    Tensors are read into parameters of their names, in the dtypes and shapes that `prepare` left these; where a dtype
    is the file's, a parameter is a view of the mapped file.
    """

    def __init__(self, prepare: Callable[[Any, Sequence[str]], None]) -> None:
        self.quant_method: Any = _METHOD
        self.prepare = prepare


def with_bar(parts: Collection[Part], doing: str) -> Iterable[Part]:
    """The parts, under a progress bar of transformers, which its logging settings hide, and a command shows."""
    return logging.tqdm(parts, desc=doing)


def placeholder() -> Tensor:
    """An empty tensor for a weight that a module lacks: GPT-2 initialises weights of inner layers by their names."""
    tensor: Any = torch.empty(0)
    tensor._is_hf_initialized = True  # transformers leaves it alone
    return tensor


@register_quantizer(_METHOD)
class _Quantizer(HfQuantizer):  # type: ignore[misc]
    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> None:
        self.quantization_config.prepare(model, options.get("checkpoint_files") or ())

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        self.remove_quantization_config(model)
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False
