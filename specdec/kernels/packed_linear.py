"""Linear layers whose weight is stored in the order in which a pass over a few rows reads it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.kernels import ops, packed_layout, pages
from specdec.kernels.build import measured
from specdec.kernels.packed_layout import BLOCK
from specdec.kernels.quantized import GROUP, Quantized

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FLOAT_TENSORS = ("packed", "factors", "scales", "mins", "bias")
LAYER_TENSORS = ("packed", "high", "factors", "scales", "mins", "steps", "levels", "bias")
"""The tensors of a packed layer."""
_OUTPUTS = 64 * BLOCK  # so many are unpacked at a time, into memory that the C library uses again
_SAMPLE = 1024  # outputs and inputs of the layer that is timed
_TILED, _UNPACKED = (1, 4, 16), (64, 128, 256)  # rows that are timed
_EVEN, _WINS = 1.1, 0.9  # shares of the time that tiles, which suit all numbers of rows, and unpacked weights may take
_NEVER = 2**63 - 1  # rows

Weight = Tensor | Quantized


class PackedLinear(nn.Module):
    """A linear layer on the kernels: passes over a few rows read the weight at the speed of the memory.

    `tensors` are packed tensors by the names of its buffers, some of them None; `kind` is the weight's name in `FLOATS`
    or "int4" to "int8", `takes` the dtypes of the layer's inputs. Integers are multiplied by inputs that are rounded to
    8 bits in groups, if the layer `rounds`. A row's result does not depend, bit for bit, on the rows beside it nor on
    the number of threads, if `way` is `ops.ALIKE`. By default it may differ where this machine is faster in another way
    from some number of rows on. `likely`: the outputs that a draft's head computes first (see `ops.dots`).
    """

    bias: Tensor | None
    packed: Tensor
    high: Tensor | None
    factors: Tensor | None
    scales: Tensor | None
    mins: Tensor | None
    steps: Tensor | None
    levels: Tensor | None

    def __init__(
        self, tensors: Mapping[str, Tensor | None], outputs: int, inputs: int, kind: str, *, rounds: bool
    ) -> None:
        super().__init__()
        self.outputs, self.inputs, self.kind, self.way, self.likely = outputs, inputs, kind, ops.FASTEST, 0
        self.rounds = rounds and kind not in FLOATS
        self.takes = (FLOATS[kind],) if kind in FLOATS else tuple(FLOATS.values())
        for name in LAYER_TENSORS:
            self.register_buffer(name, tensors.get(name))

    @staticmethod
    def can_join(layers: Sequence[PackedLinear]) -> bool:
        """Whether these layers can be joined: their weights differ in nothing but outputs, and have whole blocks."""
        kinds = {
            (
                layer.kind,
                layer.inputs,
                layer.way,
                layer.rounds,
                *map(_form, map(layer._buffers.get, LAYER_TENSORS[:-1])),
            )
            for layer in layers
        }
        return len(kinds) == 1 and all(layer.outputs % BLOCK == 0 for layer in layers)

    @classmethod
    def join(cls, layers: Sequence[PackedLinear]) -> PackedLinear:
        """One layer with the outputs of these layers, whose tensors become views into its tensors; see `can_join`."""
        first, outputs = layers[0], sum(layer.outputs for layer in layers)
        if any(layer.bias is not None for layer in layers):
            for layer in layers:
                if layer.bias is None:
                    layer.bias = torch.zeros(layer.outputs, dtype=torch.float32, device=layer.packed.device)
        tensors = dict[str, Tensor | None]()
        for name in LAYER_TENSORS:
            parts = [part for layer in layers if (part := layer._buffers[name]) is not None]
            whole = None if not parts else parts[0] if name == "levels" else pages.joined(parts)
            tensors[name] = whole
            if whole is not None and name != "levels":
                views = torch.split(whole, [len(part) for part in parts])
                for layer, view in zip(layers, views, strict=True):
                    layer._buffers[name] = view
        union = cls(tensors, outputs, first.inputs, first.kind, rounds=first.rounds)
        union.way = first.way
        return union

    def forward(self, x: Tensor) -> Tensor:
        """`[..., inputs]` to `[..., outputs]`, in the dtype of `x`; raises ValueError for one that does not fit."""
        # Attribute lookups, one by one, would cost as much as the dispatch.
        buffer = self._buffers.get
        if self.rounds:
            return ops.dots(x, *map(buffer, LAYER_TENSORS), self.outputs, self.way, self.likely)
        return ops.packed_linear(x, *map(buffer, _FLOAT_TENSORS), self.outputs, self.way)

    def of_experts(self, x: Tensor, experts: Tensor, outputs: int) -> Tensor:
        """Rows `[rows, inputs]`, each by the weight of its expert `[rows]`, to `[rows, outputs]`.

        The layer has all experts' outputs, each expert's padded to whole blocks; only weights of `experts` are read.
        """
        tensors = map(self._buffers.get, LAYER_TENSORS)
        return ops.expert_linear(x, experts, *tensors, outputs, self.way, self.rounds)

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Lets `F.linear(x, layer, bias)` call the layer, so that a layer can stand for a router's weight."""
        if function is not F.linear:
            return NotImplemented
        x, layer, bias = (*args, None)[:3]
        return layer(x) if bias is None else layer(x) + bias

    def weight(self) -> Tensor:
        """The weight `[outputs, inputs]`; integers as float32."""
        return self.rows(torch.arange(self.outputs, device=self.packed.device))

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `[..., inputs]` of the weight by their `ids` `[...]`, which are not checked; integers as float32."""
        flat = ids.reshape(-1)
        values = packed_layout.rows(self.packed, flat, self.inputs)
        if self.kind not in FLOATS:
            if self.high is not None:
                columns = self.packed.shape[1] * packed_layout.COLUMNS[self.packed.dtype]
                values = values + 16 * packed_layout.high_rows(self.high, flat, columns, self.inputs)
            values = Quantized(
                values,
                bits=int(self.kind.removeprefix("int")),
                scales=packed_layout.groups_of(self.scales, flat),
                mins=packed_layout.groups_of(self.mins, flat),
                steps=packed_layout.steps_of(self.steps, flat),
                levels=self.levels,
                factors=None if self.factors is None else self.factors[flat],
            ).weight()
        return values.view(*ids.shape, self.inputs)

    @property
    def table(self) -> Tensor | None:
        """The stored weight `[blocks, rows of a block, parts, numbers of a part]`; None for integers.

        Row `block * rows + row` of the weight, flattened, begins `table[block, row]`; the rest is padding.
        """
        return self.packed.transpose(1, 2) if self.kind in FLOATS else None

    def extra_repr(self) -> str:
        return f"{self.kind}, inputs={self.inputs}, outputs={self.outputs}, bias={self.bias is not None}"


def _form(tensor: Tensor | None) -> tuple[object, ...]:
    return () if tensor is None else (tensor.dtype, *tensor.shape[1:])


@torch.no_grad()
def pack(weight: Weight, bias: Tensor | None = None, *, rounds: bool = True) -> PackedLinear:
    """A layer over a weight and a bias `[outputs]`, multiplied as is fastest here; needs `specdec.kernels.available`.

    The weight is float32, bfloat16 or `Quantized` in 4 or 8 bits without steps, `[outputs, inputs]`.
    """
    layer = _packed_layer(weight, bias, rounds=rounds)
    measure_ways(layer.kind, layer.scales is not None, layer.rounds)
    return layer


def _packed_layer(weight: Weight, bias: Tensor | None = None, *, rounds: bool = True) -> PackedLinear:
    """The layer of `pack`, whose ways are not measured."""
    numbers = weight if isinstance(weight, Quantized) else Quantized(weight.detach())  # `values` may be floats
    assert numbers.bits in (4, 8), numbers.bits  # blocks.py packs weights of other bits, and steps
    assert numbers.steps is None
    if isinstance(weight, Quantized):
        kind, dtype, multiple = f"int{weight.bits}", torch.int8 if weight.bits == 8 else torch.uint8, GROUP
    else:
        kind, dtype, multiple = str(weight.dtype).removeprefix("torch."), weight.dtype, 1
    views = {
        "factors": numbers.factors,
        "scales": packed_layout.packed_groups(numbers.scales),
        "mins": packed_layout.packed_groups(numbers.mins),
        "levels": numbers.levels,
        "bias": None if bias is None else bias.detach().float().contiguous(),
    }
    tensors = {name: None if t is None else pages.in_huge_pages(t) for name, t in views.items()}
    tensors["packed"] = pages.in_huge_pages(packed_layout.packed(numbers.values, dtype, multiple)).view(dtype)
    outputs, inputs = numbers.values.shape
    return PackedLinear(tensors, outputs, inputs, kind, rounds=rounds)


@torch.no_grad()
def round_weight(
    weight: Tensor | PackedLinear, bits: int, bias: Tensor | None = None, *, rounds: bool = True
) -> PackedLinear:
    """A layer over a weight `[outputs, inputs]`, or over a packed layer's, in 8 or 4 bits.

    In 8 bits the largest weight of each output becomes ±127; in 4 bits each group of 32 inputs has the scale and the
    min of least squared error. Needs `specdec.kernels.available`.
    """
    outputs, inputs = (weight.outputs, weight.inputs) if isinstance(weight, PackedLinear) else weight.shape
    groups, wide, empty = -(-inputs // GROUP), bits == 8, partial(pages.blocks, outputs)
    tensors: dict[str, Tensor | None] = {
        "packed": empty((groups * GROUP // (4 if wide else 8), BLOCK, 4), torch.int8 if wide else torch.uint8),
        "factors": torch.empty(outputs, dtype=torch.float32, device="cpu"),
        "scales": None if wide else empty((groups, BLOCK), torch.float16),
        "mins": None if wide else empty((groups, BLOCK), torch.float16),
    }
    for first in range(0, outputs, _OUTPUTS):
        last = min(first + _OUTPUTS, outputs)
        blocks, factors = slice(first // BLOCK, -(-last // BLOCK)), slice(first, last)
        parts = (t if t is None else t[factors if name == "factors" else blocks] for name, t in tensors.items())
        if isinstance(weight, PackedLinear) and weight.kind in FLOATS:
            floats = weight.packed[blocks]
        else:
            ids = torch.arange(first, last, device="cpu")
            rows = weight.rows(ids) if isinstance(weight, PackedLinear) else weight[first:last]
            rows = rows if rows.dtype == torch.bfloat16 else rows.float()
            floats = packed_layout.packed(rows, rows.dtype).contiguous().view(rows.dtype)
        ops.round_weight(floats, inputs, *parts)
    tensors["bias"] = None if bias is None else bias.detach().float().contiguous()
    layer = PackedLinear(tensors, outputs, inputs, f"int{bits}", rounds=rounds)
    measure_ways(layer.kind, layer.scales is not None, rounds)
    return layer


@torch.no_grad()
def restored_layer(
    tensors: Mapping[str, Tensor | None], outputs: int, inputs: int, *, rounds: bool = True
) -> PackedLinear:
    """A layer over tensors that were packed before, by the names of its buffers.

    Its multiplication is not measured yet (`measure_ways`). Raises ValueError for tensors of another size.
    """
    packed, high = tensors["packed"], tensors.get("high")
    assert packed is not None
    columns = packed.shape[1] * packed_layout.COLUMNS[packed.dtype]
    if len(packed) != -(-outputs // BLOCK) or not 0 <= columns - inputs < GROUP:
        raise ValueError(f"{list(packed.shape)} is not the packed form of {[outputs, inputs]}")
    integers = {torch.int8: "int8", torch.uint8: "int4"}
    kind = integers.get(packed.dtype) or str(packed.dtype).removeprefix("torch.")
    if high is not None:
        kind = f"int{4 + 32 * high.shape[1] // columns}"
    return PackedLinear(tensors, outputs, inputs, kind, rounds=rounds)


@cache
def measure_ways(kind: str, grouped: bool, rounds: bool) -> None:
    """Measures from how many rows on tiles, and unpacked weights, are faster for such weights: once per machine, in
    some 0.2 s. All layers follow.

    Integers that are multiplied by rounded rows are timed only where there are tiles.
    """
    if rounds and (kind not in ("int8", "int4") or not ops.has_tiles()):
        return
    sample = torch.linspace(-1, 1, _SAMPLE * _SAMPLE, device="cpu").view(_SAMPLE, _SAMPLE)
    weight: Weight
    if kind in FLOATS:
        weight = sample.to(FLOATS[kind])
    else:
        scales = torch.ones(_SAMPLE, _SAMPLE // GROUP, dtype=torch.float16, device="cpu") if grouped else None
        values = (sample * 7).to(torch.int8)
        weight = Quantized(values, 8, scales) if kind == "int8" else Quantized(values + 7, 4, scales, scales)
    packed = _packed_layer(weight, rounds=False)

    def float_ways(dtype: torch.dtype) -> list[int]:
        tiles = _NEVER
        if dtype == torch.bfloat16 and ops.has_tiles():
            tiles = _since(packed, dtype, ops.TILES, ops.VECTORS, _TILED, _EVEN)
        best = ops.VECTORS if tiles == _NEVER else ops.TILES
        return [tiles, _since(packed, dtype, ops.UNPACKED, best, _UNPACKED, _WINS)]

    def integer_ways() -> list[int]:
        rounding = _packed_layer(weight)
        rounding.way = ops.ALIKE
        return [_since(packed, torch.bfloat16, ops.FASTEST, ops.ALIKE, _UNPACKED, _WINS, rounding)]

    name = f"{kind}{'-grouped' if grouped else ''}"
    for dtype in packed.takes:
        numbers = measured(f"{name}-by-{str(dtype).removeprefix('torch.')}", 2, partial(float_ways, dtype))
        ops.set_ways(packed.packed.dtype, grouped, dtype == torch.float32, *numbers)
    if rounds:
        ops.set_floats(*measured(f"{name}-rounding", 1, integer_ways))


def _since(
    packed: PackedLinear,
    dtype: torch.dtype,
    way: int,
    other: int,
    counts: Sequence[int],
    share: float,
    other_layer: PackedLinear | None = None,
) -> int:
    """The number of rows, of `counts`, from which on `way` takes less than a `share` of the time of way `other`.

    `other_layer`: the layer that multiplies by `other`; None: the same layer.
    """

    def seconds(layer: PackedLinear, way: int, rows: Tensor) -> float:
        layer.way = way
        return best_seconds(partial(layer, rows))

    since = _NEVER
    for count in reversed(counts):
        rows = torch.ones(count, _SAMPLE, dtype=dtype, device="cpu")
        if seconds(packed, way, rows) > share * seconds(other_layer or packed, other, rows):
            break
        since = count
    return since


def best_seconds(work: Callable[[], object], times: int = 8) -> float:
    """The seconds of the fastest of several runs."""

    def once() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return min(once() for _ in range(times))
