"""The operators, so that `torch.compile` takes them as they are.

`specdec::packed_linear`, `x` times a packed weight, is compiled code (linear.cpp, which also checks its arguments);
`specdec::packed_rows`, some rows of the weight, is made of torch's operators.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels import layout
from specdec.kernels.quantize import Quantized

_LIBRARY = torch.library.Library("specdec", "FRAGMENT")  # type: ignore[no-untyped-call]
_WEIGHT = "Tensor weight, Tensor? factors, Tensor? scales, Tensor? mins"
_LIBRARY.define(f"packed_linear(Tensor x, {_WEIGHT}, Tensor? bias, int outputs, int group) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"packed_rows(Tensor ids, {_WEIGHT}, int inputs, int group) -> Tensor")  # type: ignore[no-untyped-call]


@torch.library.register_fake("specdec::packed_linear", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _packed_linear(x: Tensor, weight: Tensor, factors: object, scales: object, mins: object, bias: object, outputs: int,
                   group: int) -> Tensor:  # fmt: skip
    return x.new_empty((*x.shape[:-1], outputs))


def _packed_rows(ids: Tensor, weight: Tensor, factors: Tensor | None, scales: Tensor | None, mins: Tensor | None,
                 inputs: int, group: int) -> Tensor:  # fmt: skip
    flat = ids.reshape(-1)
    if weight.is_floating_point():
        values = layout.rows(weight, flat, inputs)
    else:
        values = quantized_rows(flat, weight, factors, scales, mins, inputs, group).weight()
    return values.view(*ids.shape, inputs)


def quantized_rows(ids: Tensor, weight: Tensor, factors: Tensor | None, scales: Tensor | None, mins: Tensor | None,
                   inputs: int, group: int) -> Quantized:  # fmt: skip
    """Rows of a packed weight of integers, as they were before it was packed; arguments as of `packed_rows`."""
    return Quantized(
        layout.rows(weight, ids, inputs),
        bits=4 if weight.dtype == torch.uint8 else 8,
        group=group or None,
        scales=layout.groups_of(scales, ids),
        mins=layout.groups_of(mins, ids),
        factors=None if factors is None else factors[ids],
    )


_LIBRARY.impl("packed_rows", _packed_rows, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]

packed_linear = torch.ops.specdec.packed_linear.default
"""`(x, weight, factors, scales, mins, bias, outputs, group)`: `x` `[..., inputs]` to `[..., outputs]`.

`weight`, `scales` and `mins` are packed (`layout.py`); `factors` and `bias` float32 `[outputs]`; `group` is 0 without
`scales`. A row's result does not depend on its neighbours, bit for bit. Raises ValueError for arguments that do not
fit.
"""

packed_rows = torch.ops.specdec.packed_rows.default
"""`(ids, weight, factors, scales, mins, inputs, group)`: rows of the weight, `ids` `[...]` to `[..., inputs]`.

bfloat16 weights as they are, all others in float32. `ids` are from 0 to the number of outputs; they are not checked.
"""
