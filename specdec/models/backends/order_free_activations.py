"""Activations whose results do not depend on a value's place in a tensor.

torch computes most of a tensor with vectors and the rest one by one, which for some functions differs in the last bit.
These are made of operators for which both agree.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from specdec.kernels import ALIKE, PackedLinear


class Sigmoid(nn.Module):
    """`x / (1 + exp(-scale * x))`: SiLU, and with a scale of 1.702 GELU nearly (arXiv:1606.08415, section 2)."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide / (1 + torch.exp(-self.scale * wide))).to(x.dtype)


class Tanh(nn.Module):
    """GELU by way of tanh (arXiv:1606.08415, section 2)."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
        return (0.5 * wide * (1 + torch.tanh(inner))).to(x.dtype)


_ORDER_FREE = {
    type(ACT2FN["silu"]): Sigmoid(),
    type(ACT2FN["swish"]): Sigmoid(),
    type(ACT2FN["quick_gelu"]): Sigmoid(1.702),
    type(ACT2FN["gelu_pytorch_tanh"]): Tanh(),
}


def make_order_free(model: nn.Module) -> None:
    """Replaces torch's activations, and lets packed layers compute passes of all widths alike."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if type(module) in _ORDER_FREE:
            model.set_submodule(name, _ORDER_FREE[type(module)])
        elif isinstance(module, PackedLinear):
            module.way = ALIKE
