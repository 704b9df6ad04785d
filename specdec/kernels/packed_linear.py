"""Linear layers whose weight is stored in the order in which a pass over a few rows reads it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.errors import OptionError
from specdec.kernels import build, ops, packed_layout
from specdec.kernels.quantized import Quantized, to_int4, to_int8

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
INTEGERS = {"int8": torch.int8, "int4": torch.uint8}  # as they are packed
KINDS = (*FLOATS, *INTEGERS)
_HELD = ("packed", "factors", "scales", "mins", "bias")
_FEW = 8  # rows for which oneDNN reorders a weight
_SAMPLE = 1024  # outputs and inputs of the layer that is timed
_TILED, _UNPACKED = (1, 4, 16), (64, 128, 256)  # rows that are timed
_EVEN, _WINS = 1.1, 0.9  # shares of the time that tiles may take, which suit all numbers of rows, and unpacked weights
_NEVER = 2**63 - 1  # rows

Weight = Tensor | Quantized


class AnyLinear(nn.Module, ABC):
    """A linear layer that stores its weight once, in its own format.

    `weight` is float32, bfloat16 or `Quantized` `[outputs, inputs]`, `bias` `[outputs]` or None. `kind` is one of
    `KINDS`, `takes` the dtypes of its inputs. Raises OptionError for other weights and biases.
    """

    bias: Tensor | None

    def __init__(self, weight: Weight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.outputs, self.inputs = (weight.values if isinstance(weight, Quantized) else weight).shape
        self.kind = kind_of(weight)
        if self.kind not in KINDS:
            raise OptionError.of("weight", "float32, bfloat16 or Quantized", self.kind, "convert it")
        if bias is not None and tuple(bias.shape) != (self.outputs,):
            raise OptionError.of("bias", f"[{self.outputs}], one for each output", list(bias.shape))
        self.takes = (FLOATS[self.kind],) if self.kind in FLOATS else tuple(FLOATS.values())
        self.register_buffer("bias", None if bias is None else bias.detach().float().contiguous())

    def forward(self, x: Tensor) -> Tensor:
        """`[..., inputs]` to `[..., outputs]`, in the dtype of `x`; raises OptionError for one that does not fit."""
        if x.dtype not in self.takes:
            names = " or ".join(str(dtype) for dtype in self.takes)
            raise OptionError.of("x", f"{names} for {self.kind} weights", x.dtype, "convert it, or pack another kind")
        if not x.dim() or x.shape[-1] != self.inputs:
            raise OptionError.of("x", f"[..., {self.inputs}]", list(x.shape), "is it meant for another layer?")
        return self._multiplied(x)

    @abstractmethod
    def _multiplied(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def weight(self) -> Tensor:
        """The weight `[outputs, inputs]`: as given, or integers as float32."""

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight, for tied embeddings: `[...]` to `[..., inputs]`; `ids` are not checked."""

    @property
    def table(self) -> Tensor | None:
        """The stored weight `[blocks, rows of a block, parts, numbers of a part]`; None if it is not stored by rows.

        Row `block * rows + row` of the weight, flattened, begins `table[block, row]`; the rest is padding.
        """
        return None

    @abstractmethod
    def cut(self, ids: Tensor) -> AnyLinear:
        """A layer of the outputs `ids` `[n]` alone."""

    def extra_repr(self) -> str:
        return f"{self.kind}, inputs={self.inputs}, outputs={self.outputs}, bias={self.bias is not None}"

    def _bias_as(self, dtype: torch.dtype) -> Tensor | None:
        return None if self.bias is None else self.bias.to(dtype)

    def _bias_of(self, ids: Tensor) -> Tensor | None:
        return None if self.bias is None else self.bias[ids]


class PackedLinear(AnyLinear):
    """Runs on the kernels: passes over a few rows read the weight at the speed of the memory.

    A row's result does not depend, bit for bit, on the rows beside it nor on the number of threads, if `way` is
    `ops.ALIKE`. By default it may differ where this machine is faster in another way from some number of rows on.
    """

    packed: Tensor
    factors: Tensor | None
    scales: Tensor | None
    mins: Tensor | None

    def __init__(self, weight: Weight, bias: Tensor | None = None, way: int = ops.FASTEST) -> None:
        super().__init__(weight, bias)
        self.way = way
        if isinstance(weight, Quantized):
            self.group = weight.group or 0
            packed = packed_layout.packed(weight.values, INTEGERS[self.kind], self.group)
            others = (
                weight.factors,
                packed_layout.packed_groups(weight.scales),
                packed_layout.packed_groups(weight.mins),
            )
        else:
            self.group, packed, others = 0, packed_layout.packed(weight.detach(), weight.dtype), (None, None, None)
        for name, tensor in zip(("packed", "factors", "scales", "mins"), (packed, *others), strict=True):
            self.register_buffer(name, tensor)

    @staticmethod
    def can_join(layers: Sequence[PackedLinear]) -> bool:
        """Whether these layers can be joined: alike, and made of whole blocks."""
        kinds = {
            (one.kind, one.inputs, one.group, one.way, *(one._buffers[name] is None for name in _HELD[:-1]))
            for one in layers
        }
        return len(kinds) == 1 and all(one.outputs % packed_layout.BLOCK == 0 for one in layers)

    @classmethod
    def join(cls, layers: Sequence[PackedLinear]) -> PackedLinear:
        """One layer with the outputs of all these, whose tensors become views of its own; see `can_join`."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        for name in ("kind", "takes", "inputs", "group", "way"):
            setattr(made, name, getattr(layers[0], name))
        sizes = [one.outputs for one in layers]
        made.outputs = sum(sizes)
        if any(one.bias is not None for one in layers):
            for one in layers:
                one.bias = torch.zeros(one.outputs) if one.bias is None else one.bias
        for name in _HELD:
            parts = [part for one in layers if (part := one._buffers[name]) is not None]
            whole = torch.cat(parts) if parts else None
            made.register_buffer(name, whole)
            if whole is not None:
                pieces = torch.split(whole, [len(part) for part in parts])
                for one, piece in zip(layers, pieces, strict=True):
                    one._buffers[name] = piece
        return made

    def _multiplied(self, x: Tensor) -> Tensor:
        # Attribute lookups, one by one, would cost as much as the dispatch.
        packed, factors, scales, mins, bias = map(self._buffers.get, _HELD)
        return ops.packed_linear(x, packed, factors, scales, mins, bias, self.outputs, self.group, self.way)

    def weight(self) -> Tensor:
        return self.rows(torch.arange(self.outputs))

    def rows(self, ids: Tensor) -> Tensor:
        return ops.packed_rows(ids, self.packed, self.factors, self.scales, self.mins, self.inputs, self.group)

    @property
    def table(self) -> Tensor | None:
        return self.packed.transpose(1, 2) if self.kind in FLOATS else None

    def cut(self, ids: Tensor) -> PackedLinear:
        if self.kind in FLOATS:
            return PackedLinear(self.rows(ids), self._bias_of(ids), self.way)
        held = self.packed, self.factors, self.scales, self.mins
        return PackedLinear(ops.quantized_rows(ids, *held, self.inputs, self.group), self._bias_of(ids), self.way)


class HeldLinear(AnyLinear):
    """Runs on torch's `F.linear`: the weight is stored as given, and every pass makes floats of integers."""

    def __init__(self, weight: Weight, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self.held = weight if isinstance(weight, Quantized) else weight.detach()

    def _multiplied(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight().to(x.dtype), self._bias_as(x.dtype))

    def weight(self) -> Tensor:
        return self.held.weight() if isinstance(self.held, Quantized) else self.held

    def rows(self, ids: Tensor) -> Tensor:
        if isinstance(self.held, Quantized):
            return self.held.rows(ids.flatten()).weight().view(*ids.shape, self.inputs)
        return self.held[ids]

    def cut(self, ids: Tensor) -> HeldLinear:
        weight = self.held.rows(ids) if isinstance(self.held, Quantized) else self.held[ids]
        return HeldLinear(weight, self._bias_of(ids))


class ReorderedLinear(AnyLinear):
    """Runs on oneDNN: a float weight in the order that oneDNN chooses for a few rows; `rows` is slow."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self.reordered = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _FEW)

    def _multiplied(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.reordered, self._bias_as(x.dtype), "none", [], "")

    def weight(self) -> Tensor:
        return self.reordered.to_dense()

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight()[ids]

    def cut(self, ids: Tensor) -> ReorderedLinear:
        return ReorderedLinear(self.rows(ids), self._bias_of(ids))


@torch.no_grad()
def pack(weight: Weight, bias: Tensor | None = None, *, lookup: bool = False) -> AnyLinear:
    """A layer over a weight `[outputs, inputs]`: packed if the kernels can be used (`why_not`), else over oneDNN or
    `F.linear`.

    `lookup`: every pass will call `rows`.
    """
    if build.available():
        grouped = isinstance(weight, Quantized) and weight.group is not None
        measure_ways(kind_of(weight), grouped)
        return PackedLinear(weight, bias)
    if isinstance(weight, Tensor) and not lookup and reorders(weight.dtype):
        return ReorderedLinear(weight, bias)
    return HeldLinear(weight, bias)


def kind_of(weight: Weight) -> str:
    """The weight's name in `KINDS`, or its dtype's name."""
    return f"int{weight.bits}" if isinstance(weight, Quantized) else str(weight.dtype).removeprefix("torch.")


@cache
def reorders(dtype: torch.dtype) -> bool:
    """Whether oneDNN's reordered linear works here in this dtype: its operators are internal to torch."""
    weight = torch.eye(_FEW, dtype=dtype)
    with suppress(RuntimeError, AttributeError, TypeError):
        layer = ReorderedLinear(weight)
        return torch.equal(layer(weight), weight) and torch.equal(layer.weight(), weight)
    return False


@cache
def measure_ways(kind: str, grouped: bool) -> None:
    """Finds from how many rows on such weights are multiplied faster by tiles, and unpacked; once per process, in some
    0.1 s.

    All layers follow, those of compiled passes too.
    """
    sample = torch.linspace(-1, 1, _SAMPLE * _SAMPLE).view(_SAMPLE, _SAMPLE)
    if kind in FLOATS:
        packed = PackedLinear(sample.to(FLOATS[kind]))
    else:
        int4 = to_int4(sample)
        int8 = replace(int4, bits=8, mins=None) if grouped else to_int8(sample)
        packed = PackedLinear(int8 if kind == "int8" else int4)
    for dtype in packed.takes:
        tiles = _NEVER
        if dtype == torch.bfloat16 and ops.has_tiles():
            tiles = _since(packed, dtype, ops.TILES, ops.VECTORS, _TILED, _EVEN)
        best = ops.VECTORS if tiles == _NEVER else ops.TILES
        unpacked = _since(packed, dtype, ops.UNPACKED, best, _UNPACKED, _WINS)
        ops.set_ways(packed.packed.dtype, packed.group > 0, dtype == torch.float32, tiles, unpacked)


def _since(packed: PackedLinear, dtype: torch.dtype, way: int, other: int, counts: Sequence[int], share: float) -> int:
    """From how many rows on, of these `counts`, one way takes less than this `share` of the other's time."""

    def seconds(way: int, rows: Tensor) -> float:
        packed.way = way
        return best_seconds(partial(packed, rows))

    since = _NEVER
    for count in reversed(counts):
        rows = torch.ones(count, _SAMPLE, dtype=dtype)
        if seconds(way, rows) > share * seconds(other, rows):
            break
        since = count
    return since


def best_seconds(work: Callable[[], object], times: int = 4) -> float:
    """The seconds of the fastest of several runs."""

    def once() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return min(once() for _ in range(times))
