"""Quantizations: a config for loading, or layers that replace loaded layers.

A new one is a subclass of `Quantizer` and a line in `specdec.options.load.QUANTIZATIONS`, from which options, the
command line and the benchmark take its name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from transformers import BitsAndBytesConfig

from specdec.errors import UnsupportedError
from specdec.kernels import Mapped
from specdec.models.hf.load_hook import LoadHook
from specdec.models.loading.weight_files import Stored, by_module

_log = logging.getLogger(__name__)


class Quantizer:
    """A quantization of one model that is being loaded; the base class changes nothing.

    `name` is the caller's word. `mapped`: the checkpoint's files, if `prepare` ran. `converts`: it changes the loaded
    model, so that all weights pass through memory once, also with `offload`. `packs`: passes may run on packed weights
    (`specdec.kernels`), whose layers round rows to 8 bits if the quantizer `rounds`.
    """

    converts: ClassVar[bool] = False
    packs: bool = False
    rounds: bool = True

    def __init__(self, name: str = "") -> None:
        self.name, self.mapped = name, Mapped()

    def config(self, dtype: torch.dtype) -> Any:
        """transformers' `quantization_config` for a model that computes in `dtype`, or None."""
        return LoadHook(self._prepare) if self.converts else None

    def _prepare(self, model: Any, files: Sequence[str]) -> None:
        self.mapped = Mapped(files)
        self.prepare(model, by_module(model, files))

    def prepare(self, model: Any, stored: Mapping[str, Mapping[str, Stored]]) -> None:
        """Changes a model that has no weights yet; `stored`: the checkpoint's tensors by module."""

    def convert(self, model: Any) -> None:
        """Changes the loaded model in place if the class `converts`."""


class BitsAndBytes(Quantizer):
    """bitsandbytes' "int8", "nf4" and "fp4"."""

    def config(self, dtype: torch.dtype) -> Any:
        """bitsandbytes' config; warns if its int8 is slow here."""
        logging.getLogger("bitsandbytes.autograd._functions").addFilter(_is_news)
        if self.name != "int8":
            return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=self.name, bnb_4bit_compute_dtype=dtype)
        if not torch.cuda.is_available():
            _log.warning("bitsandbytes' int8 is several times slower on a CPU than `quantization`='int8-weight'")
        return BitsAndBytesConfig(load_in_8bit=True)


@torch.no_grad()
def settle_four_bits(model: Any) -> None:
    """Lets 4-bit layers of a float32 model compute in float32, and tries one of each shape.

    On some CPUs bitsandbytes rounds inputs to bfloat16 whatever the dtype, and repacks weights at first use. Raises
    UnsupportedError if that fails, as for some widths.
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
    """Drops the line that every int8 layer logs in every pass: that it casts its input."""
    return "inputs will be cast" not in record.getMessage()
