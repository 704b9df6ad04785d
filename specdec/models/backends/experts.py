"""Mixtures of experts over packed weights: a pass reads only the experts that its rows chose.

transformers keeps a matrix of all experts in one parameter, and lets a registered function compute their outputs. The
parameter, and the weight of the router that chooses, counts here as the weight of a linear layer (`Stack`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from specdec import kernels
from specdec.models.hf.private_api import with_experts

EXPERTS = "specdec"
_ROUTERS = {f"{family}TopKRouter" for family in ("GptOss", "Mixtral", "Olmoe", "Qwen2Moe", "Qwen3Moe")}
_BLOCK = 32  # outputs; each expert fills whole blocks


class Stack:
    """A parameter `leaf` of a module as the weight of a linear layer with the outputs of `count` experts.

    `weight` is `[outputs, inputs]`, `bias` `[outputs]` or None. An expert has `rows` outputs and `padding`, which fill
    whole blocks.
    """

    def __init__(self, owner: Any, leaf: str) -> None:
        self.owner, self.leaf = owner, leaf
        self.shape, self.dtype = self.parameter.shape, self.parameter.dtype
        self.flips = getattr(owner, "is_transposed", False)
        self.bias_leaf = f"{leaf}_bias" if getattr(owner, "has_bias", False) else None
        self.count, is_router = self.shape[:-2].numel(), len(self.shape) == 2
        self.rows, self.inputs = reversed(self.shape[-2:]) if self.flips else self.shape[-2:]
        self.padding = 0 if is_router else -self.rows % _BLOCK

    @property
    def parameter(self) -> nn.Parameter:
        return self.owner.get_parameter(self.leaf)  # type: ignore[no-any-return]

    @property
    def weight(self) -> Tensor:
        weight = self.parameter.detach().view(self.count, *self.shape[-2:])
        weight = weight.transpose(1, 2) if self.flips else weight
        return (F.pad(weight, (0, 0, 0, self.padding)) if self.padding else weight).flatten(0, 1)

    @property
    def bias(self) -> Tensor | None:
        bias = self.owner.get_parameter(self.bias_leaf) if self.bias_leaf else None
        return None if bias is None else F.pad(bias.detach(), (0, self.padding)).flatten()

    def unpacked(self, layer: kernels.PackedLinear) -> dict[str, Tensor]:
        """The numbers that a packed layer holds, as the parameter and its bias have them, by their names in `owner`."""
        weight = layer.weight().to(self.dtype).view(self.count, -1, self.inputs)[:, : self.rows]
        tensors = {self.leaf: (weight.transpose(1, 2) if self.flips else weight).contiguous().view(self.shape)}
        if self.bias_leaf is not None and layer.bias is not None:
            tensors[self.bias_leaf] = layer.bias.to(self.dtype).view(self.count, -1)[:, : self.rows].contiguous()
        return tensors

    def put(self, layer: kernels.PackedLinear) -> Callable[[], None]:
        """Puts a packed layer in the place of the parameter and its bias; returns the undoing."""
        owner, config = self.owner, getattr(self.owner, "config", None)
        if config is not None:  # routers have none
            owner.config = with_experts(config, EXPERTS)
        delattr(owner, self.leaf)
        setattr(owner, self.leaf, layer)
        if self.bias_leaf is not None:
            setattr(owner, self.bias_leaf, None)

        def undo() -> None:
            if config is not None:
                owner.config = config
            delattr(owner, self.leaf)
            for name, tensor in self.unpacked(layer).items():
                setattr(owner, name, nn.Parameter(tensor, requires_grad=False))

        return undo


def expert_stacks(model: nn.Module) -> dict[str, Stack]:
    """The parameters of a model's experts, by name."""
    stacks = dict[str, Stack]()
    for name, module in model.named_modules():
        if hasattr(module, "_apply_gate") and not getattr(module, "has_post_expert_norm", False):
            stacks |= {f"{name}.{leaf}": Stack(module, leaf) for leaf in _leaves(module) if _is_plain(module, leaf, 3)}
    return stacks


def router_stacks(model: nn.Module) -> dict[str, Stack]:
    """The weights of routers, by name, which are read by `F.linear` alone."""
    return {
        f"{name}.weight": Stack(module, "weight")
        for name, module in model.named_modules()
        if type(module).__name__ in _ROUTERS and _is_plain(module, "weight", 2)
    }


def _leaves(module: Any) -> tuple[str, str]:
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def _is_plain(module: nn.Module, leaf: str, dimensions: int) -> bool:
    weight: Any = module._parameters.get(leaf)
    is_float = type(weight) is nn.Parameter and weight.dtype in kernels.FLOATS.values()
    return is_float and weight.dim() == dimensions and "forward" not in vars(module)


def _experts(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """What the experts `chosen` `[rows, k]` say of `hidden` `[rows, width]`, by their `weights` `[rows, k]`."""
    (rows, k), experts = chosen.shape, chosen.flatten()
    up, down = (getattr(self, leaf) for leaf in _leaves(self))
    activations = up.of_experts(hidden.repeat_interleave(k, 0), experts, down.inputs * (2 if self.has_gate else 1))
    activations = self._apply_gate(activations) if self.has_gate else self.act_fn(activations)
    outputs = down.of_experts(activations, experts, up.inputs)
    return (outputs * weights.reshape(-1, 1)).view(rows, k, -1).sum(1).to(hidden.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)


class EvenSigmoid(TorchFunctionMode):
    """Context in which sigmoids, which gates of experts call, do not depend on a value's place in a tensor."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.sigmoid, Tensor.sigmoid):
            return (1 / (1 + torch.exp(-args[0].float()))).to(args[0].dtype)
        return function(*args, **(kwargs or {}))
