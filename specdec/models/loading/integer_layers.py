"""Weights in few bits: 8 bits with a scale per output, or 4 bits in groups of 32.

Heads, the largest layers of small models, always get 8 bits, which do not hurt them. No row of a pass looks at another
one, so drafted tokens change no neighbour's result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from specdec import kernels
from specdec.errors import UnsupportedError
from specdec.models.backends.packed_layers import changed, is_plain, pack_layers, weight_of, without_saving
from specdec.models.hf.private_api import int8_linear, quantizes
from specdec.models.loading.quantizers import Quantizer
from specdec.options.load import QUANTIZATIONS

_MOST_ROWS = 32  # torch's kernel runs row by row: for more rows making floats of the weights is faster
_LANES = 16  # columns that the kernel reads at a time, also beyond the end of a row


class Int8Linear(nn.Module):
    """A linear layer with `weight` int8 `[out, in]` and `scale` `[out]`; an output's largest weight becomes ±127.

    In half precision on a CPU, passes over a few rows read int8 weights; other passes make floats of them first.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        exact = weight.detach().float()
        # Rounded first, so that levels correct for it.
        scale = (exact.abs().amax(1) / 127).to(weight.dtype).clamp(min=torch.finfo(weight.dtype).tiny)
        levels = (exact / scale.float()[:, None]).round().clamp(-127, 127)
        self.weight = nn.Parameter(levels.to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        rows = x.reshape(-1, self.in_features)
        half = rows.dtype in (torch.bfloat16, torch.float16) and rows.device.type == "cpu"
        if half and len(rows) <= _MOST_ROWS and self.in_features % _LANES == 0:
            y = int8_linear(rows, self.weight, self.scale)
        elif x.dtype == torch.float16:  # where sums of unscaled levels overflow
            y = F.linear(rows, self.weight.to(x.dtype) * self.scale[:, None])
        else:
            y = F.linear(rows, self.weight.to(x.dtype)) * self.scale
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)


class WeightOnly(Quantizer):
    """The quantization "int8-weight"."""

    converts = True

    @torch.no_grad()
    def convert(self, model: Any) -> None:
        """Replaces every linear layer, one after the other, by one of few bits.

        If these are packed, so is the language head, in 8 bits, and tied embeddings read its rows; otherwise, as in
        bitsandbytes, both stay as they are, like layers that a model keeps in float32. Raises UnsupportedError for
        offloaded weights, and for dtypes and devices without such layers.
        """
        without_saving(model)
        wanted = quantizes(model)
        linear = [name for name, m in model.named_modules() if type(m) is nn.Linear or isinstance(m, Conv1D)]
        for name in filter(wanted, linear):
            module = model.get_submodule(name)  # by name, so that replaced weights are freed
            if module.weight.is_meta:
                raise UnsupportedError(
                    f"`quantization`={self.name!r} reads all weights, and `device_map` left some out of reach: "
                    + ("use `offload` instead" if QUANTIZATIONS[self.name].offloads else "leave out `device_map`")
                )
            model.set_submodule(name, self.layer(weight_of(module), module.bias))
        head = model.get_output_embeddings()
        if head is not None and is_plain(head) and self._fits(head.weight) and kernels.available():
            name = next(name for name, module in model.named_modules() if module is head)
            rounded = lambda _, head: kernels.to_int8(head.weight)  # noqa: E731
            changed(model, lambda: pack_layers(model, [name], rounded, rounds=self.rounds))

    def _fits(self, weight: Tensor) -> bool:
        return self.packs and weight.device.type == "cpu" and weight.dtype in kernels.FLOATS.values()

    def layer(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        if self._fits(weight) and kernels.available():
            return kernels.pack(kernels.to_int8(weight), bias, rounds=self.rounds)
        return Int8Linear(weight, bias)


class FourBits(WeightOnly):
    """The quantization "int4-weight"; raises UnsupportedError without kernels."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        kernels.check(f"`quantization`={name!r}", "use 'int8-weight'")

    def layer(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        if weight.device.type != "cpu" or weight.dtype not in kernels.FLOATS.values():
            raise UnsupportedError(
                "`quantization`='int4-weight' is for float32 and bfloat16 on the CPU, got "
                f"{str(weight.dtype).removeprefix('torch.')} on {weight.device}: use 'nf4' elsewhere"
            )
        return kernels.pack(kernels.to_int4(weight), bias, rounds=self.rounds)
