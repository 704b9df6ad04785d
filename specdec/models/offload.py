"""Weights that accelerate's hooks bring in for each pass: where a module computes, and how to look at them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def is_offloaded(model: nn.Module) -> bool:
    """Whether some weights live on disk or elsewhere, so that every pass reads them all."""
    return any(parameter.is_meta for parameter in model.parameters())


def hooks(module: nn.Module) -> tuple[Any, ...]:
    """accelerate's hooks on this very module."""
    hook: Any = getattr(module, "_hf_hook", None)
    return tuple(getattr(hook, "hooks", () if hook is None else (hook,)))


def execution_device(module: nn.Module) -> torch.device:
    """Where `module` computes: on its hook's device if it has one, otherwise where its weights are."""
    for hook in hooks(module):
        device = getattr(hook, "execution_device", None)
        if device is not None:
            return torch.device(device)
    return next(module.parameters()).device


@contextmanager
def at_hand(module: nn.Module) -> Iterator[None]:
    """While it lasts, the module's own weights are where it computes."""
    if not any(parameter.is_meta for parameter in module.parameters(recurse=False)):
        yield
        return
    hook: Any = module._hf_hook
    hook.pre_forward(module)
    try:
        yield
    finally:
        hook.post_forward(module, None)
