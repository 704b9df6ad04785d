"""From a model's layers to packed ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specdec.errors import OptionError
from specdec.kernels import build
from specdec.kernels.packed import (
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
from specdec.kernels.quantize import Quantized, concatenated, to_int4, to_int8

Layer = nn.Linear | Weight


def pack(
    layers: Layer | Sequence[Layer],
    kind: str | None = None,
    *,
    bias: Tensor | None = None,
    group: int | None = None,
    symmetric: bool = True,
    lookup: bool = False,
) -> AnyLinear:
    """One layer that computes what `layers` compute side by side, their outputs one after the other.

    A layer is an `nn.Linear`, a weight `[outputs, inputs]` or a `Quantized`. `kind`, one of `KINDS`, is by default what
    the weights are. `bias` `[outputs]` takes the place of the layers' own. `group` is the number of inputs that share a
    scale, by default 32 for int4, and all of them for int8; `symmetric` as in `to_int4`. `lookup` says that `rows` will
    be asked for in every pass. It is a `PackedLinear` where kernels can be used; else (`why_not` says why) it is one
    over oneDNN or `F.linear`.

    Raises OptionError for unknown kinds, and for layers and biases that do not fit one another.
    """
    parts = list(layers) if isinstance(layers, Sequence) else [layers]
    if not parts:
        raise OptionError.of("layers", "one layer or several", parts)
    with torch.no_grad():
        weight = _joined(
            [part.weight if isinstance(part, nn.Linear) else part for part in parts], kind, group, symmetric
        )
        bias = _biases(parts) if bias is None else bias
        if build.available():
            return PackedLinear(
                weight, bias, unpacks(kind_of(weight), isinstance(weight, Quantized) and weight.groups > 0)
            )
        if isinstance(weight, Tensor) and not lookup and reorders(weight.dtype):
            return ReorderedLinear(weight, bias)
        return HeldLinear(weight, bias)


def _joined(weights: list[Weight], kind: str | None, group: int | None, symmetric: bool) -> Weight:
    """The weights as one, of that kind."""
    quantized = [weight for weight in weights if isinstance(weight, Quantized)]
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    if not plain and kind in (None, kind_of(quantized[0])) and group in (None, quantized[0].group):
        return concatenated(quantized)
    if quantized:
        raise OptionError(
            "`layers` that are quantized stay as they are: leave out `kind` and `group`, and others apart"
        )
    shapes = [list(weight.shape) for weight in plain]
    if any(len(shape) != 2 or shape[1] != shapes[0][1] for shape in shapes):
        raise OptionError.of("layers", "weights [outputs, inputs] of as many inputs", shapes, "pack them apart")
    kind = kind or kind_of(plain[0])
    if kind not in KINDS:
        raise OptionError.of("kind", f"one of {', '.join(KINDS)}", kind)
    if kind in FLOATS and group is not None:
        raise OptionError(f"`group` is for int8 and int4: leave it out for {kind}")
    if kind in FLOATS:
        return torch.cat([weight.to(FLOATS[kind]) for weight in plain])
    if kind == "int8":
        return concatenated([to_int8(weight, group) for weight in plain])
    return concatenated([to_int4(weight, group or 32, symmetric=symmetric) for weight in plain])


def _biases(parts: list[Layer]) -> Tensor | None:
    """The layers' own biases, one after the other, zeros for those without; None if there is none."""
    own = [part.bias if isinstance(part, nn.Linear) else None for part in parts]
    if all(bias is None for bias in own):
        return None
    return torch.cat(
        [torch.zeros(_outputs(part)) if bias is None else bias.float() for part, bias in zip(parts, own, strict=True)]
    )


def _outputs(layer: Layer) -> int:
    if isinstance(layer, nn.Linear):
        return layer.out_features
    return len(layer.values if isinstance(layer, Quantized) else layer)
