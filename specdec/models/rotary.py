"""Rotary positions whose scaling depends on the length (LongRoPE, dynamic NTK): every node by its own span.

The library scales a whole pass by its largest position, so that drafted nodes and longer rows would change what others
get, and dynamic scaling remembers the longest text it ever saw. Here a node's span is how long the text was when plain
decoding would have read it, and the library's own module is asked once per span, on a copy that remembers nothing.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from specdec.errors import UnsupportedError

_INSTALLING = threading.Lock()


class _Running(threading.local):
    spans: Tensor | None = None


_running = _Running()


@contextmanager
def running(spans: Tensor | None) -> Iterator[None]:
    """While it lasts, this thread's passes are scaled by `spans` `[rows, nodes]`; None leaves it to the library."""
    _running.spans = spans
    try:
        yield
    finally:
        _running.spans = None


def install(decoder: nn.Module, boundary: int) -> None:
    """Makes the rotary modules of `decoder`, unscaled up to `boundary`, go by spans; UnsupportedError without any."""
    with _INSTALLING:
        modules = [module for module in decoder.modules() if _depends_on_length(module)]
        if not modules:
            raise UnsupportedError(
                f"{type(decoder).__name__} has rotary scaling that depends on the length, but not the library's module "
                "for it: load it without `trust_remote_code`, or without `rope_scaling`"
            )
        for module in modules:
            if not isinstance(module.forward, _BySpan):
                module.forward = _BySpan(module, module.forward, boundary)  # type: ignore[method-assign]


def _depends_on_length(module: Any) -> bool:
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return hasattr(module, "config") and any(kind == "longrope" or "dynamic" in (kind or "") for kind in kinds)


class _BySpan:
    """Stands in for a rotary module's `forward`: by spans during our pass, the original otherwise."""

    def __init__(self, module: Any, original: Callable[..., Any], boundary: int) -> None:
        self.module, self.original = module, original
        # Spans that scale alike: all up to the boundary and, if there are but two sets of factors, all beyond.
        self.least, self.most = boundary, boundary + 1 if module.rope_type == "longrope" else None

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        spans = _running.spans
        if spans is None:
            return self.original(x, position_ids, *args, **kwargs)
        if position_ids.dim() != 2:
            raise UnsupportedError(
                f"{type(self.module).__name__} has several positions per token: no scaling by length"
            )
        found: Any = None
        spans = spans.clamp(self.least, self.most)
        for span in torch.unique(spans).tolist():
            here = (spans == span).to(position_ids.device)
            asked = torch.where(here, position_ids, 0)
            last = asked.new_full((len(asked), 1), span - 1)  # the largest position, which decides
            angles = type(self.module).forward(_as_built(self.module), x, torch.cat([asked, last], 1), *args, **kwargs)
            found = angles if found is None else _merged(here, angles, found)
        return tuple(part[:, :-1] for part in found) if isinstance(found, tuple) else found[:, :-1]


def _merged(here: Tensor, new: Any, old: Any) -> Any:
    if isinstance(new, tuple):
        return tuple(_merged(here, *pair) for pair in zip(new, old, strict=True))
    more = torch.nn.functional.pad(here, (0, 1))
    return torch.where(more[..., None], new, old)


def _as_built(module: nn.Module) -> Any:
    """A copy of a rotary module in the state before its first pass."""
    twin: Any = copy.copy(module)
    twin.__dict__["_buffers"] = {n: None if b is None else b.clone() for n, b in module._buffers.items()}
    suffix = "original_inv_freq"
    for name in [name for name in (*twin._buffers, *vars(twin)) if name.endswith(suffix)]:
        setattr(twin, name.removesuffix(suffix) + "inv_freq", getattr(twin, name).clone())
    for name in [name for name in vars(twin) if name.endswith("max_seq_len_cached")]:
        setattr(twin, name, twin.original_max_seq_len)
    return twin
