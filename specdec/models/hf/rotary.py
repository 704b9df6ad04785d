"""Rotary positions whose scaling depends on the length (LongRoPE, dynamic NTK): each node by its own span.

The library scales a pass by its largest position, so drafted nodes and longer rows would change other results, and
dynamic scaling remembers the longest text. Here a node's span is the length of the text when plain decoding would have
read it; the library's module runs once per span, on a copy in its initial state.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specdec.errors import UnsupportedError
from specdec.models.hf.patching import overridden


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

    @contextmanager
    def running(self, spans: Tensor) -> Iterator[None]:
        """Context in which this thread's passes are scaled by `spans` `[rows, nodes]`, in tokens."""
        with overridden(
            {(module, "forward"): partial(_angles, module, self._alike(module, spans)) for module in self._modules}
        ):
            yield

    def _alike(self, module: Any, spans: Tensor) -> Tensor:
        """Spans that scale alike made equal: all up to the boundary, and for LongRoPE all beyond it."""
        return spans.clamp(self._boundary, self._boundary + 1 if module.rope_type == "longrope" else None)


def _depends_on_length(module: Any) -> bool:
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return hasattr(module, "config") and any(kind == "longrope" or "dynamic" in (kind or "") for kind in kinds)


def _angles(module: Any, spans: Tensor, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The angles of a rotary module for `position_ids` `[rows, nodes]`, each node scaled by its span."""
    if position_ids.dim() != 2:
        raise UnsupportedError(f"{type(module).__name__} has several positions per token: no scaling by length")
    found: Any = None
    for span in torch.unique(spans).tolist():
        here = (spans == span).to(position_ids.device)
        asked = torch.where(here, position_ids, 0)
        last = asked.new_full((len(asked), 1), span - 1)  # the largest position decides
        angles = type(module).forward(_as_built(module), x, torch.cat([asked, last], 1), *args, **kwargs)
        found = angles if found is None else _merged(here, angles, found)
    return tuple(part[:, :-1] for part in found) if isinstance(found, tuple) else found[:, :-1]


def _merged(here: Tensor, new: Any, old: Any) -> Any:
    if isinstance(new, tuple):
        return tuple(_merged(here, *pair) for pair in zip(new, old, strict=True))
    more = torch.nn.functional.pad(here, (0, 1))
    return torch.where(more[..., None], new, old)


def _as_built(module: nn.Module) -> Any:
    other: Any = copy.copy(module)
    other.__dict__["_buffers"] = {n: None if b is None else b.clone() for n, b in module._buffers.items()}
    suffix = "original_inv_freq"
    for name in [name for name in (*other._buffers, *vars(other)) if name.endswith(suffix)]:
        setattr(other, name.removesuffix(suffix) + "inv_freq", getattr(other, name).clone())
    for name in [name for name in vars(other) if name.endswith("max_seq_len_cached")]:
        setattr(other, name, other.original_max_seq_len)
    return other
