"""Positions for models whose forward does not take them: they are looked up while one of our passes runs.

A model is wrapped once and stays wrapped. The wrapper asks a thread-local value that is set only during our own
pass, so other callers, other threads and calls after an exception see the original behaviour.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specdec.errors import UnsupportedError
from specdec.models.offload import at_hand, execution_device

_INSTALLING = threading.Lock()


class _Running(threading.local):
    query: Tensor | None = None
    key: Tensor | None = None


_running = _Running()


@contextmanager
def running(query: Tensor, key: Tensor) -> Iterator[None]:
    """While it lasts, this thread's passes use `query` `[rows, nodes]` and `key` `[rows, end]` positions."""
    _running.query, _running.key = query, key
    try:
        yield
    finally:
        _running.query = _running.key = None


class _Looked:
    """Stands in for a module's method: `special(module, query, key)` during our pass, the original otherwise."""

    def __init__(self, module: nn.Module, original: Callable[..., Any], special: Callable[..., Any]) -> None:
        self.module, self.original, self.special = module, original, special

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _running.query is None:
            return self.original(*args, **kwargs)
        return self.special(self.module, _running.query, _running.key)


def _embedding(module: Any, query: Tensor, key: Tensor) -> Tensor:
    """Position embeddings `[rows, nodes, width]` from a learned or sinusoidal table."""
    if getattr(module, "weight", None) is None:  # fairseq's sinusoids start after the padding index
        table = module.weights
        return functional.embedding(query.to(table.device) + int(module.padding_idx) + 1, table)
    with at_hand(module):
        return functional.embedding(query.to(module.weight.device) + getattr(module, "offset", 0), module.weight)


def _relative_bias(module: Any, query: Tensor, key: Tensor) -> Tensor:
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


def _alibi(module: Any, query: Tensor, key: Tensor) -> Tensor:
    """Bloom's bias `[rows * heads, 1, end]`: a slope per head times the key's position."""
    heads, dtype = module.num_heads, module.word_embeddings.weight.dtype
    ones = torch.ones(1, 2, dtype=torch.long, device=execution_device(module.word_embeddings))
    slopes = type(module).build_alibi_tensor(module, ones, heads, torch.float32)[:, 0, 1]
    bias = slopes[None, :, None] * key.to(slopes.device)[:, None]
    return bias.reshape(-1, 1, key.shape[1]).to(dtype)


def install(decoder: nn.Module, style: str) -> None:
    """Makes `decoder` look its positions up; `style` is "embedding", "bias" or "alibi"."""
    with _INSTALLING:
        if style == "embedding":
            module: Any = getattr(decoder, "embed_positions", None)
            if module is None:
                raise UnsupportedError(f"{type(decoder).__name__} has no `embed_positions` to look positions up in")
            _wrap(module, "forward", _embedding)
        elif style == "alibi":
            _wrap(decoder, "build_alibi_tensor", _alibi)
        else:
            for module in decoder.modules():
                if hasattr(module, "compute_bias") and getattr(module, "has_relative_attention_bias", False):
                    _wrap(module, "compute_bias", _relative_bias)


def _wrap(module: nn.Module, method: str, special: Callable[..., Any]) -> None:
    original = getattr(module, method)
    if not isinstance(original, _Looked):
        setattr(module, method, _Looked(module, original, special))
