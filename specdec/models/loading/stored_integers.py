"""Checkpoints that are quantized already, as they lie: AWQ, GPTQ, compressed-tensors and FP8.

Packed layers have the file's integers, scales and zero points, so that their weights are the format's floats. Numbers
in FP8, which reach over more than 8 bits, are rounded where they are small in their group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from specdec import kernels
from specdec.errors import LoadError, OptionError, UnsupportedError
from specdec.kernels.quantized import GROUP, Quantized
from specdec.models.backends.packed_layers import weight_of, without_saving
from specdec.models.hf.load_hook import placeholder, with_bar
from specdec.models.loading.quantizers import Quantizer
from specdec.models.loading.weight_files import Stored
from specdec.options.load import AUTO, Loading

Tensors = Mapping[str, Tensor]
_MARKS = {"qweight", "weight_packed", "weight_scale", "weight_scale_inv"}  # tensors of quantized layers alone
_ELSEWHERE = {"k_scale", "v_scale", "scales"}  # tensors that belong to no linear layer: they would be left out
_AWQ_PLACES = 0, 4, 1, 5, 2, 6, 3, 7  # where eight neighbouring columns lie in 32 bits
_TOP = 15  # exponent of the largest scale of an output, where float16 holds 31 powers of two below it
_BITS_BELOW = 7  # from a group's largest FP8 to the unit of its integers: its four bits and three powers of two


@dataclass(frozen=True)
class Integers:
    """A weight `[outputs, inputs]`: `(values - zeros) * scales`, its inputs in `order` `[inputs]` unless it is None.

    `values` uint8 `[outputs, inputs]` from 0 to 2**bits - 1, `scales` and `zeros` `[outputs, groups]`; without zeros,
    they are half of the range.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    bits: int = 4
    order: Tensor | None = None

    def quantized(self) -> Quantized:
        """The same numbers as kernels take them; raises ValueError for groups that they do not know."""
        (outputs, inputs), groups, middle = self.values.shape, self.scales.shape[1], 1 << (self.bits - 1)
        size = -(-inputs // groups)
        if self.scales.shape[0] != outputs or (groups > 1 and (size % GROUP or inputs % groups)):
            raise ValueError(
                f"they are {[outputs, inputs]} integers and {list(self.scales.shape)} scales, and groups of inputs are "
                f"multiples of {GROUP}"
            )
        wide = self.bits == 8
        values = (self.values ^ 128 if wide else self.values).view(torch.int8)
        mins = None if self.zeros is None else (middle if wide else 0) - self.zeros.to(torch.int16)
        if mins is not None and bool((mins == (0 if wide else -middle)).all()):
            mins = None
        if wide and mins is None and groups == 1:
            return Quantized(values, factors=self.scales[:, 0].float())
        scales, factors = _in_halves(self.scales)
        spread = size // GROUP if groups > 1 else -(-inputs // GROUP)
        scales = scales.repeat_interleave(spread, 1)
        mins = None if mins is None else mins.to(torch.int8).repeat_interleave(spread, 1)
        return Quantized(values, self.bits, scales, mins, factors=factors)

    def weight(self) -> Tensor:
        """The weight in float32 `[outputs, inputs]`, its inputs in the layer's order."""
        weight = self.quantized().weight()
        return weight if self.order is None else torch.empty_like(weight).index_copy_(1, self.order, weight)


@dataclass(frozen=True)
class Eights:
    """A weight in FP8 `[outputs, inputs]` with `scales` `[outputs, parts]`; a part spans `size` inputs, or fewer."""

    values: Tensor
    scales: Tensor
    size: int
    order = None

    def quantized(self) -> Quantized:
        """The weight in 8 bits: exact from an eighth of a group's largest power of two on, where all of an output's
        scales are equal; else numbers are exact to half of a unit, and scales to 11 bits."""
        inputs = self.values.shape[1]
        padded = nn.functional.pad(self.values.float(), (0, -inputs % GROUP))
        groups = padded.view(len(padded), -1, GROUP)
        units = _power(groups.abs().amax(2), -_BITS_BELOW)
        values = (groups / units[:, :, None]).round().to(torch.int8).flatten(1)[:, :inputs]
        factors = self.scales.float().abs().amax(1)
        shares = self.scales.float() / torch.where(factors > 0, factors, 1)[:, None]
        shares = shares.repeat_interleave(self.size, 1)[:, :inputs:GROUP]
        return Quantized(values.contiguous(), scales=(units * shares).half(), factors=factors)

    def weight(self) -> Tensor:
        """The weight in float32 `[outputs, inputs]`."""
        return self.values.float() * self.scales.float().repeat_interleave(self.size, 1)[:, : self.values.shape[1]]


class Reordered(nn.Module):
    """A packed layer whose inputs lie in another order: GPTQ's groups of inputs that were quantized together."""

    order: Tensor

    def __init__(self, layer: kernels.PackedLinear, order: Tensor) -> None:
        super().__init__()
        self.layer, self.out_features = layer, layer.outputs
        self.register_buffer("order", order)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., inputs]` to `[..., outputs]`."""
        y: Tensor = self.layer(x.index_select(-1, self.order))
        return y


class StoredLayer(nn.Module):
    """Stands in for a linear layer: the tensors that the checkpoint has for it, with their dtypes and shapes."""

    def __init__(self, layer: Any, tensors: Mapping[str, Stored]) -> None:
        super().__init__()
        (self.outputs, self.inputs), self.dtype = weight_of(layer).shape, layer.weight.dtype
        for name, tensor in tensors.items():
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        if "weight" not in tensors:
            self.weight = placeholder()

    def layer(self, read: Callable[[Tensors, int], Integers | Eights], packs: bool, rounds: bool) -> nn.Module:
        """The layer over its tensors, packed or in floats; raises ValueError if they do not fit."""
        tensors = {name: parameter.detach() for name, parameter in self.named_parameters()}
        bias = tensors.pop("bias", None)
        stored = read(tensors, self.inputs)
        shape = tuple(stored.values.shape)
        if shape != (self.outputs, self.inputs):
            raise ValueError(f"they are {list(shape)}, and the layer is {[self.outputs, self.inputs]}")
        if packs:
            packed = kernels.pack(stored.quantized(), bias, rounds=rounds)
            return packed if stored.order is None else Reordered(packed, stored.order)
        linear = nn.Linear(self.inputs, self.outputs, bias=False, device="meta")
        linear.weight = nn.Parameter(stored.weight().to(self.dtype), requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias.to(self.dtype), requires_grad=False)
        return linear


class StoredIntegers(Quantizer):
    """The quantization of a checkpoint, by its config's `quantization_config`; UnsupportedError for other schemes."""

    converts = True

    def __init__(self, name: str, scheme: Mapping[str, Any]) -> None:
        super().__init__(name)
        self._read = READERS[scheme["quant_method"]](scheme)

    def prepare(self, model: Any, stored: Mapping[str, Mapping[str, Stored]]) -> None:
        """Makes room for the tensors of quantized layers, as they are stored."""
        modules = dict(model.named_modules())
        for name, tensors in stored.items():
            module = modules.get(name)
            marks = tensors.keys() & _MARKS
            if marks and type(module) in (nn.Linear, Conv1D):
                model.set_submodule(name, StoredLayer(module, tensors))
                continue
            is_here = module is not None or ".experts." in name  # else in another part of the model
            if odd := (marks if is_here else ()) if marks else tensors.keys() & _ELSEWHERE:
                raise UnsupportedError(
                    f"{self.name!r} has the tensor {name}.{min(odd)}, and only linear layers are read as they were "
                    "quantized: use the checkpoint that it was made of"
                )

    @torch.no_grad()
    def convert(self, model: Any) -> None:
        """Replaces the tensors of layers by packed layers; by layers of floats if the model is not packed."""
        without_saving(model)
        packs = self.packs and model.dtype in kernels.FLOATS.values() and kernels.available()
        names = [name for name, module in model.named_modules() if type(module) is StoredLayer]
        for name in with_bar(names, "Packing weights"):
            tensors = model.get_submodule(name)
            try:
                layer = tensors.layer(self._read, packs, self.rounds)
            except (ValueError, KeyError, IndexError, RuntimeError) as error:
                reason = f"there is no {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
                raise LoadError(
                    f"the tensors of {name} in {self.name!r} do not fit together ({reason}): download or save it again"
                ) from error
            model.set_submodule(name, layer)
            self.mapped.used(sum(parameter.nbytes for parameter in tensors.parameters()))
        self.mapped.forget()


def stored_quantizer(name: str, config: Any, how: Loading) -> StoredIntegers | None:
    """The quantizer of a checkpoint whose quantization is read here, whose `config` loses it; None for others.

    Raises OptionError for options of loading that go with plain weights, UnsupportedError for schemes that are not
    read.
    """
    holders = [part for part in (config, config.get_text_config()) if getattr(part, "quantization_config", None)]
    scheme = holders[0].quantization_config if holders else {}
    if not isinstance(scheme, Mapping) or scheme.get("quant_method") not in READERS:
        return None
    refuse_rounding(name, scheme["quant_method"], how)
    quantizer = StoredIntegers(name, scheme)
    for holder in {id(part): part for part in holders}.values():
        del holder.quantization_config
    return quantizer


def refuse_rounding(name: str, method: str, how: Loading) -> None:
    """Raises OptionError for options of loading that go with plain weights alone."""
    for option in ("quantization", "offload"):
        if (value := getattr(how, option)) not in (None, AUTO):
            raise OptionError(
                f"`{option}`={value!r} needs plain weights, and {name!r} is quantized already ({method}): leave out "
                f"`{option}`"
            )


def _in_halves(scales: Tensor) -> tuple[Tensor, Tensor | None]:
    """`scales` `[outputs, groups]` in float16, and a power of two for each output `[outputs]`.

    They are exact for bfloat16, and to 11 bits for float32.
    """
    if scales.dtype == torch.float16:
        return scales, None
    wide = scales.float()
    factors = _power(wide.abs().amax(1), -_TOP)
    return (wide / factors[:, None]).half(), factors


def _power(numbers: Tensor, exponent: int) -> Tensor:
    """The powers of two above these numbers, times two to the power of `exponent`."""
    return torch.ldexp(torch.ones_like(numbers), torch.frexp(numbers).exponent + exponent)


def _values(words: Tensor, bits: int) -> Tensor:
    """The integers in rows of 32 bits, the lowest bits first: uint8 `[rows, integers]`."""
    bytes_ = words.contiguous().view(torch.uint8)
    if bits == 8:
        return bytes_
    if bits != 4:
        raise ValueError(f"they have {bits} bits, and 4 and 8 are read")
    return torch.stack([bytes_ & 15, bytes_ >> 4], -1).flatten(1)


def _awq(scheme: Mapping[str, Any]) -> Callable[[Tensors, int], Integers]:
    forms = ("gemm", "GEMM")
    fields = {"bits": (4,), "w_bit": (4,), "version": forms, "format": forms, "checkpoint_format": forms}
    _check(scheme, {**fields, "zero_point": (True,)})

    def rows(words: Tensor) -> Tensor:
        eights = words.T.contiguous()  # columns of integers are rows of the layer's
        return torch.stack([(eights >> 4 * place & 15).to(torch.uint8) for place in _AWQ_PLACES], 1).flatten(0, 1)

    return lambda tensors, _: Integers(rows(tensors["qweight"]), tensors["scales"].T, rows(tensors["qzeros"]))


def _gptq(scheme: Mapping[str, Any]) -> Callable[[Tensors, int], Integers]:
    forms = ("gptq", "gptq_v2")
    fields = {"bits": (4, 8), "checkpoint_format": forms, "format": forms, "is_marlin_format": (False,)}
    _check(scheme, {**fields, "pack_dtype": ("int32",)})
    offset = scheme.get("checkpoint_format", scheme.get("format")) != "gptq_v2"  # the zeros are stored less one

    def read(tensors: Tensors, inputs: int) -> Integers:
        bits = 32 * len(tensors["qweight"]) // inputs
        levels, scales = _values(tensors["qweight"].T, bits), tensors["scales"].T
        zeros = _values(tensors["qzeros"], bits).T.to(torch.int16) + offset
        return _in_order(levels, scales, zeros, bits, tensors.get("g_idx"))

    return read


def _in_order(levels: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, groups: Tensor | None) -> Integers:
    """Integers whose inputs belong to `groups` `[inputs]` in any order; others as in `Integers`."""
    inputs, count = levels.shape[1], scales.shape[1]
    if groups is None or count == 1:
        return Integers(levels, scales, zeros, bits)
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order].long(), torch.arange(inputs) // (inputs // count)):
        raise ValueError(f"their groups of inputs are not {count} of equal size")
    if torch.equal(order, torch.arange(inputs)):
        return Integers(levels, scales, zeros, bits)
    return Integers(levels[:, order], scales, zeros, bits, order)


def _compressed(scheme: Mapping[str, Any]) -> Callable[[Tensors, int], Integers | Eights]:
    nothing: tuple[Any, ...] = (None, {})
    _check(scheme, {"kv_cache_scheme": nothing, "transform_config": nothing, "quantization_status": ("compressed",)})
    _check(scheme.get("sparsity_config") or {}, {"format": ("dense",)}, "sparsity_config.")
    for group in scheme["config_groups"].values():
        form = str(group.get("format") or scheme.get("format"))
        _check({**group, "format": form}, {"format": tuple(_COMPRESSED), "output_activations": (None,)})
        _check(group["weights"] or {}, _COMPRESSED[form], "weights.")
    sizes = [(group["weights"] or {}).get("block_structure") for group in scheme["config_groups"].values()]
    size = next(filter(None, sizes), None)

    def read(tensors: Tensors, inputs: int) -> Integers | Eights:
        scales, zeros, bits = tensors["weight_scale"], tensors.get("weight_zero_point"), 8
        if "weight_packed" in tensors:
            bits = 32 * tensors["weight_packed"].shape[1] // inputs
            levels = _values(tensors["weight_packed"], bits)
        elif tensors["weight"].dtype != torch.int8:
            return _fp8_of(tensors["weight"], scales, size)
        else:
            levels = tensors["weight"].view(torch.uint8) ^ 128
        if zeros is not None:  # packed integers have packed zeros
            is_packed = zeros.dtype == torch.int32
            zeros = _values(zeros.T, bits).T if is_packed else zeros.to(torch.int16) + (1 << (bits - 1))
            zeros = _rows(zeros, len(levels))
        return _in_order(levels, _rows(scales, len(levels)), zeros, bits, tensors.get("weight_g_idx"))

    return read


def _rows(numbers: Tensor, outputs: int) -> Tensor:
    """Scales or zeros `[outputs, groups]`, where each output has its numbers, or all outputs share one row."""
    return numbers.reshape(-1, numbers.shape[-1] if numbers.dim() == 2 else 1).expand(outputs, -1)


def _fp8(scheme: Mapping[str, Any]) -> Callable[[Tensors, int], Eights]:
    _check(scheme, {"fmt": ("e4m3", "float8_e4m3fn", None)})
    size = scheme.get("weight_block_size")
    return lambda tensors, _: _fp8_of(tensors["weight"], tensors["weight_scale_inv"], size)


def _fp8_of(weight: Tensor, scales: Tensor, size: Any = None) -> Eights:
    """FP8 `weight` `[outputs, inputs]` with one scale, `[outputs, 1]` scales, or `[rows, columns]` scales of blocks.

    Blocks have `size`; without it, they share the weight evenly.
    """
    if weight.dtype != torch.float8_e4m3fn:
        raise ValueError(f"they are {weight.dtype}, and float8_e4m3fn is read")
    outputs, inputs = weight.shape
    scales = scales.float().reshape(-1, scales.shape[-1] if scales.dim() == 2 else 1)
    rows, columns = size or (-(-outputs // len(scales)), -(-inputs // scales.shape[1]))
    if columns % GROUP and columns < inputs:
        raise ValueError(f"blocks of {columns} inputs are no multiples of {GROUP}")
    return Eights(weight, scales.repeat_interleave(rows, 0)[:outputs], columns)


def _check(scheme: Mapping[str, Any], fields: Mapping[str, tuple[Any, ...]], where: str = "") -> None:
    """Raises UnsupportedError if one of `fields` is there and has none of its values."""
    for name, values in fields.items():
        if name in scheme and scheme[name] not in values:
            words = " or ".join(str(value) for value in values if value not in (None, {})) or "none"
            raise UnsupportedError(
                f"the checkpoint's `quantization_config` has {where}{name}={scheme[name]!r}, and specdec reads "
                f"{words}: use another file, or the checkpoint that it was made of"
            )


_GROUPED = ("group", "channel", "tensor")
_COMPRESSED: dict[str, dict[str, tuple[Any, ...]]] = {
    "pack-quantized": {"type": ("int",), "num_bits": (4, 8), "strategy": _GROUPED},
    "int-quantized": {"type": ("int",), "num_bits": (4, 8), "strategy": _GROUPED},
    "float-quantized": {"type": ("float",), "num_bits": (8,), "strategy": (*_GROUPED, "block")},
    "naive-quantized": {"type": ("int", "float"), "num_bits": (8,), "strategy": (*_GROUPED, "block")},
}
"""A format of compressed-tensors -> the fields of `weights`, with the values that are read."""
READERS: dict[str, Callable[[Mapping[str, Any]], Callable[[Tensors, int], Integers | Eights]]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
}
"""`quant_method` -> a function of the scheme that makes the reader of a layer's tensors and number of inputs."""
