"""Attention over a cache in torch's operators: for other devices, and without compiled kernels.

Equal up to rounding, which depends on the call's shape. If a token of the call sees a column with NaN or infinity, all
tokens of its row may get NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.errors import OptionError


def store_nodes(keys: Tensor, values: Tensor, key_buffer: Tensor, value_buffer: Tensor, nodes: Tensor) -> None:
    """`specdec::store_nodes`."""
    tokens = _lines(nodes, keys.shape[-2])
    for name, new, buffer in (("keys", keys, key_buffer), ("values", values, value_buffer)):
        expected = (1, buffer.shape[1], len(tokens), buffer.shape[3])
        if new.shape != expected or new.dtype != buffer.dtype:
            raise OptionError.of(name, f"{buffer.dtype} {list(expected)}", f"{new.dtype} {list(new.shape)}")
        buffer[tokens[:, 0], :, tokens[:, 1]] = new[0].transpose(0, 1)


def attend(queries: Tensor, keys: Tensor, values: Tensor, nodes: Tensor, scale: float, softcap: float,
           sinks: Tensor | None, biases: Tensor | None) -> Tensor:  # fmt: skip
    """`specdec::attend`: all rows side by side, each token masked to what it sees."""
    if queries.dim() != 4 or len(queries) != 1:
        raise OptionError.of("queries", "[1, heads, tokens, width]", list(queries.shape))
    rows, kv_heads, capacity, width = keys.shape
    if width != queries.shape[3] or queries.shape[1] % kv_heads:
        raise OptionError.of("keys", "as wide as `queries`, with a divisor of their heads", list(keys.shape))
    if values.shape[:3] != keys.shape[:3]:
        raise OptionError.of("values", f"{list(keys.shape[:3])} and a width", list(values.shape))
    if sinks is not None and sinks.shape != queries.shape[1:2]:
        raise OptionError.of("sinks", "one for each head of `queries`", list(sinks.shape))
    if biases is not None and (biases.dim() != 2 or len(biases) != queries.shape[1] or not biases.numel()):
        raise OptionError.of("biases", "[heads, distances], for each head of `queries`", list(biases.shape))
    seen = _seen(_lines(nodes, queries.shape[2]), rows, capacity)
    ignored = ~seen.any(0)[:, None]
    keys, values = (
        side.transpose(0, 1).reshape(1, kv_heads, rows * capacity, -1).masked_fill(ignored, 0)
        for side in (keys, values)
    )
    if softcap or sinks is not None or biases is not None:
        out = _softmax(queries, keys, values, seen, scale, softcap, sinks, biases)
    else:
        out = F.scaled_dot_product_attention(queries, keys, values, seen, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).masked_fill(~seen.any(1)[:, None, None], 0)


def _softmax(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float, softcap: float,
             sinks: Tensor | None, biases: Tensor | None) -> Tensor:  # fmt: skip
    _, heads, tokens, width = queries.shape
    grouped = queries.reshape(keys.shape[1], -1, width)  # heads that share keys are stacked
    scores = (grouped @ keys[0].transpose(1, 2)).float().view(heads, tokens, -1) * scale
    if biases is not None:
        distance = seen.flip(1).cumsum(1).flip(1) - 1  # in seen columns; other entries are masked below
        scores = scores + biases.float()[:, distance.clamp(0, biases.shape[1] - 1)]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(heads, tokens, 1)], -1)
    weights = scores.softmax(-1)[..., : len(seen[0])].to(values.dtype)
    return (weights.reshape(len(grouped), -1, weights.shape[-1]) @ values[0]).view(1, heads, tokens, -1)


def _lines(nodes: Tensor, tokens: int) -> Tensor:
    """`nodes` as int64 `[tokens, 4 + words]`."""
    if nodes.dtype != torch.int32 or nodes.numel() != tokens * nodes.shape[-1] or nodes.shape[-1] < 4:
        raise OptionError.of("nodes", f"int32 [{tokens}, 4 + words]", f"{nodes.dtype} {list(nodes.shape)}")
    return nodes.reshape(tokens, -1).long()


def _seen(lines: Tensor, rows: int, capacity: int) -> Tensor:
    """Which columns of all rows each token sees: `[tokens, rows * capacity]`."""
    columns = torch.arange(capacity, device=lines.device)
    row, _, first, base = (lines[:, field, None] for field in range(4))
    seen = (columns >= first) & (columns < base)
    if lines.shape[1] > 4:
        bit = columns - base
        words = lines[:, 4:].gather(1, bit.div(32, rounding_mode="floor").clamp(0, lines.shape[1] - 5))
        seen |= (bit >= 0) & (bit < 32 * (lines.shape[1] - 4)) & ((words >> bit % 32 & 1) == 1)
    own = row == torch.arange(rows, device=lines.device)
    return (own[:, :, None] & seen[:, None]).flatten(1)
