"""Positions for models whose forward does not take them, or scales them: our passes override methods.

Where rotary scaling depends on the length (LongRoPE, dynamic NTK), each node has a span. The library scales a pass by
its largest position, so drafted nodes and longer rows would change other results, and dynamic scaling remembers the
longest text. Here a node's span is the length of the text when plain decoding would have read it; the library's module
runs once per span, on a copy in its initial state.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specdec.errors import UnsupportedError
from specdec.models.hf.device_hooks import execution_device, loaded_weights
from specdec.models.hf.patching import Method, override

STYLES = ("embedding", "bias", "alibi")


class Lookup:
    """The methods by which a decoder derives positions in a style of `STYLES`; UnsupportedError if there are none."""

    def __init__(self, decoder: nn.Module, style: str) -> None:
        # The methods to override, and by what: `function(module, query, key, *arguments of the model)`.
        self._methods: dict[Method, Callable[..., Any]] = {(decoder, "build_alibi_tensor"): _alibi}
        if style == "bias":
            layers = [module for module in decoder.modules() if getattr(module, "has_relative_attention_bias", False)]
            methods = [(layer, "compute_bias") for layer in layers if hasattr(layer, "compute_bias")]
            self._methods = dict.fromkeys(methods, _relative_bias)
        if style == "embedding":
            if not isinstance(module := getattr(decoder, "embed_positions", None), nn.Module):
                raise UnsupportedError(f"{type(decoder).__name__} has no `embed_positions` to look positions up in")
            self._methods = {(module, "forward"): _embedding}

    def running(self, query: Tensor, key: Tensor) -> AbstractContextManager[None]:
        """Context in which this thread's passes use positions `query` `[rows, nodes]` and `key` `[rows, end]`."""
        return override(
            {method: partial(original, method[0], query, key) for method, original in self._methods.items()}
        )


def _embedding(module: Any, query: Tensor, key: Tensor, *_: Any, **__: Any) -> Tensor:
    """Position embeddings `[rows, nodes, width]` from a learned or sinusoidal table."""
    if getattr(module, "weight", None) is None:  # fairseq's sinusoids start after the padding index
        table = module.weights
        return functional.embedding(query.to(table.device) + int(module.padding_idx) + 1, table)
    with loaded_weights(module):
        return functional.embedding(query.to(module.weight.device) + getattr(module, "offset", 0), module.weight)


def _relative_bias(module: Any, query: Tensor, key: Tensor, *_: Any, **__: Any) -> Tensor:
    """T5's bias `[rows, heads, nodes, end]` from the distances between keys and queries."""
    device = execution_device(module.relative_attention_bias)
    distance = (key[:, None] - query[:, :, None]).to(device)
    if isinstance(inspect.getattr_static(type(module), "_relative_position_bucket"), staticmethod):
        bucket = module._relative_position_bucket(
            distance, False, module.relative_attention_num_buckets, module.relative_attention_max_distance
        )
    else:
        bucket = module._relative_position_bucket(distance)
    return module.relative_attention_bias(bucket).permute(0, 3, 1, 2)


def _alibi(module: Any, query: Tensor, key: Tensor, _: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Bloom's bias `[rows * heads, 1, end]`: a slope per head times the key's position."""
    mask = torch.ones(1, 2, dtype=torch.long, device=execution_device(module.word_embeddings))
    slopes = type(module).build_alibi_tensor(module, mask, heads, torch.float32)[:, 0, 1]
    bias = slopes[None, :, None] * key.to(slopes.device)[:, None]
    return bias.reshape(-1, 1, key.shape[1]).to(dtype)


class Scaling:
    """The rotary modules whose angles depend on the length beyond `boundary` tokens; UnsupportedError without one."""

    def __init__(self, decoder: nn.Module, boundary: int) -> None:
        self._modules: list[Any] = [module for module in decoder.modules() if _depends_on_length(module)]
        self._boundary = boundary
        if not self._modules:
            raise UnsupportedError(
                f"{type(decoder).__name__} has rotary scaling that depends on the length, but not the library's module "
                "for it: load it without `trust_remote_code`, or without `rope_scaling`"
            )

    def running(self, spans: Tensor) -> AbstractContextManager[None]:
        """Context in which this thread's passes are scaled by `spans` `[rows, nodes]`, in tokens."""
        methods: dict[Method, Callable[..., Any]] = {}
        for module in self._modules:
            # Spans that scale alike made equal: all up to the boundary, and for LongRoPE all beyond it.
            equal_spans = spans.clamp(self._boundary, self._boundary + 1 if module.rope_type == "longrope" else None)
            methods[module, "forward"] = partial(_angles, module, equal_spans)
        return override(methods)


def _depends_on_length(module: Any) -> bool:
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return hasattr(module, "config") and any(kind == "longrope" or "dynamic" in (kind or "") for kind in kinds)


def _angles(module: Any, spans: Tensor, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The angles of a rotary module for `position_ids` `[rows, nodes]`, each node scaled by its span."""
    if position_ids.dim() != 2:
        raise UnsupportedError(f"{type(module).__name__} has several positions per token: no scaling by length")
    result: Any = None
    for span in torch.unique(spans).tolist():
        is_span = (spans == span).to(position_ids.device)
        ids = torch.where(is_span, position_ids, 0)
        last = ids.new_full((len(ids), 1), span - 1)  # the largest position decides
        angles = type(module).forward(_as_built(module), x, torch.cat([ids, last], 1), *args, **kwargs)
        result = angles if result is None else _merge(is_span, angles, result)
    return tuple(part[:, :-1] for part in result) if isinstance(result, tuple) else result[:, :-1]


def _merge(is_span: Tensor, new: Any, old: Any) -> Any:
    if isinstance(new, tuple):
        return tuple(_merge(is_span, *pair) for pair in zip(new, old, strict=True))
    return torch.where(functional.pad(is_span, (0, 1))[..., None], new, old)


def _as_built(module: nn.Module) -> Any:
    other: Any = copy.copy(module)
    other.__dict__["_buffers"] = {n: None if b is None else b.clone() for n, b in module._buffers.items()}
    suffix = "original_inv_freq"
    for name in [name for name in (*other._buffers, *vars(other)) if name.endswith(suffix)]:
        setattr(other, name.removesuffix(suffix) + "inv_freq", getattr(other, name).clone())
    for name in [name for name in vars(other) if name.endswith("max_seq_len_cached")]:
        setattr(other, name, other.original_max_seq_len)
    return other
