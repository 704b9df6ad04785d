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
from specdec.kernels.quantized import GROUP, Quantized

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_OF_FLOATS = ("packed", "factors", "scales", "mins", "bias")
HELD = ("packed", "high", "factors", "scales", "mins", "steps", "levels", "bias")
"""The tensors of a packed layer."""
_OF_WEIGHT = HELD[:-1]
_SAMPLE = 1024  # outputs and inputs of the layer that is timed
_TILED, _UNPACKED = (1, 4, 16), (64, 128, 256)  # rows that are timed
_EVEN, _WINS = 1.1, 0.9  # shares of the time that tiles may take, which suit all numbers of rows, and unpacked weights
_NEVER = 2**63 - 1  # rows

Weight = Tensor | Quantized


class PackedLinear(nn.Module):
    """A linear layer on the kernels: passes over a few rows read the weight at the speed of the memory.

    `weight` is float32, bfloat16 or `Quantized` in 4 or 8 bits without steps, `[outputs, inputs]`; `bias` `[outputs]`
    or None. `kind` is its name in `FLOATS` or "int4" to "int8", `takes` the dtypes of the layer's inputs. Integers are
    multiplied by inputs that are rounded to 8 bits in groups, if the layer `rounds`. A row's result does not depend,
    bit for bit, on the rows beside it nor on the number of threads, if `way` is `ops.ALIKE`. By default it may differ
    where this machine is faster in another way from some number of rows on. `likely`: the outputs that a draft's head
    computes first (see `ops.dots`).
    """

    bias: Tensor | None
    packed: Tensor
    high: Tensor | None
    factors: Tensor | None
    scales: Tensor | None
    mins: Tensor | None
    steps: Tensor | None
    levels: Tensor | None

    def __init__(self, weight: Weight, bias: Tensor | None = None, *, rounds: bool = True) -> None:
        super().__init__()
        given = weight if isinstance(weight, Quantized) else Quantized(weight.detach())  # or floats alone
        assert given.bits in (4, 8), given.bits  # blocks.py packs others, and steps
        assert given.steps is None
        kind = weight_kind(weight)
        is_float = kind in FLOATS
        stored = FLOATS[kind] if is_float else torch.int8 if given.bits == 8 else torch.uint8
        held = {
            "packed": packed_layout.packed(given.values, stored, 1 if is_float else GROUP),
            "factors": given.factors,
            "scales": packed_layout.packed_groups(given.scales),
            "mins": packed_layout.packed_groups(given.mins),
            "levels": given.levels,
            "bias": None if bias is None else bias.detach().float().contiguous(),
        }
        held = {name: None if one is None else pages.in_huge_pages(one) for name, one in held.items()}
        outputs, inputs = given.values.shape
        self._set(held, outputs, inputs, kind, rounds)

    @classmethod
    def of(
        cls, held: Mapping[str, Tensor | None], outputs: int, inputs: int, kind: str, *, rounds: bool
    ) -> PackedLinear:
        """A layer over tensors that are packed, by the names of its buffers; those that are left out are None."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._set(held, outputs, inputs, kind, rounds)
        return made

    def _set(self, held: Mapping[str, Tensor | None], outputs: int, inputs: int, kind: str, rounds: bool) -> None:
        self.outputs, self.inputs, self.kind, self.way, self.likely = outputs, inputs, kind, ops.FASTEST, 0
        self.rounds = rounds and kind not in FLOATS
        self.takes = (FLOATS[kind],) if kind in FLOATS else tuple(FLOATS.values())
        for name in HELD:
            self.register_buffer(name, held.get(name))

    @staticmethod
    def can_join(layers: Sequence[PackedLinear]) -> bool:
        """Whether these layers can be joined: alike, and made of whole blocks."""
        kinds = {
            (one.kind, one.inputs, one.way, one.rounds, *map(_form, map(one._buffers.get, _OF_WEIGHT)))
            for one in layers
        }
        return len(kinds) == 1 and all(one.outputs % packed_layout.BLOCK == 0 for one in layers)

    @classmethod
    def join(cls, layers: Sequence[PackedLinear]) -> PackedLinear:
        """One layer with the outputs of all these, whose tensors become views of its own; see `can_join`."""
        first, outputs = layers[0], sum(one.outputs for one in layers)
        if any(one.bias is not None for one in layers):
            for one in layers:
                if one.bias is None:
                    one.bias = torch.zeros(one.outputs, dtype=torch.float32, device=one.packed.device)
        held = dict[str, Tensor | None]()
        for name in HELD:
            parts = [part for one in layers if (part := one._buffers[name]) is not None]
            whole = None if not parts else parts[0] if name == "levels" else pages.joined(parts)
            held[name] = whole
            if whole is not None and name != "levels":
                pieces = torch.split(whole, [len(part) for part in parts])
                for one, piece in zip(layers, pieces, strict=True):
                    one._buffers[name] = piece
        made = cls.of(held, outputs, first.inputs, first.kind, rounds=first.rounds)
        made.way = first.way
        return made

    def forward(self, x: Tensor) -> Tensor:
        """`[..., inputs]` to `[..., outputs]`, in the dtype of `x`; raises ValueError for one that does not fit."""
        # Attribute lookups, one by one, would cost as much as the dispatch.
        held = self._buffers.get
        if self.rounds:
            return ops.dots(x, *map(held, HELD), self.outputs, self.way, self.likely)
        return ops.packed_linear(x, *map(held, _OF_FLOATS), self.outputs, self.way)

    def of_experts(self, x: Tensor, experts: Tensor, outputs: int) -> Tensor:
        """Rows `[rows, inputs]`, each by the weight of its expert `[rows]`, to `[rows, outputs]`.

        The layer's outputs are the experts' ones, each padded to whole blocks; only the weights of `experts` are read.
        """
        held = map(self._buffers.get, HELD)
        return ops.expert_linear(x, experts, *held, outputs, self.way, self.rounds)

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Lets `F.linear(x, layer, bias)` call the layer, which may so stand for a router's weight."""
        if function is not F.linear:
            return NotImplemented
        x, layer, bias = (*args, None)[:3]
        return layer(x) if bias is None else layer(x) + bias

    def weight(self) -> Tensor:
        """The weight `[outputs, inputs]`: as given, or integers as float32."""
        return self.rows(torch.arange(self.outputs, device=self.packed.device))

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight, for tied embeddings: `[...]` to `[..., inputs]`; `ids` are not checked."""
        return ops.packed_rows(ids, *map(self._buffers.get, _OF_WEIGHT), self.inputs)

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
    """A layer over a weight `[outputs, inputs]`, multiplied as is fastest here; needs `specdec.kernels.available`."""
    layer = PackedLinear(weight, bias, rounds=rounds)
    measure_ways(layer.kind, layer.scales is not None, layer.rounds)
    return layer


@torch.no_grad()
def restored_layer(
    held: Mapping[str, Tensor | None], outputs: int, inputs: int, *, rounds: bool = True
) -> PackedLinear:
    """A layer over tensors that were packed before, by the names of its buffers.

    Its multiplication is not measured yet (`measure_ways`). Raises ValueError for tensors of another size.
    """
    packed, high = held["packed"], held.get("high")
    assert packed is not None
    columns = packed.shape[1] * packed_layout.COLUMNS[packed.dtype]
    if len(packed) != -(-outputs // packed_layout.BLOCK) or not 0 <= columns - inputs < GROUP:
        raise ValueError(f"{list(packed.shape)} is not the packed form of {[outputs, inputs]}")
    integers = {torch.int8: "int8", torch.uint8: "int4"}
    kind = integers.get(packed.dtype) or str(packed.dtype).removeprefix("torch.")
    if high is not None:
        kind = f"int{4 + 32 * high.shape[1] // columns}"
    return PackedLinear.of(held, outputs, inputs, kind, rounds=rounds)


def weight_kind(weight: Weight) -> str:
    """The weight's name: of `FLOATS`, or "int4" to "int8"."""
    return f"int{weight.bits}" if isinstance(weight, Quantized) else str(weight.dtype).removeprefix("torch.")


@cache
def measure_ways(kind: str, grouped: bool, rounds: bool) -> None:
    """Finds from how many rows on such weights are multiplied faster by tiles, and unpacked: once per machine, in some
    0.2 s.

    All layers follow. Integers that meet rounded rows are tried beside tiles alone.
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
    packed = PackedLinear(weight, rounds=False)

    def of_floats(dtype: torch.dtype) -> list[int]:
        tiles = _NEVER
        if dtype == torch.bfloat16 and ops.has_tiles():
            tiles = _since(packed, dtype, ops.TILES, ops.VECTORS, _TILED, _EVEN)
        best = ops.VECTORS if tiles == _NEVER else ops.TILES
        return [tiles, _since(packed, dtype, ops.UNPACKED, best, _UNPACKED, _WINS)]

    def of_integers() -> list[int]:
        rounding = PackedLinear(weight)
        rounding.way = ops.ALIKE
        return [_since(packed, torch.bfloat16, ops.FASTEST, ops.ALIKE, _UNPACKED, _WINS, rounding)]

    name = f"{kind}{'-grouped' if grouped else ''}"
    for dtype in packed.takes:
        numbers = measured(f"{name}-by-{str(dtype).removeprefix('torch.')}", 2, partial(of_floats, dtype))
        ops.set_ways(packed.packed.dtype, grouped, dtype == torch.float32, *numbers)
    if rounds:
        ops.set_floats(*measured(f"{name}-rounding", 1, of_integers))


def _since(
    packed: PackedLinear,
    dtype: torch.dtype,
    way: int,
    other: int,
    counts: Sequence[int],
    share: float,
    beside: PackedLinear | None = None,
) -> int:
    """From how many rows on, of these `counts`, one way takes less than this `share` of the time of the other, which
    may be another layer's."""

    def seconds(layer: PackedLinear, way: int, rows: Tensor) -> float:
        layer.way = way
        return best_seconds(partial(layer, rows))

    since = _NEVER
    for count in reversed(counts):
        rows = torch.ones(count, _SAMPLE, dtype=dtype, device="cpu")
        if seconds(packed, way, rows) > share * seconds(beside or packed, other, rows):
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
