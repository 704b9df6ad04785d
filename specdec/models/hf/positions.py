"""Positions for models whose forward does not take them: the methods that derive them are overridden in our passes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specdec.errors import UnsupportedError
from specdec.models.hf.device_hooks import at_hand, execution_device
from specdec.models.hf.patching import Method, overridden

STYLES = ("embedding", "bias", "alibi")


class Lookup:
    """The methods by which a decoder derives positions in a style of `STYLES`; UnsupportedError if there are none."""

    def __init__(self, decoder: nn.Module, style: str) -> None:
        self._methods = _methods(decoder, style)

    @contextmanager
    def running(self, query: Tensor, key: Tensor) -> Iterator[None]:
        """Context in which this thread's passes use positions `query` `[rows, nodes]` and `key` `[rows, end]`."""
        with overridden({method: partial(own, method[0], query, key) for method, own in self._methods.items()}):
            yield


def _methods(decoder: nn.Module, style: str) -> dict[Method, Callable[..., Any]]:
    """The methods to override, and by what: `own(module, query, key, *arguments of the model)`."""
    if style == "alibi":
        return {(decoder, "build_alibi_tensor"): _alibi}
    if style == "bias":
        layers = [module for module in decoder.modules() if getattr(module, "has_relative_attention_bias", False)]
        return {(layer, "compute_bias"): _relative_bias for layer in layers if hasattr(layer, "compute_bias")}
    if not isinstance(module := getattr(decoder, "embed_positions", None), nn.Module):
        raise UnsupportedError(f"{type(decoder).__name__} has no `embed_positions` to look positions up in")
    return {(module, "forward"): _embedding}


def _embedding(module: Any, query: Tensor, key: Tensor, *_: Any, **__: Any) -> Tensor:
    """Position embeddings `[rows, nodes, width]` from a learned or sinusoidal table."""
    if getattr(module, "weight", None) is None:  # fairseq's sinusoids start after the padding index
        table = module.weights
        return functional.embedding(query.to(table.device) + int(module.padding_idx) + 1, table)
    with at_hand(module):
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


def _alibi(module: Any, query: Tensor, key: Tensor, *_: Any, **__: Any) -> Tensor:
    """Bloom's bias `[rows * heads, 1, end]`: a slope per head times the key's position."""
    heads, dtype = module.num_heads, module.word_embeddings.weight.dtype
    ones = torch.ones(1, 2, dtype=torch.long, device=execution_device(module.word_embeddings))
    slopes = type(module).build_alibi_tensor(module, ones, heads, torch.float32)[:, 0, 1]
    bias = slopes[None, :, None] * key.to(slopes.device)[:, None]
    return bias.reshape(-1, 1, key.shape[1]).to(dtype)
