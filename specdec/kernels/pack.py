"""From a model's layer to a packed one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.errors import OptionError
from specdec.kernels import build
from specdec.kernels.packed_linear import (
    FLOATS,
    KINDS,
    AnyLinear,
    HeldLinear,
    PackedLinear,
    ReorderedLinear,
    Weight,
    kind_of,
    reorders,
    unpacks,
)
from specdec.kernels.quantized import Quantized, to_int4, to_int8

Layer = nn.Linear | Weight


def pack(
    layer: Layer,
    kind: str | None = None,
    *,
    bias: Tensor | None = None,
    group: int | None = None,
    symmetric: bool = True,
    lookup: bool = False,
) -> AnyLinear:
    """A layer that computes what `layer` computes: an `nn.Linear`, a weight `[outputs, inputs]` or a `Quantized`.

    `kind`, one of `KINDS`, is by default what the weight is. `bias` `[outputs]` takes the place of the layer's own.
    `group` is the number of inputs that share a scale, by default 32 for int4, and all of them for int8; `symmetric` as
    in `to_int4`. `lookup` says that `rows` will be asked for in every pass. It is a `PackedLinear` where kernels can be
    used; else (`why_not` says why) it is one over oneDNN or `F.linear`.

    Raises OptionError for unknown kinds, and for weights and biases that do not fit.
    """
    with torch.no_grad():
        given: Weight = layer.weight if isinstance(layer, nn.Linear) else layer
        if bias is None and isinstance(layer, nn.Linear):
            bias = layer.bias
        weight = _as_kind(given, kind, group, symmetric)
        if build.available():
            grouped = isinstance(weight, Quantized) and weight.groups > 0
            return PackedLinear(weight, bias, unpacks(kind_of(weight), grouped))
        if isinstance(weight, Tensor) and not lookup and reorders(weight.dtype):
            return ReorderedLinear(weight, bias)
        return HeldLinear(weight, bias)


def _as_kind(weight: Weight, kind: str | None, group: int | None, symmetric: bool) -> Weight:
    if isinstance(weight, Quantized):
        if kind not in (None, kind_of(weight)) or group not in (None, weight.group):
            raise OptionError("a `layer` that is quantized stays as it is: leave out `kind` and `group`")
        return weight
    if weight.dim() != 2:
        raise OptionError.of("layer", "a weight [outputs, inputs]", list(weight.shape))
    kind = kind or kind_of(weight)
    if kind not in KINDS:
        raise OptionError.of("kind", f"one of {', '.join(KINDS)}", kind)
    if kind in FLOATS and group is not None:
        raise OptionError(f"`group` is for int8 and int4: leave it out for {kind}")
    if kind in FLOATS:
        return weight.to(FLOATS[kind])
    return to_int8(weight, group) if kind == "int8" else to_int4(weight, group or 32, symmetric=symmetric)
