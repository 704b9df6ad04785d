"""Operators of our own.

They are C++ for the CPU alone, and check their arguments: `specdec::packed_linear` (linear.cpp), `specdec::dots`
(dots.cpp), `specdec::expert_linear` (experts.cpp), `specdec::attend` and `specdec::store_nodes` (attention.cpp),
`specdec::attend_frames` and `specdec::gelu` (frames.cpp), `specdec::keep_top`, `specdec::draws` and
`specdec::best_token` (choice.cpp), `specdec::norm`, `specdec::attention`, `specdec::gated` and `specdec::crossed`
(layers.cpp), for a `part` of a layer.
They need `specdec.kernels.available`. `passes` runs a model's recorded passes and drafts chains with them (passes.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("specdec", "FRAGMENT")  # type: ignore[no-untyped-call]
_WEIGHT = "Tensor weight, Tensor? factors, Tensor? scales, Tensor? mins"
_INTEGERS = "Tensor weight, Tensor? high, Tensor? factors, Tensor? scales, Tensor? mins, Tensor? steps, Tensor? levels"
_BLOCK_OUTPUTS = "Tensor(a!) packed, Tensor(b!)? high, Tensor(c!) scales, Tensor(d!)? mins, Tensor(e!)? steps"
_ROUNDED_OUTPUTS = "Tensor(a!) packed, Tensor(b!) factors, Tensor(c!)? scales, Tensor(d!)? mins"
_BUFFERS = "Tensor(a!) key_buffer, Tensor(b!) value_buffer"
_SCORES = "float scale, float softcap=0.0, Tensor? sinks=None, Tensor? biases=None"
for _schema in (
    f"dots(Tensor x, {_INTEGERS}, Tensor? bias, int outputs, int way=0, int likely=0) -> Tensor",
    f"expert_linear(Tensor x, Tensor experts, {_INTEGERS}, Tensor? bias, int outputs, int way, bool rounds) -> Tensor",
    f"packed_linear(Tensor x, {_WEIGHT}, Tensor? bias, int outputs, int way=0) -> Tensor",
    "set_ways(ScalarType weight, bool grouped, bool wide, int tiles, int unpacked) -> ()",
    f"pack_blocks(Tensor raw, Tensor? rows, str name, {_BLOCK_OUTPUTS}) -> ()",
    f"round_weight(Tensor weight, int inputs, {_ROUNDED_OUTPUTS}) -> ()",
    "set_floats(int rows) -> ()",
    "has_tiles() -> bool",
    f"store_nodes(Tensor keys, Tensor values, {_BUFFERS}, Tensor nodes) -> ()",
    f"attend(Tensor queries, Tensor keys, Tensor values, Tensor nodes, {_SCORES}) -> Tensor",
    "attend_frames(Tensor queries, Tensor keys, Tensor values, float scale) -> Tensor",
    "gelu(Tensor x) -> Tensor",
    "keep_top(Tensor scores, int k, float p, int least) -> Tensor",
    "draws(Tensor scores, int[] addresses) -> Tensor",
    "best_token(Tensor scores, str[] names, float[] numbers, int[] counts) -> int",
):
    _LIBRARY.define(_schema)  # type: ignore[no-untyped-call]


def gumbel_draws(scores: Tensor, addresses: Sequence[int]) -> Tensor:
    """Gumbel-max draws `[rows]` from `scores` `[rows, vocab]` float32 on the CPU, each with the noise of a 64-bit
    address.

    `specdec.decoding.noise` makes the same noise. -1: all scores are -inf; -2: one is NaN.
    """
    return torch.ops.specdec.draws.default(scores, [signed(address) for address in addresses])


def best_token(scores: Tensor, filters: Sequence[tuple[str, Sequence[float]]]) -> int:
    """The first token with the largest of `scores` `[vocab]` after filters, names and numbers as filters.h reads them.

    -1: the filters leave no score above -inf.
    """
    numbers = [number for _, values in filters for number in values]
    counts = [len(values) for _, values in filters]
    return torch.ops.specdec.best_token.default(scores, [name for name, _ in filters], numbers, counts)


def signed(address: int) -> int:
    """The signed number with the same 64 bits."""
    return address - (1 << 64) if address >> 63 else address


def passes(inputs: int, sizes: Sequence[Sequence[int]], constants: Sequence[Tensor]) -> Any:
    """Passes over `inputs` tensors of each pass, and `constants`; needs `specdec.kernels.available`.

    `sizes`: the sizes that change from pass to pass, each by an input's number and a dimension. `add(...)` adds calls
    of operators in order, and `end(values)` says what a pass returns. Then `run(inputs)` runs a pass, and
    `draft_chain(...)` drafts chains. passes.cpp lists the arguments.
    """
    return torch.classes.specdec.Passes(inputs, sizes, constants)


def part(kind: str, *options: object) -> Any:
    """A part of a layer as one call: a "Linear", "Norm", "Attention", "Gated" or "Crossed", with the options that
    layers.cpp lists; needs `specdec.kernels.available`."""
    return getattr(torch.classes.specdec, kind)(*options)


def norm(part: Any, x: Tensor) -> Tensor:
    """`x` `[..., width]` through a part "Norm"."""
    return torch.ops.specdec.norm.default(part, x)  # type: ignore[no-any-return]


def gated(part: Any, x: Tensor) -> Tensor:
    """`x` `[..., width]` through a part "Gated"."""
    return torch.ops.specdec.gated.default(part, x)  # type: ignore[no-any-return]


def attention(part: Any, x: Tensor, cos: Tensor, sin: Tensor, nodes: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """`x` `[1, nodes, width]` through a part "Attention"; `cos` and `sin` `[1, nodes, turned]`, the others as
    `attend` takes them."""
    return torch.ops.specdec.attention.default(part, x, cos, sin, nodes, keys, values)  # type: ignore[no-any-return]


def crossed(part: Any, x: Tensor, nodes: Tensor, keys: Tensor, values: Tensor, seen: Tensor, frame_keys: Tensor,
            frame_values: Tensor) -> Tensor:  # fmt: skip
    """`x` `[1, nodes, width]` through a part "Crossed"; tables and buffers as `attend` takes them."""
    return torch.ops.specdec.crossed.default(part, x, nodes, keys, values, seen, frame_keys, frame_values)  # type: ignore[no-any-return]


store_nodes = torch.ops.specdec.store_nodes.default
"""`(keys, values, key_buffer, value_buffer, nodes)`: writes token t to row `nodes[t, 0]`, column `nodes[t, 1]` of both
buffers.

`keys` and `values` are `[1, kv heads, tokens, width]`, the buffers `[rows, kv heads, capacity, width]` with a dense
last dimension; `nodes` as in `attend`. Raises ValueError for what does not fit.
"""

attend = torch.ops.specdec.attend.default
"""`(queries, keys, values, nodes, scale, softcap=0.0, sinks=None, biases=None)`: attention of tokens `[1, heads,
tokens, width]` over a cache, to `[1, tokens, heads, width of a value]`.

`keys` and `values` are `[rows, kv heads, capacity, width]` with a dense last dimension. The dimension before it may be
the dense one of `keys`, which is fastest for tokens that see one range. `heads` is a multiple of `kv heads`. All
tensors are float32, or all bfloat16; sums are float32.

`nodes`, int32 `[tokens, 4 + words]` or `[1, 1, tokens, 4 + words]`, has for each token: row, column (where
`store_nodes` writes it), first, base, and words of 32 bits. The token sees the columns from `first` to before `base`,
and `base + 32 * w + j` where bit j of word w is set; a token whose column is not one of these does not see itself. A
token that sees nothing gets zeros. Unseen columns do not matter, not even if they hold NaN.

`softcap` bounds scores as in Gemma 2 (arXiv:2408.00118, section 2), 0 does not; `sinks` `[heads]` are scores without a
value, as in GPT-OSS. `biases` `[heads, distances]` are added to scores as in T5 (arXiv:1910.10683, section 2.1): entry
d if d of the seen columns follow the key, the last entry for all larger d.

A token's result depends, bit for bit, only on its query and on what it sees, in that order. Raises ValueError for what
does not fit.
"""

keep_top = torch.ops.specdec.keep_top.default
"""`(scores, k, p, least)`: a copy of `scores` `[rows, vocab]` float32, on the CPU, with -inf for what does not stay.

First the `k` largest stay, with all ties of the last of them (0 keeps all). Of these, in descending order and the
highest ids first among equals, a score stays if the scores before it have less than the mass `p` (arXiv 1904.09751). At
least `least` scores stay, and rows with NaN or infinity stay as they are.
"""

attend_frames = torch.ops.specdec.attend_frames.default
"""`(queries, keys, values, scale)`: attention `[rows, frames, heads, width]` of frames that all see one another.

The tensors are float32 or bfloat16 `[rows, heads, frames, width]`. Raises ValueError for arguments that do not fit.
"""

gelu = torch.ops.specdec.gelu.default
"""`(x)`: GELU of bfloat16 `x`, as exact as bfloat16. Raises ValueError for another dtype."""

packed_linear = torch.ops.specdec.packed_linear.default
"""`(x, weight, factors, scales, mins, bias, outputs, way=FASTEST)`: `x` `[..., inputs]` to `[..., outputs]`.

`weight`, `scales` and `mins` are packed (`packed_layout.py`); `factors` and `bias` float32 `[outputs]`. In each way but
FASTEST and UNPACKED a row's result does not depend on its neighbours, bit for bit. Raises ValueError for arguments that
do not fit.
"""

dots = torch.ops.specdec.dots.default
"""`(x, weight, high, factors, scales, mins, steps, levels, bias, outputs, way=FASTEST, likely=0)`: `x` `[..., inputs]`,
rounded to 8 bits, to `[..., outputs]`.

The weight is packed (`packed_layout.py`; dots.cpp has the shapes). A row's result does not depend on its neighbours,
bit for bit; FASTEST, not ALIKE, may multiply many rows in floats. `likely` is a multiple of 32: where one of a row's
first `likely` outputs has at least 0.9 of their softmax, all later outputs are -inf, and their weights are not read.
Raises ValueError for arguments that do not fit.
"""

expert_linear = torch.ops.specdec.expert_linear.default
"""`(x, experts, weight, high, factors, scales, mins, steps, levels, bias, outputs, way, rounds)`: each row of `x`
`[rows, inputs]` times the weight of one of the `experts` int64 `[rows]`, to `[rows, outputs]`.

The weights of all experts lie one behind the other, each in whole blocks; `factors` and `bias` have an entry for each
output of these blocks. Only the weights of `experts` are read. With `rounds`, rows are rounded as by `dots`, else they
are multiplied as by `packed_linear`. Raises ValueError for arguments that do not fit.
"""

pack_blocks = torch.ops.specdec.pack_blocks.default
"""`(raw, rows, name, packed, high, scales, mins, steps)`: packs the blocks `raw` of a GGUF file, uint8 `[outputs, bytes
of a row]`, all or the `rows`, into the other tensors, as `dots` reads them; `blocks.py` has the kinds by `name`."""

round_weight = torch.ops.specdec.round_weight.default
"""`(weight, inputs, packed, factors, scales, mins)`: rounds a packed weight of so many inputs, in floats, into the
other tensors: to 4 bits in groups with `scales` and `mins`, else to 8 bits."""

set_floats = torch.ops.specdec.set_floats.default
"""`(rows)`: from how many rows on `dots` multiplies 8 and 4 bits in floats if its way is FASTEST."""

FASTEST, ALIKE, VECTORS, TILES, UNPACKED = range(5)
"""Ways to multiply, as linear.cpp names them: the fastest way for this number of rows, one way for all numbers of rows,
the processor's vectors, its tiles (AMX), the unpacked weight."""

set_ways = torch.ops.specdec.set_ways.default
"""`(weight, grouped, wide, tiles, unpacked)`: from how many rows on FASTEST means tiles, and the unpacked weight.

This is for weights of the dtype `weight`, with `scales` if `grouped`, and rows in float32 if `wide`, else in bfloat16.
"""

has_tiles = torch.ops.specdec.has_tiles.default
"""Whether the processor has tiles (AMX), and the system lets this process use them."""
