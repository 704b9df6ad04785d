"""What a quantization's name means: a bitsandbytes config for loading, or our own layers afterwards."""

from __future__ import annotations

import logging
import warnings
from importlib.util import find_spec
from typing import Any

import torch
from transformers import BitsAndBytesConfig

from specdec.errors import UnsupportedError


def bitsandbytes_config(quantization: str | None, dtype: torch.dtype) -> Any:
    """What transformers takes for "int8", "nf4" and "fp4"; None for what bitsandbytes does not do.

    Raises UnsupportedError where bitsandbytes is missing, warns where its int8 is slow.
    """
    if quantization not in ("int8", "nf4", "fp4"):
        return None
    if find_spec("bitsandbytes") is None:
        raise UnsupportedError(
            f"`quantization`={quantization!r} needs bitsandbytes: pip install 'specdec-runtime[quant]', "
            "or use 'int8-weight', which needs nothing else"
        )
    logging.getLogger("bitsandbytes.autograd._functions").addFilter(_is_news)
    if quantization != "int8":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=quantization, bnb_4bit_compute_dtype=dtype)
    if not torch.cuda.is_available() and torch.backends.cpu.get_cpu_capability() != "AVX512":
        warnings.warn(
            "`quantization`='int8' is slower than float32 on this CPU, which has no AVX-512: 'int8-weight' takes as "
            "little memory",
            stacklevel=2,
        )
    return BitsAndBytesConfig(load_in_8bit=True)


@torch.no_grad()
def settle_four_bits(model: Any) -> None:
    """Lets 4-bit layers of a float32 model compute in float32, and tries one of each shape.

    On some CPUs bitsandbytes would round their inputs to bfloat16, whatever type was asked for, and there it repacks
    the weights when they are first used. Raises UnsupportedError where that fails, as it does for some widths.
    """
    layers = [module for module in model.modules() if type(module).__name__ == "Linear4bit"]
    for layer in layers:
        if layer.compute_dtype == torch.float32:
            layer.support_avx512bf16_for_cpu = False
    for layer in {(layer.in_features, layer.out_features): layer for layer in layers}.values():
        try:
            layer(torch.zeros(1, layer.in_features, device=layer.weight.device, dtype=model.dtype))
        except (RuntimeError, AssertionError) as error:
            raise UnsupportedError(
                f"bitsandbytes cannot run a 4-bit layer of {layer.in_features} × {layer.out_features} here ({error}): "
                "use `dtype`='float32', or `quantization`='int8-weight'"
            ) from error


def _is_news(record: logging.LogRecord) -> bool:
    """Every int8 layer would say in every pass that it casts its input, which a user cannot do anything about."""
    return "inputs will be cast" not in record.getMessage()
