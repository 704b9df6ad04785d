"""Weights in few bits: 8 bits with a scale per output, or 4 bits in groups of 32.

Heads, the largest layers of small models, always get 8 bits, which do not hurt them. No row of a pass looks at another
one, so drafted tokens change no neighbour's result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from specdec import kernels
from specdec.errors import UnsupportedError
from specdec.models.backends.experts import Stack, expert_stacks
from specdec.models.backends.int8_linear import Int8Linear
from specdec.models.backends.packed_layers import changed, is_plain, pack_layers, weight_of, without_saving
from specdec.models.hf.load_hook import with_bar
from specdec.models.hf.private_api import quantizes
from specdec.models.loading.quantizers import Quantizer
from specdec.models.loading.weight_files import Stored
from specdec.options.load import QUANTIZATIONS

_HALVES = (torch.float16, torch.bfloat16)


class WeightOnly(Quantizer):
    """The quantization "int8-weight"."""

    converts = True

    def prepare(self, model: Any, stored: Mapping[str, Mapping[str, Stored]]) -> None:
        """Lets weights that become few bits be read as they are stored, not widened first."""
        for name in self._linear_names(model):
            module, tensor = model.get_submodule(name), stored.get(name, {}).get("weight")
            if tensor is not None and tensor.dtype in _HALVES:
                module.weight = nn.Parameter(module.weight.detach().to(tensor.dtype), requires_grad=False)

    @staticmethod
    def _linear_names(model: Any) -> list[str]:
        linear = [name for name, m in model.named_modules() if type(m) is nn.Linear or isinstance(m, Conv1D)]
        return list(filter(quantizes(model), linear))

    @torch.no_grad()
    def convert(self, model: Any) -> None:
        """Replaces every linear layer and, packed, matrix of experts, one after the other, by one of few bits.

        If the layers are packed, so is the language head, in 8 bits, and tied embeddings read its rows; otherwise, as
        in bitsandbytes, both stay as they are, like layers that a model keeps in float32. Raises UnsupportedError for
        offloaded weights, and for dtypes and devices without such layers.
        """
        without_saving(model)
        for name in with_bar(self._linear_names(model), "Rounding weights"):
            module = model.get_submodule(name)  # by name, so that replaced weights are freed
            if module.weight.is_meta:
                raise UnsupportedError(
                    f"`quantization`={self.name!r} reads all weights, and `device_map` left some out of reach: "
                    + ("use `offload` instead" if QUANTIZATIONS[self.name].offloads else "leave out `device_map`")
                )
            model.set_submodule(name, self.layer(weight_of(module).to(model.dtype), module.bias))
            self.mapped.used(module.weight.nbytes)
        if stacks := [*expert_stacks(model)]:
            pack_layers(model, with_bar(stacks, "Rounding experts"), self._of_experts)
        head = model.get_output_embeddings()
        if head is not None and is_plain(head) and self._fits(head.weight) and kernels.available():
            name = next(name for name, module in model.named_modules() if module is head)
            changed(model, lambda: pack_layers(model, [name], lambda _, head: self._rounded(head.weight, 8, head.bias)))
        self.mapped.forget()

    def _fits(self, weight: Tensor) -> bool:
        return self.packs and weight.device.type == "cpu" and weight.dtype in kernels.FLOATS.values()

    def _of_experts(self, _: str, stack: Stack) -> Any:
        """A matrix of experts in few bits; None, which leaves it as it is, where such layers are not packed."""
        return self.layer(stack.weight, stack.bias) if self._fits(stack.parameter) and kernels.available() else None

    def layer(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        """The layer of few bits for `weight` `[outputs, inputs]` and `bias` `[outputs]`."""
        if self._fits(weight) and kernels.available():
            return self._rounded(weight, 8, bias)
        return Int8Linear(weight, bias)

    def _rounded(self, weight: Tensor, bits: int, bias: Tensor | None) -> kernels.PackedLinear:
        return kernels.round_weight(weight, bits, bias, rounds=self.rounds)


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
        return self._rounded(weight, 4, bias)
