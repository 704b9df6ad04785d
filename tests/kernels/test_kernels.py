"""Packed linear layers: right, independent of their neighbours bit for bit, and built once."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.kernels import PackedLinear, build, ops, pack, round_weight
from specdec.kernels.ops import keep_top
from specdec.kernels.packed_linear import measure_ways
from specdec.kernels.quantized import Quantized
from tests.kernels.packing import pack_any
from tests.kernels.rounding import to_int4, to_int8
from tests.kernels.test_attention import refused
from tests.tiny import threads

HOME = build.folder()  # before tests get a home of their own
ROOT = Path(build.__file__).parents[2]
FLOATS, HALVES = torch.float32, torch.bfloat16
# What is packed, by which options, and the rows that go with it.
CASES = [
    ("float32", {}, FLOATS),
    ("bfloat16", {}, HALVES),
    *[("int8", {"grouped": grouped}, dtype) for grouped in (False, True) for dtype in (FLOATS, HALVES)],
    *[("int4", {"mins": mins}, dtype) for mins in (False, True) for dtype in (FLOATS, HALVES)],
    *[(kind, {"multiples": True}, dtype) for kind in ("int8", "int4") for dtype in (FLOATS, HALVES)],
]
SHAPES = [(1, 1), (31, 7), (33, 129), (65, 200), (100, 576)]  # outputs, inputs
cases = pytest.mark.parametrize(("kind", "options", "dtype"), CASES)


@pytest.fixture(scope="module", autouse=True)
def _library() -> Iterator[None]:
    """The library of this machine, built once and kept where users have it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_KERNELS", str(HOME))
        if missing := build.lack():
            pytest.skip(str(missing))
        yield


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = FLOATS) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int8_in_groups(weight: Tensor) -> Quantized:
    """8 bits with a scale per group, as GGUF's Q8_0: levels of four bits, spread."""
    four = to_int4(weight)
    return replace(four, values=four.values * 16 - 128, bits=8, scales=four.scales.clamp(min=2**-9), mins=None)


def rounded(
    weight: Tensor, kind: str, grouped: bool = False, mins: bool = True, multiples: bool = False
) -> Tensor | Quantized:
    """A weight as it is packed; the mins of four bits can be left out, as GGUF's Q4_0 has none, or be `multiples` of
    the scales, as GPTQ and AWQ have them."""
    if multiples:
        whole = int8_in_groups(weight) if kind == "int8" else to_int4(weight)
        source = torch.Generator().manual_seed(0)
        mins = torch.randint(-20, -16, whole.scales.shape, dtype=torch.int8, generator=source)
        return replace(whole, mins=mins, scales=whole.scales.clamp(min=2**-9))
    if kind == "int8":
        return int8_in_groups(weight) if grouped else to_int8(weight)
    if kind == "int4":
        found = to_int4(weight)
        return found if mins else replace(found, mins=None, scales=found.scales.clamp(min=2**-9))
    return weight.to(getattr(torch, kind))


def layer_of(kind: str, options: dict, outputs: int, inputs: int, *, bias: bool = True) -> PackedLinear:
    weight = rounded(numbers(outputs, inputs), kind, **options)
    layer = pack(weight, numbers(outputs, seed=1) if bias else None, rounds=False)
    assert isinstance(layer, PackedLinear)
    layer.way = ops.ALIKE
    return layer


def product(x: Tensor, layer: PackedLinear) -> tuple[Tensor, Tensor]:
    """What a layer computes, in float64, and the sum of its products' sizes."""
    parts = [None if one is None else one.double() for one in (x, layer.weight(), layer.bias)]
    return F.linear(*parts), F.linear(*(None if one is None else one.abs() for one in parts))


@cases
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products(kind: str, options: dict, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    """Every kind equals float64 up to the rounding of its rows, for odd sizes and 1 to 70 rows."""
    for bias in (False, True):
        layer = layer_of(kind, options, outputs, inputs, bias=bias)
        x = numbers(70, inputs, seed=2, dtype=dtype)
        exact, size = product(x, layer)
        for rows in (1, 2, 5, 12, 13, 70):
            y = layer(x[:rows])
            assert y.dtype == dtype
            assert ((y - exact[:rows]).abs() / size[:rows]).max() < (2e-6 if dtype == FLOATS else 4e-3)


@cases
def test_rows_do_not_see_their_neighbours(kind: str, options: dict, dtype: torch.dtype) -> None:
    """A row's result is the same, bit for bit, alone, at any place, among any number of rows and on any threads."""
    layer, x = layer_of(kind, options, 100, 2500), numbers(140, 2500, seed=3, dtype=dtype)
    alone = torch.cat([layer(row[None]) for row in x[:70]])
    for count in (1, 2, 3):
        with threads(count):
            for begin, end in ((0, 2), (1, 4), (3, 11), (0, 12), (5, 18), (0, 33), (6, 70), (0, 70)):
                assert torch.equal(layer(x[begin:end]), alone[begin:end])
            assert torch.equal(layer(x)[:70], alone)  # more than are summed up at a time
            assert torch.equal(layer(x.flip(0))[-70:].flip(0), alone)


@pytest.mark.parametrize("rounds", [False, True])
@cases
def test_experts(kind: str, options: dict, dtype: torch.dtype, rounds: bool) -> None:
    """Each row by the weight of its expert: bit for bit what a layer of that expert's weight alone gives."""
    weights, biases = [numbers(40, 200, seed=seed) for seed in range(5)], numbers(5, 64, seed=9)
    stacked = torch.cat([F.pad(weight, (0, 0, 0, 24)) for weight in weights])
    all_experts = pack(rounded(stacked, kind, **options), biases.flatten(), rounds=rounds)
    all_experts.way = ops.ALIKE
    x, experts = numbers(30, 200, seed=6, dtype=dtype), torch.randint(1, 5, (30,))
    whole = all_experts(x).view(30, 5, 64)[torch.arange(30), experts, :40]
    assert torch.equal(all_experts.of_experts(x, experts, 40), whole)
    assert torch.equal(all_experts.of_experts(x[7:8], experts[7:8], 40), whole[7:8])
    assert all_experts.of_experts(x[:0], experts[:0], 40).shape == (0, 40)
    for wrong in (experts + 1, experts - 5, experts[1:], experts.int()):
        refused("experts", lambda wrong=wrong: all_experts.of_experts(x, wrong, 40))
    refused("x", lambda: all_experts.of_experts(x[0], experts, 40))
    refused("weight", lambda: all_experts.of_experts(x[:, :150], experts, 40))


@cases
def test_weight_comes_back(kind: str, options: dict, dtype: torch.dtype) -> None:
    """Packed weights come back exactly, integers as they were rounded; looked up rows agree."""
    layer, weight = layer_of(kind, options, 77, 203), rounded(numbers(77, 203), kind, **options)
    expected = weight.weight() if isinstance(weight, Quantized) else weight
    assert torch.equal(layer.weight(), expected)
    ids = torch.tensor([[0, 76, 31], [32, 5, 5]])
    assert torch.equal(layer.rows(ids), expected[ids])
    assert (layer.table is None) == (kind in ("int8", "int4"))
    if (table := layer.table) is not None:
        looked_up = [table[i // table.shape[1], i % table.shape[1]].flatten()[:203] for i in ids.flatten().tolist()]
        assert torch.equal(torch.stack(looked_up), expected[ids].flatten(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_within_other_tensors(dtype: torch.dtype) -> None:
    """A weight may begin anywhere in its memory, and be transposed."""
    whole = numbers(64 * 96 + 1, dtype=dtype)
    for weight in (whole[:-1].view(64, 96), whole[1:].view(64, 96), whole[1:].view(96, 64).T):
        assert torch.equal(pack(weight).weight(), weight)


def test_a_default_dtype_or_device_changes_no_layer() -> None:
    """Packed weights are on the CPU, and biases in float32. (Joined layers raised from then on.)"""
    layers = [pack(numbers(32, 40), bias) for bias in (numbers(32), None)]
    x, expected = numbers(3, 40), layers[0].weight()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            joint, found = PackedLinear.join(layers), layers[0].weight()
            measure_ways.cache_clear()
            measure_ways("float32", False, False)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
    assert torch.equal(joint(x), torch.cat([layer(x) for layer in layers], -1))


def test_what_is_fastest_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process multiplies alike. (Each measured anew, so a text in bfloat16 was another one from run to run.)"""
    monkeypatch.setenv("SPECDEC_KERNELS", str(tmp_path))
    numbers = iter([[7, 9], [5, 8], [4, 6]])
    kept = [build.measured("floats", 2, lambda: next(numbers)) for _ in range(2)]
    [file] = tmp_path.iterdir()
    file.write_text("[7")
    kept += [build.measured("floats", 2, lambda: next(numbers)) for _ in range(2)]
    assert kept == [[7, 9], [7, 9], [5, 8], [5, 8]]
    monkeypatch.setenv("SPECDEC_KERNELS", str(file / "no folder"))
    assert build.measured("floats", 2, lambda: next(numbers)) == [4, 6]


def test_rows_with_nan_or_infinity_stay() -> None:
    """Top-k and top-p leave them to their callers."""
    rows = torch.tensor([[torch.inf, 1.0, 2.0], [torch.nan, 1.0, 2.0], [-torch.inf] * 3, [1.0, 3.0, 2.0]])
    for k, p in ((1, 1.0), (0, 0.5), (2, 0.5)):
        kept = keep_top(rows, k, p, 1)
        assert kept[:3].nan_to_num(7).equal(rows[:3].nan_to_num(7))
        assert kept[3].isfinite().sum() == 1


def test_memory() -> None:
    """A packed weight takes at most a tenth more than the plain one of its kind."""
    for kind, bits in (("float32", 32), ("bfloat16", 16), ("int8", 8), ("int4", 5)):
        layer = layer_of(kind, {}, 576, 1536, bias=False)
        assert sum(buffer.nbytes for buffer in layer.buffers()) <= 1.1 * 576 * 1536 * bits / 8


def test_rounding() -> None:
    """The error of rounded weights is that of their levels, whatever their size."""
    for scale in (1e-15, 1.0, 1e15):
        weight = numbers(40, 96) * scale
        for integers, most in ((to_int8(weight), 0.02), (to_int4(weight), 0.09)):
            assert (integers.weight() - weight).norm() / weight.norm() < most
    assert not to_int4(torch.zeros(3, 40)).weight().any()
    assert not to_int8(torch.zeros(3, 40)).weight().any()


@pytest.mark.parametrize("dtype", [FLOATS, HALVES])
@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES, (70, 1000)])
def test_rounding_is_as_in_torch(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """8 bits to the last one; 4 bits but for ranges of equal error, which sums in another order tell apart.

    The last group counts the inputs that it has. A packed layer's weight is rounded alike.
    """
    weight = numbers(outputs, inputs, dtype=dtype)
    weight[0] = 0
    for bits, expected in ((8, to_int8(weight.float()).weight()), (4, to_int4(weight.float()).weight())):
        layer = round_weight(weight, bits)
        rounded, whole = layer.weight(), inputs // 32 * 32 if bits == 4 else inputs
        assert (rounded != expected)[:, :whole].float().mean() < (1e-9 if bits == 8 else 0.02) or not whole
        assert (rounded - weight).norm() <= (expected - weight).norm() * (1 + 1e-3) + 1e-6
        again = round_weight(pack(weight), bits)
        assert all(map(torch.equal, layer.buffers(), again.buffers()))
        assert torch.equal(round_weight(layer, bits).weight(), round_weight(rounded, bits).weight())


@cases
def test_operators_keep_their_promises(kind: str, options: dict, dtype: torch.dtype) -> None:
    """Schemas agree with what the operators do."""
    layer = layer_of(kind, options, 40, 72)
    held = layer.packed, layer.factors, layer.scales, layer.mins
    torch.library.opcheck(
        ops.packed_linear, (numbers(2, 3, 72, dtype=dtype), *held, layer.bias, 40), test_utils="test_schema"
    )
    if kind in ("int8", "int4"):
        whole = layer.packed, layer.high, layer.factors, layer.scales, layer.mins, layer.steps, layer.levels
        torch.library.opcheck(
            ops.dots, (numbers(2, 3, 72, dtype=dtype), *whole, layer.bias, 40), test_utils="test_schema"
        )


def test_any_shape() -> None:
    """Leading dimensions stay, none of them may be empty or missing; rows need not be contiguous."""
    layer = layer_of("float32", {}, 40, 72)
    x = numbers(2, 3, 72)
    assert torch.equal(layer(x), layer(x.flatten(0, 1)).view(2, 3, 40))
    assert torch.equal(layer(x[0, 0]), layer(x)[0, 0])
    assert layer(x[:0]).shape == (0, 3, 40)
    turned = numbers(72, 5).T
    assert torch.equal(layer(turned), layer(turned.contiguous()))


@cases
def test_tiles(kind: str, options: dict, dtype: torch.dtype) -> None:
    """Tiles, emulated where the processor has none, compute the same for 1 to 48 rows, each alone and among others."""
    for outputs, inputs in SHAPES:
        layer = layer_of(kind, options, outputs, inputs)
        if not tiled(layer, dtype):
            refused("way", lambda layer=layer: layer(numbers(1, layer.inputs, dtype=dtype)))
            continue
        x = numbers(48, inputs, seed=2, dtype=dtype)
        exact, size = product(x, layer)
        y = layer(x)
        assert ((y - exact).abs() / size).max() < 4e-3
        for rows in range(1, 48):
            assert torch.equal(layer(x[:rows]), y[:rows])
            assert torch.equal(layer(x[rows:]), y[rows:])


def tiled(layer: PackedLinear, dtype: torch.dtype) -> bool:
    """Whether rows of this dtype go through tiles, as the layer multiplies from now on."""
    kind = build.instructions()
    if not (ops.has_tiles() if "amx_tile" in kind else "avx512_bf16" in kind):
        pytest.skip("this processor does not multiply pairs of bfloat16")
    layer.way = ops.TILES
    return dtype == HALVES


def test_many_rows_by_tiles() -> None:
    """More rows and columns than are summed up at a time."""
    layer = layer_of("int8", {"grouped": True}, 40, 1200)
    x = numbers(300, 1200, dtype=HALVES)
    expected = F.linear(x.float(), layer.weight(), layer.bias)
    assert tiled(layer, HALVES)
    torch.testing.assert_close(layer(x).float(), expected, rtol=2e-2, atol=2e-1)
    assert torch.equal(layer(x[255:258]), layer(x)[255:258])


@cases
def test_unpacked(kind: str, options: dict, dtype: torch.dtype) -> None:
    """A product over the unpacked weight is torch's own."""
    for outputs, inputs in SHAPES:
        layer, x = layer_of(kind, options, outputs, inputs), numbers(5, inputs, seed=2, dtype=dtype)
        expected = F.linear(x, layer.weight().to(dtype), layer.bias.to(dtype))
        layer.way = ops.UNPACKED
        exact = {"rtol": 0, "atol": 0} if kind in ("float32", "bfloat16") else {}
        torch.testing.assert_close(layer(x), expected, **exact)


def test_the_fastest_way() -> None:
    """From a measured number of rows on, rows are multiplied in the other way; layers that must be alike are not."""
    layer, x = layer_of("int8", {}, 40, 72), numbers(65, 72)
    ways = {way: ops.packed_linear(x, layer.packed, layer.factors, None, None, layer.bias, 40, way)
            for way in (ops.VECTORS, ops.UNPACKED)}  # fmt: skip
    never = 2**63 - 1
    ops.set_ways(torch.int8, False, True, never, 65)
    try:
        layer.way = ops.FASTEST
        assert torch.equal(layer(x), ways[ops.UNPACKED])
        assert torch.equal(layer(x[:64]), ways[ops.VECTORS][:64])
        layer.way = ops.ALIKE
        assert torch.equal(layer(x), ways[ops.VECTORS])
    finally:
        ops.set_ways(torch.int8, False, True, never, never)


def test_wrong_operands() -> None:
    """The operator itself refuses what does not fit, before it reads memory that is not there."""
    layer = layer_of("int8", {"grouped": True}, 40, 72)
    right = {
        "x": numbers(2, 72), "weight": layer.packed, "factors": layer.factors, "scales": layer.scales, "mins": None,
        "bias": layer.bias, "outputs": 40,
    }  # fmt: skip
    wrong = {
        "x": torch.tensor(1.0), "weight": layer.packed[:1], "factors": numbers(39),
        "scales": layer.scales.float(), "mins": numbers(2, 3, 31).half(), "bias": numbers(80)[::2],
    }  # fmt: skip
    ops.packed_linear(*right.values())
    refused("x", lambda: ops.packed_linear(numbers(2, 72).double(), *[*right.values()][1:]))
    for name, value in wrong.items():
        refused(name, lambda arguments={**right, name: value}: ops.packed_linear(*arguments.values()))
    turned = layer.packed.transpose(2, 3).contiguous().transpose(2, 3)
    refused("weight", lambda: ops.packed_linear(*{**right, "weight": turned}.values()))


# Weights as GGUF has them: bits, inputs of a scale, whether there are mins, steps and levels.
FORMS = [
    (8, 32, ""), (8, 32, "scales"), (4, 32, "scales"), (4, 32, "scales mins"), (4, 32, "bfloat16 levels"),
    (4, 32, "levels steps"), (4, 32, "mins steps"), *[(bits, 32, "scales mins multiples") for bits in (4, 8)],
    (4, 16, "mins steps"), (4, 16, "steps"), (5, 32, "scales"),
    (5, 32, "scales mins"), (5, 32, "mins steps"), (6, 16, "steps"),
]  # fmt: skip
forms = pytest.mark.parametrize(("bits", "part", "words"), FORMS)


def integers(bits: int, part: int, words: str, outputs: int, inputs: int) -> Quantized:
    """A random weight of this form."""
    source = torch.Generator().manual_seed(bits)

    def some(least: int, most: int, *shape: int) -> Tensor:
        return torch.randint(least, most, shape, dtype=torch.int8, generator=source)

    least = -127 if bits == 8 else 0
    given: dict[str, Tensor] = {
        "factors": numbers(outputs, seed=3),
        "values": some(least, min(2**bits, 127), outputs, inputs),
    }
    shape = outputs, -(-inputs // part)
    if "levels" in words:
        given["levels"] = some(-127, 127, 16)
    if "steps" in words:
        given |= {"scales": some(-32, 32, *shape), "steps": numbers(outputs, inputs // 256, 2).half()}
    elif words:
        given["scales"] = numbers(*shape).to(torch.bfloat16 if "bfloat16" in words else torch.float16)
    if "mins" in words:
        are_small = "steps" in words or "multiples" in words
        given["mins"] = some(0, 64, *shape) if are_small else numbers(*shape, seed=4).half()
    return Quantized(bits=bits, **given)


def in_eight_bits(x: Tensor) -> Tensor:
    """Rows as the kernels round them: in groups of 32, each with its scale, in float64."""
    groups = F.pad(x.float(), (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    largest = groups.abs().amax(2, keepdim=True)
    steps = (groups * torch.where(largest > 0, 127 / largest, 0)).round()
    return (steps.double() * (largest / 127).double()).flatten(1)[:, : x.shape[1]]


@forms
@pytest.mark.parametrize("dtype", [FLOATS, HALVES])
def test_integer_products(bits: int, part: int, words: str, dtype: torch.dtype) -> None:
    """They equal float64 over the rounded rows, each row bit for bit alone and among others, for all widths and tails;
    weights and looked up rows come back exactly."""
    for outputs, inputs in ((40, 512), (65, 256)) if "steps" in words else ((33, 129), (64, 72), (31, 7)):
        weight = integers(bits, part, words, outputs, inputs)
        layer = pack_any(weight, numbers(outputs, seed=1))
        expected, ids = weight.weight(), torch.tensor([outputs - 1, 0, 5])
        assert torch.equal(layer.weight(), expected)
        assert torch.equal(layer.rows(ids), expected[ids])
        x = numbers(70, inputs, seed=2, dtype=dtype)
        x[3] = 0
        rows = in_eight_bits(x)
        parts = rows, expected.double(), layer.bias.double()
        exact, size = F.linear(*parts), F.linear(*(one.abs() for one in parts))
        if "mins" in words:  # of which products may be larger than their sum
            least = replace(weight, mins=torch.zeros_like(weight.mins)).weight()
            size += F.linear(rows.abs(), (least - expected).abs().double())
        alone = torch.cat([layer(row[None]) for row in x])
        assert alone.dtype == dtype
        assert ((alone - exact).abs() / size).max() < (2e-6 if dtype == FLOATS else 4e-3)
        for count in (2, 3, 4, 5, 8, 9, 11, 16, 17, 70):
            assert torch.equal(layer(x[:count]), alone[:count])
            assert torch.equal(layer(x[70 - count :]), alone[70 - count :])


@forms
def test_integer_products_on_any_threads(bits: int, part: int, words: str) -> None:
    layer, x = pack_any(integers(bits, part, words, 200, 1024)), numbers(140, 1024, dtype=HALVES)
    expected = layer(x)
    for count in (1, 2, 3):
        with threads(count):
            assert torch.equal(layer(x), expected)
            assert torch.equal(layer(x.flip(0)).flip(0), expected)


@forms
@pytest.mark.parametrize("dtype", [FLOATS, HALVES])
def test_likely_outputs_first(bits: int, part: int, words: str, dtype: torch.dtype) -> None:
    """A row that one of them is sure for gets -inf for the others; else nothing changes, whatever is beside it."""
    layer = pack_any(integers(bits, part, words, 200, 512))
    x = numbers(6, 512) * torch.tensor([0.0, 1e3, 0.0, 1e4, 0.0, 1.0])[:, None]
    whole = layer(x.to(dtype))
    layer.likely = 64
    sure = whole[:, :64].float().softmax(1).amax(1) >= 0.9
    assert sure.any()
    assert not sure.all()
    expected = whole.clone()
    expected[sure, 64:] = -torch.inf
    assert torch.equal(layer(x.to(dtype)), expected)
    assert torch.equal(torch.stack([layer(row) for row in x.to(dtype)]), expected)


def test_wrong_integers() -> None:
    """The operator refuses what does not fit, before it reads memory that is not there."""
    layer = pack_any(integers(5, 32, "mins steps", 40, 256))
    names = "weight", "high", "factors", "scales", "mins", "steps", "levels"
    held = {"weight": layer.packed} | {name: getattr(layer, name) for name in names[1:]}
    right: dict[str, Any] = {"x": numbers(2, 256), **held, "bias": None, "outputs": 40}
    wrong = {
        "x": torch.tensor(1.0), "weight": layer.packed[:1], "high": layer.high[:, :1], "factors": numbers(39),
        "scales": layer.scales.float(), "mins": layer.mins[:1], "steps": layer.steps[:, :0], "bias": numbers(80)[::2],
        "levels": torch.zeros(16, dtype=torch.int8),
    }  # fmt: skip
    ops.dots(*right.values())
    for likely in (-32, 16, 64):
        refused("likely", lambda likely=likely: ops.dots(*right.values(), likely=likely))
    refused("x", lambda: ops.dots(*{**right, "x": right["x"].double()}.values()))
    for name, value in wrong.items():
        refused(name, lambda arguments={**right, name: value}: ops.dots(*arguments.values()))


def run(code: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    known = {**os.environ, "SPECDEC_KERNELS": str(folder), "PYTHONPATH": str(ROOT), **environment}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], env=known, **pipes)


PACKS = """import torch; from specdec.kernels import *
for _ in "ab": print(available() and pack(torch.eye(3))(torch.ones(3)).sum())"""


@pytest.fixture
def compiler(tmp_path: Path) -> Callable[..., str]:
    """Makes a program of shell lines that is called as a compiler is, with `$made` for what it shall make."""

    def make(*lines: str) -> str:
        path = tmp_path / "compiler"
        head = 'while [ "$1" != -o ]; do shift; done; made=$2'
        path.write_text("\n".join(("#!/bin/sh", head, *lines)))
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def copying(compiler: Callable[..., str], tmp_path: Path) -> str:
    """A compiler that copies this machine's library, and notes that it was called."""
    library = HOME / f"kernels-{build.digest()}.so"
    return compiler(
        f'case $made in *.so) echo call >> {tmp_path / "calls"}; sleep ${{PAUSE:-0}}; cp {library} "$made";; esac'
    )


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> Callable[..., list[str]]:
    """What a process says that asks twice for the library, with these variables, and gets it or not."""
    monkeypatch.setenv("SPECDEC_KERNELS", str(tmp_path / "kernels"))
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)  # it is loaded already
    lack = build._lack.__wrapped__

    def ask(*, gets_it: bool = False, **environment: str) -> list[str]:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(build, "_lack", cache(lack))  # as in a new process
        build._report.cache_clear()
        caplog.clear()
        assert [build.available() for _ in "ab"] == [gets_it, gets_it]
        return [*caplog.messages]

    return ask


def test_a_build_that_fails(compiler: Callable[..., str], told: Callable[..., list[str]], tmp_path: Path) -> None:
    """What the compiler said first is told once, with the way out; a compiler that has not changed is not asked again.

    (Every process said that it was building for 20 seconds, and never that this failed.)
    """
    folder, calls = tmp_path / "kernels", tmp_path / "calls"
    complains = f"echo call >> {calls}; echo 'linear.cpp:1: error: no such thing' >&2; exit 1"
    building, missing = told(CXX=compiler(complains))
    assert building.startswith("building kernels")
    assert re.search(r"no kernels.*slower.*no such thing.*: mend it, or name another compiler in CXX", missing)
    asked = calls.read_text()
    assert told() == [missing]
    assert calls.read_text() == asked
    assert not list(folder.glob("*.so"))
    compiler(complains, "# another release")
    assert told() == [building, missing]
    build.try_again()
    assert told() == [building, missing]
    yesterday = time.time() - 25 * 3600
    [note] = folder.glob("*.failed")
    os.utime(note, (yesterday, yesterday))
    assert told() == [building, missing]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        *(
            ({"CXX": name}, f"CXX names {name}, which is not here: name a C++ compiler, or unset it")
            for name in ("no-such-compiler", "nothing 'here")
        ),
        ({"PATH": "/nowhere"}, "there is no C++ compiler (c++, g++, clang++): apt install g++, or name one in CXX"),
        ({"SPECDEC_KERNELS": "/dev/null/kernels"}, "/dev/null/kernels cannot be written to (Not a directory): change"),
    ],
)
def test_one_line_says_what_is_missing(environment: dict[str, str], words: str, told: Callable[..., list[str]]) -> None:
    """Where kernels were wanted, once in a process, and each time with the way out. (Nothing was said.)"""
    [line] = told(**environment)
    assert line.startswith(f"no kernels, so passes and sampling on the CPU are slower: {words}")


def test_a_compiler_with_arguments(copying: str, told: Callable[..., list[str]], tmp_path: Path) -> None:
    """As of `ccache g++`. (It was said not to be here.)"""
    told(gets_it=True, CXX=f"env MORE=1 {copying}")
    assert (tmp_path / "calls").read_text() == "call\n"


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_compilers_end_with_the_program(sig: signal.Signals, compiler: Callable[..., str], tmp_path: Path) -> None:
    """And so do the processes that they began. (After SIGTERM six compilers ran on, and Ctrl-C waited for all.)"""
    pids = tmp_path / "pids"
    endless = compiler("sleep 300 &", f"echo $$ $! >> {pids}", "wait")
    # Shells have programs in the background ignore Ctrl-C, which the programs that they start inherit.
    interruptible = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    process = run(interruptible + PACKS, tmp_path / "kernels", CXX=endless)
    running = list[int]()
    for _ in range(600):
        running = [int(pid) for pid in pids.read_text().split()] if pids.exists() else []
        if len(running) >= 4:
            break
        time.sleep(0.1)
    process.send_signal(sig)
    process.communicate(timeout=60)
    for _ in range(100):
        left = [pid for pid in running if "Z" not in _state(pid)]
        if not left:
            break
        time.sleep(0.1)
    assert (len(running) >= 4, left) == (True, [])


def _state(pid: int) -> str:
    """A process's state; Z where it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


@pytest.mark.slow
def test_two_processes_build_once(copying: str, tmp_path: Path) -> None:
    """Of two processes that need the library at once, one builds it, and the other one waits for it."""
    both = [run(PACKS, tmp_path / "kernels", CXX=copying, PAUSE="1") for _ in range(2)]
    for process in both:
        out, err = process.communicate()
        assert out == "tensor(3.)\n" * 2, err
    assert (tmp_path / "calls").read_text() == "call\n"


def test_a_library_that_was_cut_short(copying: str, told: Callable[..., list[str]], tmp_path: Path) -> None:
    """It is built again. (Every command was killed by SIGBUS.)"""
    told(gets_it=True, CXX=copying)
    [library] = (tmp_path / "kernels").glob("*.so")
    whole = library.read_bytes()
    for broken in (whole[:5000], whole[:5000] + bytes(len(whole) - 5000)):
        library.write_bytes(broken)
        told(gets_it=True)
        assert library.read_bytes() == whole
    assert (tmp_path / "calls").read_text() == "call\n" * 3


def test_a_library_that_is_there_needs_nothing(copying: str, told: Callable[..., list[str]], tmp_path: Path) -> None:
    """No compiler, and no right to write: the lock of a read-only folder cannot be opened."""
    told(gets_it=True, CXX=copying)
    [lock] = (tmp_path / "kernels").glob("*.lock")
    lock.unlink()
    lock.mkdir()
    assert told(gets_it=True, CXX="no-such-compiler") == []


def test_a_library_belongs_to_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other instructions, another torch or another source: another library."""
    known = build.digest()
    assert build.digest() == known
    monkeypatch.setattr(build, "instructions", lambda: "machine: x86_64\nflags: sse2")
    other = build.digest()
    monkeypatch.setattr(torch, "__version__", "2.0.0")
    assert len({known, other, build.digest()}) == 3


@pytest.mark.slow
def test_choices_do_not_depend_on_what_was_loaded() -> None:
    """At the border of a top-p the first call of a process keeps what all later ones keep.

    (Torch's operators filtered and drew until something else had loaded the library: 102 of these 200 rows parted.)
    """
    code = (
        "import torch; from specdec import kernels; from specdec.decoding.processors import Top\n"
        "torch.set_num_threads(1)\n"
        "rows = torch.randn(200, 1, 3000, generator=torch.Generator().manual_seed(0))\n"
        "mass = [row.softmax(-1).double().sort(descending=True).values.cumsum(-1)[0, 99].item() for row in rows]\n"
        "kept = lambda: [Top(p=p)(None, row).isfinite() for row, p in zip(rows, mass)]\n"
        "first = kept(); kernels.available()\n"
        "print(sum(not torch.equal(*pair) for pair in zip(first, kept())))"
    )
    out, err = run(code, HOME).communicate()
    assert out == "0\n", err
