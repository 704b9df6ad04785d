"""What the linear layers of a pass cost, beside the time in which this machine's memory can be read.

python benchmarks/passes.py --linears

All linear layers of a model, one after the other, on synthetic weights; each way runs in turn, with copies of the
weights in turn, so that every pass reads them from memory. Each row of the table is one way, each column a number of
rows of a pass: milliseconds, GB/s, and the share of what reading a large buffer with as many threads reached in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from statistics import median

import torch
from measure import Watch, interleaved, table
from torch import Tensor

from specdec.bench.machine import provenance
from specdec.kernels import HeldLinear, Quantized, ReorderedLinear, pack, why_not

BUFFER_BYTES = 512 << 20
LEAST_BYTES = 256 << 20  # of all copies together: several times what caches hold


@dataclass(frozen=True)
class Shapes:
    """The linear layers of a decoder."""

    hidden: int
    keys: int
    intermediate: int
    layers: int
    vocabulary: int

    @property
    def linears(self) -> list[tuple[int, int]]:
        """`(outputs, inputs)` of each of them, in the order of a pass."""
        attention = [self.hidden, self.keys, self.keys, self.hidden]
        layer = [(outputs, self.hidden) for outputs in (*attention, self.intermediate, self.intermediate)]
        layer += [(self.hidden, self.intermediate)]
        return layer * self.layers + [(self.vocabulary, self.hidden)]


MODELS = {
    "SmolLM2-135M": Shapes(hidden=576, keys=192, intermediate=1536, layers=30, vocabulary=49152),
    "12 x 256": Shapes(hidden=256, keys=256, intermediate=1024, layers=12, vocabulary=4096),
}
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# What is measured: a name, and how a layer is made of a weight, and the dtype of its rows.
WAYS: dict[str, tuple[Callable[[Tensor], torch.nn.Module], str]] = {
    "float32, F.linear": (HeldLinear, "float32"),
    "float32, oneDNN packed": (ReorderedLinear, "float32"),
    "float32, ours": (pack, "float32"),
    "bfloat16, F.linear": (lambda weight: HeldLinear(weight.bfloat16()), "bfloat16"),
    "bfloat16, oneDNN packed": (lambda weight: ReorderedLinear(weight.bfloat16()), "bfloat16"),
    "bfloat16, ours": (partial(pack, kind="bfloat16"), "bfloat16"),
    "int8, ours, float32 rows": (partial(pack, kind="int8"), "float32"),
    "int8, ours, bfloat16 rows": (partial(pack, kind="int8"), "bfloat16"),
    "int8 groups of 32, ours, bfloat16 rows": (partial(pack, kind="int8", group=32), "bfloat16"),
    "int4, ours, float32 rows": (partial(pack, kind="int4"), "float32"),
    "int4, ours, bfloat16 rows": (partial(pack, kind="int4"), "bfloat16"),
}


class Linears:
    """All linear layers of one model in one way; each call is one pass, over the next copy of the weights."""

    def __init__(self, shapes: Shapes, make: Callable[[Tensor], torch.nn.Module], dtype: torch.dtype) -> None:
        self.sizes, self.dtype = shapes.linears, dtype
        copies = [self._layers(make)]
        self.bytes = sum(_bytes(layer) for layer in copies[0])
        copies += [self._layers(make) for _ in range(-(-LEAST_BYTES // self.bytes) - 1)]
        self._turn = cycle(copies)
        self._rows: dict[tuple[int, int], Tensor] = {}

    def _layers(self, make: Callable[[Tensor], torch.nn.Module]) -> list[torch.nn.Module]:
        weights = {size: torch.randn(size) / size[1] ** 0.5 for size in set(self.sizes)}
        return [make(weights[size].clone()) for size in self.sizes]

    def __call__(self, rows: int) -> None:
        for layer, (_, inputs) in zip(next(self._turn), self.sizes, strict=True):
            layer(self._input(rows, inputs))

    def _input(self, rows: int, inputs: int) -> Tensor:
        if (rows, inputs) not in self._rows:
            self._rows[rows, inputs] = torch.randn(rows, inputs).to(self.dtype)
        return self._rows[rows, inputs]


def _bytes(layer: torch.nn.Module) -> int:
    held = [*layer.buffers(), *(value for value in vars(layer).values() if isinstance(value, Tensor | Quantized))]
    return sum(one.numel() * one.element_size() for one in held if isinstance(one, Tensor))


def linears(name: str, counts: Sequence[int], repeats: int, wanted: str) -> None:
    """Prints the table of one model."""
    ways = {way: Linears(MODELS[name], make, FLOATS[dtype]) for way, (make, dtype) in WAYS.items() if wanted in way}
    buffer = torch.ones(BUFFER_BYTES // 4)
    watch = Watch()
    with torch.inference_mode():
        systems = {"reading": lambda _: buffer.sum(), **ways}
        for system in systems.values():
            for rows in counts:
                system(rows)
        seconds = interleaved(systems, counts, repeats, watch)
    speeds = [BUFFER_BYTES / median(times) / 1e9 for times in seconds["reading"]]
    print(f"\n{name}; reading a buffer: {median(speeds):.1f} GB/s ({min(speeds):.1f} to {max(speeds):.1f})\n")
    print(table(["ms, GB/s, share", *(f"{count} rows" for count in counts)], [
        [way, *(_cell(system.bytes, median(times), speed) for times, speed in zip(seconds[way], speeds, strict=True))]
        for way, system in ways.items()
    ]), flush=True)  # fmt: skip


def _cell(size: int, seconds: float, speed: float) -> str:
    reached = size / seconds / 1e9
    return f"{seconds * 1e3:.2f}, {reached:.1f}, {reached / speed:.2f}"


def main() -> None:
    """Prints one table per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--linears", action="store_true", required=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--ways", default="", help="only those with this in their name")
    given = parser.parse_args()
    if reason := why_not():
        print(f"no kernels of ours: {reason}")
    found = provenance()
    print(f"{found['processor']}, {found['threads']} threads, torch {found['versions']['torch']}")
    for name in given.models:
        linears(name, given.rows, given.repeats, given.ways)


if __name__ == "__main__":
    main()
