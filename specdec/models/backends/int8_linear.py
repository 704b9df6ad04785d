"""A linear layer with weights in 8 bits, for dtypes and devices without packed layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.models.hf.private_api import int8_linear

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
