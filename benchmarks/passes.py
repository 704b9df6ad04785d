"""What the linear layers and the attention of a pass cost, beside the time in which this machine's memory can be read.

python benchmarks/passes.py --linears
python benchmarks/passes.py --attention
python benchmarks/passes.py --prompts HuggingFaceTB/SmolLM2-135M-Instruct

All linear layers of a model, one after the other, on synthetic weights; each way runs in turn, with copies of the
weights in turn, so that every pass reads them from memory. They are called from Python, one by one. Each row of the
table is one way, each column a number of rows of a pass: milliseconds, GB/s, and the share of what reading a large
buffer with as many threads reached in turn.

Attention of one layer over a cache, copies of which take turns too: of `rows` texts, each with tokens that see all
columns before them; ours beside torch's with repeated keys and a mask.

Reading a prompt: one pass that returns the last token's logits, beside transformers' own pass in turn, integers beside
transformers' in bfloat16. Each cell is milliseconds, and the median of the ratios to transformers' time of the same
turn.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

import torch
from measure import Watch, interleaved, ratio, table
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from specdec import SpecGenerator
from specdec.bench.machine import provenance
from specdec.core.work import Work
from specdec.kernels import attend, lack, pack, pack_blocks, round_weight
from specdec.models.protocols import Session

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
    "Qwen2.5-1.5B": Shapes(hidden=1536, keys=256, intermediate=8960, layers=28, vocabulary=151936),
    "12 x 256": Shapes(hidden=256, keys=256, intermediate=1024, layers=12, vocabulary=4096),
}
Make = Callable[[Tensor], torch.nn.Module]
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def plain(weight: Tensor) -> torch.nn.Module:
    layer = torch.nn.Linear(*reversed(weight.shape), bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


def blocks(kind: str, count: int, size: int, weight: Tensor) -> torch.nn.Module:
    """A layer over random blocks of GGUF, of so many weights and bytes."""
    outputs, inputs = weight.shape
    return pack_blocks(torch.randint(0, 64, (outputs, inputs // count * size), dtype=torch.uint8), kind, inputs)


# What is measured: a name, and how a layer is made of a weight, and the dtype of its rows.
WAYS: dict[str, tuple[Make, str]] = {
    "float32, F.linear": (plain, "float32"),
    "float32, ours": (pack, "float32"),
    "bfloat16, F.linear": (lambda weight: plain(weight.bfloat16()), "bfloat16"),
    "bfloat16, ours": (lambda weight: pack(weight.bfloat16()), "bfloat16"),
    "int8, ours, float32 rows": (lambda weight: round_weight(weight, 8), "float32"),
    "int8, ours, bfloat16 rows": (lambda weight: round_weight(weight, 8), "bfloat16"),
    "int8, ours, bfloat16 rows as they are": (lambda weight: round_weight(weight, 8, rounds=False), "bfloat16"),
    "Q8_0, ours, bfloat16 rows": (partial(blocks, "Q8_0", 32, 34), "bfloat16"),
    "int4, ours, float32 rows": (lambda weight: round_weight(weight, 4), "float32"),
    "int4, ours, bfloat16 rows": (lambda weight: round_weight(weight, 4), "bfloat16"),
    "int4, ours, bfloat16 rows as they are": (lambda weight: round_weight(weight, 4, rounds=False), "bfloat16"),
    "Q4_K, ours, bfloat16 rows": (partial(blocks, "Q4_K", 256, 144), "bfloat16"),
    "Q6_K, ours, bfloat16 rows": (partial(blocks, "Q6_K", 256, 210), "bfloat16"),
}


class Linears:
    """All linear layers of one model in one way; each call is one pass, over the next copy of the weights."""

    def __init__(self, sizes: list[tuple[int, int]], make: Make, dtype: torch.dtype) -> None:
        self.sizes, self.dtype = sizes, dtype
        copies = [self._layers(make)]
        self.bytes = sum(_bytes(layer) for layer in copies[0])
        copies += [self._layers(make) for _ in range(-(-LEAST_BYTES // self.bytes) - 1)]
        self._copies, self._turn = copies, cycle(copies)
        self._rows: dict[tuple[int, int], Tensor] = {}

    def _layers(self, make: Make) -> torch.nn.ModuleList:
        weights = {size: torch.randn(size) / size[1] ** 0.5 for size in set(self.sizes)}
        return torch.nn.ModuleList(make(weights[size].clone()) for size in self.sizes)

    def __call__(self, rows: int) -> None:
        for layer, (_, inputs) in zip(next(self._turn), self.sizes, strict=True):
            layer(self._input(rows, inputs))

    def _input(self, rows: int, inputs: int) -> Tensor:
        if (rows, inputs) not in self._rows:
            self._rows[rows, inputs] = torch.randn(rows, inputs).to(self.dtype)
        return self._rows[rows, inputs]


def _bytes(layer: torch.nn.Module) -> int:
    return sum(one.nbytes for one in (*layer.parameters(), *layer.buffers()))


def linears(name: str, counts: Sequence[int], repeats: int, wanted: str) -> None:
    """Prints the table of one model."""
    shapes = MODELS[name]
    ways: dict[str, Linears] = {}
    for way, (make, dtype) in WAYS.items():
        if "_K" in way and shapes.hidden % 256:
            continue  # such blocks have 256 weights
        if wanted in way:
            ways[way] = Linears(shapes.linears, make, FLOATS[dtype])
    buffer = torch.ones(BUFFER_BYTES // 4)
    watch = Watch()
    with torch.inference_mode():
        systems: dict[str, Callable[[int], object]] = {"reading": lambda _: buffer.sum(), **ways}
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


@dataclass(frozen=True)
class Heads:
    """Heads of queries, of keys, and the width of one."""

    queries: int
    keys: int
    width: int


HEADS = {
    "SmolLM2-135M": Heads(9, 3, 64),
    "pair": Heads(4, 4, 64),
    "Whisper base": Heads(8, 8, 64),
    "32 heads in 8 groups": Heads(32, 8, 128),
}
# Rows, tokens of each, columns that the last one sees.
CONTEXTS = [(1, 1, 100), (1, 1, 1500), (1, 1, 4000), (1, 8, 500), (1, 64, 1500), (8, 1, 500), (16, 4, 500),
            (1, 500, 500), (1, 2000, 2000)]  # fmt: skip
CACHE_BYTES = 64 << 20  # of all copies together


class Attention:
    """One layer in one way; each call is over the next copy of the cache."""

    def __init__(self, heads: Heads, dtype: torch.dtype, run: Callable[..., Tensor]) -> None:
        self.heads, self.dtype, self.run = heads, dtype, run
        self._made: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor, Iterator[Tensor]]] = {}

    def __call__(self, context: tuple[int, int, int]) -> None:
        queries, nodes, mask, turn = self._inputs(context)
        self.run(queries, *next(turn), nodes, mask, self.heads)

    def _inputs(self, context: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor, Iterator[Tensor]]:
        if context not in self._made:
            rows, tokens, columns = context
            cache = 2, rows, self.heads.keys, columns, self.heads.width
            copies = max(1, CACHE_BYTES // (math.prod(cache) * self.dtype.itemsize))
            ends = [columns - tokens + i + 1 for i in range(tokens)]
            nodes = torch.tensor([[row, end - 1, 0, end] for row in range(rows) for end in ends], dtype=torch.int32)
            mask = (torch.arange(columns) < nodes[:, 3:]).view(rows, 1, tokens, columns)
            queries = torch.randn(1, self.heads.queries, rows * tokens, self.heads.width).to(self.dtype)
            caches = torch.randn(copies, *cache).to(self.dtype)
            self._made = {context: (queries, nodes, mask, cycle(caches))}  # of one context at a time
        return self._made[context]


def ours(queries: Tensor, keys: Tensor, values: Tensor, nodes: Tensor, mask: Tensor, heads: Heads) -> Tensor:
    return attend(queries, keys, values, nodes, heads.width**-0.5)


def torchs(queries: Tensor, keys: Tensor, values: Tensor, nodes: Tensor, mask: Tensor, heads: Heads) -> Tensor:
    """Its `scaled_dot_product_attention`, as models call it."""
    rows, group = len(keys), heads.queries // heads.keys
    of_rows = queries.view(heads.queries, rows, -1, heads.width).transpose(0, 1)
    if group > 1:
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(of_rows, keys, values, mask).transpose(1, 2).contiguous()


def attention(name: str, repeats: int, wanted: str) -> None:
    """Prints the table of one model."""
    heads, rows = HEADS[name], []
    for dtype in FLOATS:
        ways = {f"{dtype}, {way}": Attention(heads, FLOATS[dtype], run)
                for way, run in (("ours", ours), ("torch", torchs)) if wanted in f"{dtype}, {way}"}  # fmt: skip
        cells: dict[str, list[str]] = {way: [] for way in ways}
        for context in CONTEXTS:
            with torch.inference_mode():
                seconds = interleaved(ways, [context], repeats, Watch(), warm_up=True)
            for way, (times,) in seconds.items():
                cells[way].append(f"{median(times) * 1e6:.0f}")
        rows += [[way, *found] for way, found in cells.items()]
    columns = [f"{rows} x {tokens} of {columns}" for rows, tokens, columns in CONTEXTS]
    print(f"\n{name}: rows x tokens of columns\n")
    print(table(["us", *columns], rows), flush=True)


PROMPTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8-weight": {"dtype": "bfloat16", "quantization": "int8-weight"},
    "int4-weight": {"dtype": "bfloat16", "quantization": "int4-weight"},
}


def prompts(name: str, counts: Sequence[int], repeats: int, wanted: str) -> None:
    """Prints a table for each kind of weights."""
    for kind, how in PROMPTS.items():
        possible = ("packed",) if kind == "int4-weight" else ("eager", "packed")
        backends = [backend for backend in possible if wanted in f"{kind}, {backend}"]
        if not backends:
            continue
        given = torch.randint(1000, 40000, (1, max(counts)), generator=torch.Generator().manual_seed(0))
        theirs = AutoModelForCausalLM.from_pretrained(name, dtype=FLOATS[how["dtype"]]).eval()
        systems: dict[str, Callable[[int], object]] = {"transformers": partial(read_theirs, theirs, given)}
        for backend in backends:
            generator = SpecGenerator.from_pretrained(name, backend=backend, **how)
            systems[backend] = partial(read, generator.target.session(), given[0].tolist())
        with torch.inference_mode():
            for system in systems.values():
                for count in counts:
                    system(count)
            seconds = interleaved(systems, counts, repeats, Watch())
        rows = []
        for system_name, times in seconds.items():
            pairs = zip(times, seconds["transformers"], strict=True)
            cells = [f"{median(own) * 1e3:.0f}, {ratio([[x] for x in own], [[x] for x in other]):.2f}"
                     for own, other in pairs]  # fmt: skip
            rows.append([system_name, *cells])
        print(f"\n{kind}\n\n" + table(["ms, share", *(f"{count} tokens" for count in counts)], rows), flush=True)


def read_theirs(model: Any, tokens: Tensor, count: int) -> Tensor:
    """The same as transformers reads prompts."""
    logits: Tensor = model(tokens[:, :count], use_cache=True, logits_to_keep=1).logits
    return logits


def read(session: Session, tokens: list[int], count: int) -> Tensor:
    """The logits after the first `count` tokens, in one pass of a session that has read others before."""
    row = session.add()
    logits = session.run([Work.text(row, tokens[:count])])[0].logits
    session.remove([row])
    return logits


def main() -> None:
    """Prints one table per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--linears", action="store_true")
    what.add_argument("--attention", action="store_true")
    what.add_argument("--prompts", metavar="MODEL")
    parser.add_argument("--models", nargs="+", choices=[*MODELS, *HEADS], help="all by default")
    parser.add_argument("--rows", nargs="+", type=int, help="or tokens of a prompt")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--ways", default="", help="only those with this in their name; all of Qwen2.5-1.5B take 28 GB")
    given = parser.parse_args()
    if missing := lack():
        parser.error(f"there are no kernels: {missing}")
    found = provenance()
    print(f"{found['processor']}, {found['threads']} threads, torch {found['versions']['torch']}")
    if given.prompts:
        return prompts(given.prompts, given.rows or [128, 512, 1024], given.repeats, given.ways)
    for name in given.models or (MODELS if given.linears else HEADS):
        if given.linears:
            linears(name, given.rows or [1, 2, 4, 8, 16, 32, 64], given.repeats, given.ways)
        else:
            attention(name, given.repeats, given.ways)


if __name__ == "__main__":
    main()
