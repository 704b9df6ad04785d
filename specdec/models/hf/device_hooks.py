"""accelerate's hooks: where a module computes, and where its offloaded weights come from.

No other module looks inside a hook.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_module
from torch import nn


def is_offloaded(model: nn.Module) -> bool:
    """Whether some weights are on disk or elsewhere, so that every pass reads them."""
    return any(parameter.is_meta for parameter in model.parameters())


def execution_device(module: nn.Module) -> torch.device:
    """The device where `module` computes: its hook's if it has one, otherwise its weights'."""
    for hook in hooks(module):
        if (place := getattr(hook, "execution_device", None)) is not None:
            return torch.device(place)
    tensor = next(chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device


@contextmanager
def loaded_weights(module: nn.Module) -> Iterator[None]:
    """Context in which the module's own weights are on its device."""
    if not any(parameter.is_meta for parameter in module.parameters(recurse=False)):
        yield
        return
    hook: Any = module._hf_hook
    hook.pre_forward(module)
    try:
        yield
    finally:
        hook.post_forward(module, None)


def weight_source(model: nn.Module, name: str) -> tuple[Any, str] | None:
    """The mapping from which accelerate reads the weight `name`, and its key there; None if no hook loads it."""
    parts = name.split(".")
    for depth in reversed(range(len(parts))):
        for hook in hooks(model.get_submodule(".".join(parts[:depth]))):
            weights = getattr(hook, "weights_map", None)
            if weights is not None:
                return weights.dataset, weights.prefix + ".".join(parts[depth:])
    return None


def detach(model: nn.Module) -> None:
    """Removes the hooks from all modules, and the bound methods that they leave behind."""
    for module in model.modules():
        remove_hook_from_module(module)
        forward: Any = vars(module).get("forward")
        if getattr(forward, "__func__", None) is type(module).forward:
            del module.forward


def hooks(module: nn.Module) -> tuple[Any, ...]:
    """The hooks of this module itself; several are chained in `hooks`."""
    hook: Any = getattr(module, "_hf_hook", None)
    return tuple(getattr(hook, "hooks", () if hook is None else (hook,)))
