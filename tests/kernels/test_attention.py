"""Attention over a cache: right, and for every token the same bits wherever what it sees may lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specdec.kernels import attend, attend_frames, gelu, store_nodes
from tests.tiny import threads

FLOATS, HALVES = torch.float32, torch.bfloat16
NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.usefixtures("built")
dtypes = pytest.mark.parametrize("dtype", [FLOATS, HALVES])


@dataclass(frozen=True)
class Call:
    """The arguments of `attend`."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    nodes: Tensor
    scale: float = 0.3
    softcap: float = 0.0
    sinks: Tensor | None = None
    biases: Tensor | None = None

    def run(self) -> Tensor:
        """`[tokens, heads, width of a value]`"""
        args = self.queries, self.keys, self.values, self.nodes, self.scale, self.softcap, self.sinks, self.biases
        return attend(*args)[0]

    def of(self, tokens: list[int]) -> Call:
        return replace(self, queries=self.queries[:, :, tokens], nodes=self.nodes[tokens])

    def columns(self, token: int) -> list[int]:
        """What a token sees."""
        _, _, first, base, *words = self.nodes[token].tolist()
        bits = [base + 32 * w + j for w, word in enumerate(words) for j in range(32) if word >> j & 1]
        return [*range(first, base), *bits]

    def exact(self) -> Tensor:
        """In float64, token by token."""
        out = torch.zeros(*self.run().shape, dtype=torch.float64)
        for token in range(len(self.nodes)):
            if columns := self.columns(token):
                out[token] = self._exact(token, columns)
        return out

    def _exact(self, token: int, columns: list[int]) -> Tensor:
        row, group = self.nodes[token, 0], self.queries.shape[1] // self.keys.shape[1]
        keys, values = (side[row][:, columns].double().repeat_interleave(group, 0) for side in (self.keys, self.values))
        scores = (keys @ self.queries[0, :, token].double()[:, :, None])[:, :, 0] * self.scale
        if self.biases is not None:
            distances = torch.arange(len(columns) - 1, -1, -1).clamp(max=self.biases.shape[1] - 1)
            scores = scores + self.biases.double()[:, distances]
        if self.softcap:
            scores = self.softcap * (scores / self.softcap).tanh()
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.double()[:, None]], 1)
        return (scores.softmax(1)[:, None, : len(columns)] @ values)[:, 0]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def word(bits: int) -> int:
    """32 bits as an int32."""
    return bits - (1 << 32) if bits >> 31 else bits


def node(row: int, first: int, base: int, bits: list[int], words: int, column: int = 0) -> list[int]:
    """A line of nodes; `bits` are columns from `base` on."""
    mask = sum(1 << column - base for column in bits)
    return [row, column, first, base, *(word(mask >> 32 * w & 0xFFFFFFFF) for w in range(words))]


def randint(low: int, high: int, random: torch.Generator) -> int:
    """From `low` to `high`, both included."""
    return int(torch.randint(low, high + 1, (), generator=random))


def some(low: int, high: int, share: float, random: torch.Generator) -> list[int]:
    """Some of the numbers from `low` to before `high`."""
    return [n for n in range(low, high) if torch.rand((), generator=random) < share]


@st.composite
def calls(draw: st.DrawFn, dtype: torch.dtype) -> Call:
    """Any shapes, strides, rows, ranges and bits."""
    random = generator(draw(st.integers(0, 2**32)))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rows, capacity, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 200)), draw(st.integers(1, 20))
    width, value_width = (draw(st.sampled_from([1, 7, 8, 12, 20, 32, 64, 80, 96])) for _ in range(2))
    words = draw(st.integers(0, 3))
    lines = []
    for _ in range(tokens):
        first, base = (randint(0, capacity, random) for _ in range(2))
        bits = some(base, min(capacity, base + 32 * words), 0.3, random)
        lines.append(node(randint(0, rows - 1, random), first, base, bits, words))
    if draw(st.booleans()):
        lines.sort()
    queries = torch.randn(1, tokens, kv_heads * group, width + 1, generator=random).to(dtype)[..., 1:].transpose(1, 2)
    keys = torch.randn(rows, capacity, kv_heads, width + 3, generator=random).to(dtype)[..., 2:-1].transpose(1, 2)
    if draw(st.booleans()):  # turned, in a wider buffer
        wider = torch.full((rows, kv_heads, width, capacity + draw(st.sampled_from([0, 3, 64]))), NAN, dtype=dtype)
        wider[..., :capacity] = keys.transpose(2, 3)
        keys = wider[..., :capacity].transpose(2, 3)
    values = torch.randn(rows, kv_heads, capacity, value_width, generator=random).to(dtype)
    softcap = draw(st.sampled_from([0.0, 2.0]))
    sinks = torch.randn(kv_heads * group, generator=random) if draw(st.booleans()) else None
    distances = draw(st.sampled_from([0, 0, 1, 5, 300]))
    biases = torch.randn(kv_heads * group, distances, generator=random) if distances else None
    return Call(queries, keys, values, torch.tensor(lines, dtype=torch.int32), 0.3, softcap, sinks, biases)


def same_bits(a: Tensor, b: Tensor) -> bool:
    integers = torch.int32 if a.dtype == FLOATS else torch.int16
    return a.shape == b.shape and torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def close(result: Tensor, exact: Tensor) -> None:
    near = {"rtol": 1e-5 if result.dtype == FLOATS else 8e-3, "atol": 2e-5}  # scores are some ten in size
    torch.testing.assert_close(result.double(), exact, **near)


def moved(call: Call, token: int, random: torch.Generator) -> Call:
    """One token alone, and what it sees elsewhere: with gaps, as a range and bits, in a buffer of another size."""
    row, columns = int(call.nodes[token, 0]), call.columns(token)
    shared = randint(0, len(columns), random)
    first = randint(0, 40, random)
    base = first + shared
    to = list(range(first, base))
    for _ in columns[shared:]:
        to.append(max(base, to[-1] + 1 if to else 0) + randint(0, 2, random))
    rows, capacity = randint(1, 3, random), max(base, *to, 0) + 1 + randint(0, 30, random)
    new = randint(0, rows - 1, random)
    sides = []
    for side in (call.keys, call.values):
        buffer = torch.full((rows, side.shape[1], capacity, side.shape[3]), NAN, dtype=side.dtype)
        buffer[new][:, to] = side[row][:, columns]
        sides.append(buffer)
    words = max(0, (max(to, default=0) - base) // 32 + 1) + randint(0, 1, random)
    nodes = torch.tensor([node(new, first, base, to[shared:], words)], dtype=torch.int32)
    return Call(call.queries[:, :, [token]], *sides, nodes, call.scale, call.softcap, call.sinks, call.biases)


@dtypes
def test_equals_float64(dtype: torch.dtype) -> None:
    """Whatever the shapes, strides, ranges, bits, bounds, sinks and biases; a token that sees nothing gets zeros."""

    @settings(max_examples=150, deadline=None)
    @given(call=calls(dtype))
    def check(call: Call) -> None:
        close(call.run(), call.exact())

    check()


@dtypes
def test_same_bits_wherever_things_lie(dtype: torch.dtype) -> None:
    """A token gets the same bits among others and alone, whatever gaps lie between what it sees."""

    @settings(max_examples=150, deadline=None)
    @given(call=calls(dtype), seed=st.integers(0, 2**32))
    def check(call: Call, seed: int) -> None:
        random, together = generator(seed), call.run()
        order = torch.randperm(len(call.nodes), generator=random).tolist()
        assert same_bits(call.of(order).run(), together[order])
        for token in order[:4]:
            assert same_bits(call.of([token]).run()[0], together[token])
            assert same_bits(moved(call, token, random).run()[0], together[token])

    check()


@dtypes
def test_unseen_columns_do_not_matter(dtype: torch.dtype) -> None:
    """What one token does not see may be NaN or infinite, also where its neighbours see it."""

    @settings(max_examples=30, deadline=None)
    @given(call=calls(dtype), poison=st.sampled_from([NAN, INF, -INF]))
    def check(call: Call, poison: float) -> None:
        kept = call.run()
        for token in range(min(3, len(kept))):
            row, columns = int(call.nodes[token, 0]), call.columns(token)
            sides = []
            for side in (call.keys, call.values):
                poisoned = torch.full_like(side, poison)
                poisoned[row][:, columns] = side[row][:, columns]
                sides.append(poisoned)
            assert same_bits(replace(call, keys=sides[0], values=sides[1]).run()[token], kept[token])

    check()


def prompt(tokens: int, start: int, dtype: torch.dtype, *, row: int = 0, window: int = 0, width: int = 64) -> Call:
    """Tokens that see what comes before them and themselves, or a window of it."""
    random = generator(tokens)
    queries, keys, values = (
        torch.randn(shape, generator=random).to(dtype)
        for shape in [(1, 6, tokens, width), (2, 2, start + tokens + 5, width), (2, 2, start + tokens + 5, width)]
    )
    ends = [start + i + 1 for i in range(tokens)]
    lines = [[row, end - 1, max(0, end - window) if window else 0, end] for end in ends]
    return Call(queries, keys, values, torch.tensor(lines, dtype=torch.int32))


@dtypes
@pytest.mark.parametrize("window", [0, 50])
def test_prompts(dtype: torch.dtype, window: int) -> None:
    """Tokens in one call get the bits of tokens one by one, in parts, and with any number of threads."""
    call = prompt(150, 70, dtype, row=1, window=window)
    together = call.run()
    close(together, call.exact())
    for count in (1, 2, 3):
        with threads(count):
            assert same_bits(call.run(), together)
            for begin, end in ((0, 1), (3, 5), (17, 60), (60, 150)):
                assert same_bits(call.of(list(range(begin, end))).run(), together[begin:end])


@dtypes
def test_numbers_out_of_bounds(dtype: torch.dtype) -> None:
    """Scores far apart, NaN and infinity in what a token sees: as in float64."""
    call = prompt(3, 40, dtype)
    steep = replace(call, scale=30.0)
    torch.testing.assert_close(steep.run().double(), steep.exact(), rtol=1e-2, atol=1e-3)
    call.values[0, 0, 3, 5] = INF
    call.keys[0, 1, 4, 5] = NAN
    result = call.run()
    assert (result[:, :3, 5] == INF).all()
    assert result[:, :3].isfinite().sum() == result[:, :3].numel() - 9
    assert result[:, 3:].isnan().all()


@dtypes
def test_stored(dtype: torch.dtype) -> None:
    """Every token stands in its row and column, in views too, and nothing else has changed."""
    keys, values = (torch.randn(1, 5, 3, width + 2).to(dtype)[..., 1:-1].transpose(1, 2) for width in (12, 7))
    buffers = [torch.zeros(4, 20, 3, width).to(dtype)[1:, 2:].transpose(1, 2) for width in (12, 7)]
    nodes = torch.tensor([[2, 17, 0, 0], [0, 3, 0, 0], [2, 0, 0, 0], [1, 3, 0, 0], [1, 4, 0, 0]], dtype=torch.int32)
    store_nodes(keys, values, *buffers, nodes[None, None])
    for side, buffer in zip((keys, values), buffers, strict=True):
        expected = torch.zeros_like(buffer)
        for token, (row, column, *_) in enumerate(nodes.tolist()):
            expected[row, :, column] = side[0, :, token]
        assert torch.equal(buffer, expected)


@dtypes
@pytest.mark.parametrize(("frames", "width", "value_width"), [(1, 4, 4), (37, 5, 3), (129, 64, 64), (15, 130, 70)])
def test_frames_see_one_another(dtype: torch.dtype, frames: int, width: int, value_width: int) -> None:
    """As torch's attention, in any layout; a row's result has the same bits beside others and on more threads."""
    noise = torch.Generator().manual_seed(frames)
    sides = [torch.randn(2, frames, 3, wide, generator=noise) for wide in (width, width, value_width)]
    queries, keys, values = (side.to(dtype).transpose(1, 2) for side in sides)
    found = attend_frames(queries, keys, values, 0.2)
    expected = scaled_dot_product_attention(queries.float(), keys.float(), values.float(), scale=0.2).transpose(1, 2)
    tolerance = 1e-5 if dtype == FLOATS else 2e-2
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
    with threads(2):
        assert torch.equal(attend_frames(queries[1:], keys[1:], values[1:].contiguous(), 0.2), found[1:])


@pytest.mark.parametrize("count", [1, 15, 1000])
def test_gelu(count: int) -> None:
    """As torch's, to the last bits of bfloat16, for every number in the range and in any layout."""
    x = torch.linspace(-9, 9, 2 * count, device="cpu").bfloat16()[::2]
    wide = torch.nn.functional.gelu(x.float())
    torch.testing.assert_close(gelu(x).float(), wide, rtol=8e-3, atol=1e-4)
    assert torch.equal(gelu(x[-1:]), gelu(x)[-1:])
    with pytest.raises(ValueError, match="`x` must be bfloat16"):
        gelu(x.float())


def test_wrong_frames() -> None:
    good = torch.zeros(1, 2, 3, 4)
    for wrong in (good[0], good.double(), good[:, :1], good[:, :, :2], good.transpose(2, 3)):
        with pytest.raises(ValueError, match="`values` must be Float like `queries`"):
            attend_frames(good, good, wrong, 1.0)
    with pytest.raises(ValueError, match="`queries` must be float32 or bfloat16"):
        attend_frames(good.double(), good.double(), good.double(), 1.0)


def test_operators_keep_their_promises() -> None:
    """Schemas and fakes agree with what the operators do."""
    random, nodes = generator(0), prompt(3, 10, FLOATS).nodes
    queries, keys, cache = (
        torch.randn(shape, generator=random) for shape in [(1, 4, 3, 16), (1, 2, 3, 16), (2, 1, 2, 30, 16)]
    )
    torch.library.opcheck(
        torch.ops.specdec.store_nodes.default, (keys, keys, cache[0], cache[1].clone(), nodes), test_utils="test_schema"
    )
    torch.library.opcheck(
        torch.ops.specdec.attend.default,
        (queries, cache[0], cache[1], nodes, 0.5, 0.0, None, None),
        test_utils="test_schema",
    )


def refused(name: str, do: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        do()


def test_wrong_arguments() -> None:
    """Errors name the argument, before memory is read that is not there."""
    call = prompt(3, 10, FLOATS)
    nodes = call.nodes
    for name, value in (
        ("queries", call.queries[0]),
        ("queries", call.queries.double()),
        ("keys", call.keys.bfloat16()),
        ("keys", call.keys[..., :-1]),
        ("keys", call.keys.repeat_interleave(2, 3)[..., ::2]),
        ("values", call.values.transpose(2, 3).contiguous().transpose(2, 3)),
        ("keys", call.keys[:, :0]),
        ("values", call.values[:, :, :-1]),
        ("nodes", nodes.long()),
        ("nodes", nodes[:2]),
        ("nodes", nodes[:, :3].contiguous()),
        ("nodes", nodes.flip(1)[:, ::2]),
        ("nodes", nodes + torch.tensor([2, 0, 0, 0], dtype=torch.int32)),
        ("nodes", nodes - torch.tensor([1, 0, 0, 0], dtype=torch.int32)),
        ("nodes", nodes - torch.tensor([0, 0, 1, 0], dtype=torch.int32)),
        ("nodes", nodes + torch.tensor([0, 0, 0, 9], dtype=torch.int32)),
        ("nodes", torch.cat([nodes, torch.full((3, 1), 1 << 8, dtype=torch.int32)], 1)),
        ("softcap", -1.0),
        ("sinks", torch.ones(5)),
        ("biases", torch.ones(5, 2)),
        ("biases", torch.ones(call.queries.shape[1])),
        ("biases", torch.ones(call.queries.shape[1], 0)),
    ):
        refused(name, replace(call, **{name: value}).run)
    right = {"keys": call.keys[:1, :, :3], "values": call.values[:1, :, :3], "key_buffer": call.keys.clone(),
             "value_buffer": call.values.clone(), "nodes": nodes}  # fmt: skip
    store_nodes(**right)
    for name, value in (
        ("keys", right["keys"][0]),
        ("keys", right["keys"].bfloat16()),
        ("values", right["values"][:, :1]),
        ("key_buffer", right["key_buffer"][..., :-1].transpose(2, 3)),
        ("value_buffer", right["value_buffer"][:1]),
        ("nodes", nodes + torch.tensor([0, 9, 0, 0], dtype=torch.int32)),
        ("nodes", nodes - torch.tensor([1, 0, 0, 0], dtype=torch.int32)),
    ):
        refused(name, lambda changed={**right, name: value}: store_nodes(**changed))
