"""Weight-only int8: eight bits per weight and one scale per output channel, and activations left as they are.

No row of a pass looks at another one, so a drafted token never changes what is computed for its neighbours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from specdec.errors import UnsupportedError
from specdec.models.compat import int8_linear, quantizes
from specdec.models.quantize import Quantizer

_MOST_ROWS = 32  # torch's kernel runs row by row: beyond this many, turning the weights into floats once is faster
_LANES = 16  # the kernel reads this many columns at a time, also beyond the end of a row


class Int8Linear(nn.Module):
    """A linear layer with `weight` int8 `[out, in]` and `scale` `[out]`; the largest weight of a channel becomes ±127.

    In half precision on a CPU, passes over a few rows read the int8 weights as they are; other passes make floats of
    them first.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        exact = weight.detach().float()
        # Rounded first, so that the levels make up for it.
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
        if self._in_place(rows):
            y = int8_linear(rows, self.weight, self.scale)
        else:
            y = F.linear(rows, self.weight.to(x.dtype)) * self.scale
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)

    def _in_place(self, rows: Tensor) -> bool:
        half = rows.dtype in (torch.bfloat16, torch.float16)
        return half and rows.device.type == "cpu" and len(rows) <= _MOST_ROWS and self.in_features % _LANES == 0


class WeightOnly(Quantizer):
    """The quantization "int8-weight"."""

    converts = True

    @torch.no_grad()
    def convert(self, model: Any) -> None:
        """Puts an `Int8Linear` in the place of every linear layer, one after the other.

        As bitsandbytes does it, the language head, tied embeddings and layers that a model keeps in float32 stay as
        they are. Raises UnsupportedError for weights that are offloaded already.
        """
        wanted = quantizes(model)
        linear = [name for name, m in model.named_modules() if type(m) is nn.Linear or isinstance(m, Conv1D)]
        for name in filter(wanted, linear):
            module = model.get_submodule(name)  # not held before its turn, so that its weights can go
            if module.weight.is_meta:
                raise UnsupportedError(
                    "`quantization`='int8-weight' reads all weights, and `device_map` left some out of reach: "
                    "use `offload` instead"
                )
            weight = module.weight.T if isinstance(module, Conv1D) else module.weight
            model.set_submodule(name, Int8Linear(weight, module.bias))
