"""Weights that accelerate's hooks bring in for each pass: where a module computes, and how to look at them.

The only module that knows what a hook is made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_module
from torch import nn


def is_offloaded(model: nn.Module) -> bool:
    """Whether some weights live on disk or elsewhere, so that every pass reads them all."""
    return any(parameter.is_meta for parameter in model.parameters())


def execution_device(module: nn.Module) -> torch.device:
    """Where `module` computes: on its hook's device if it has one, otherwise where its weights are."""
    own = next(chain(module.parameters(), module.buffers()), None)
    return next(_devices(module), None) or (torch.device("cpu") if own is None else own.device)  # packed: on the CPU


def execution_devices(model: nn.Module) -> set[torch.device]:
    """Where the hooks of a model's modules let them compute."""
    return {device for module in model.modules() for device in _devices(module)}


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


@dataclass(frozen=True, slots=True)
class Home:
    """What accelerate reads one weight from: `loader` maps keys to weights, `key` is this one's."""

    loader: Any
    key: str

    @property
    def entry(self) -> Mapping[str, Any] | None:
        """What the loader's index says of a weight in a file; None where it is in memory or nowhere."""
        entry: Mapping[str, Any] | None = getattr(self.loader, "index", {}).get(self.key)
        return entry

    @property
    def folder(self) -> str:
        """Where the loader's files are whose entry names none."""
        folder: str = self.loader.save_folder
        return folder


def offloaded_weights(module: nn.Module) -> Iterator[dict[str, Any]]:
    """What hooks of this very module bring weights in from, where that is in memory."""
    for hook in hooks(module):
        weights = getattr(getattr(hook, "weights_map", None), "dataset", None)
        weights = getattr(weights, "state_dict", weights)
        if isinstance(weights, dict):
            yield weights


def home(model: nn.Module, name: str) -> Home | None:
    """What the weight `name` comes from; None where no hook brings it in."""
    parts = name.split(".")
    for depth in reversed(range(len(parts))):
        for hook in hooks(model.get_submodule(".".join(parts[:depth]))):
            weights = getattr(hook, "weights_map", None)
            if weights is not None:
                return Home(weights.dataset, weights.prefix + ".".join(parts[depth:]))
    return None


def wrapped_later(module: nn.Module) -> bool:
    """Whether somebody replaced the forward that accelerate had put on a module, which is a partial."""
    return bool(hooks(module)) and not isinstance(module.forward, partial)


def detach(model: nn.Module) -> None:
    """Takes the hooks off all modules, and the bound methods that they leave behind."""
    for module in model.modules():
        remove_hook_from_module(module)
        forward: Any = vars(module).get("forward")
        if getattr(forward, "__func__", None) is type(module).forward:
            del module.forward


def hooks(module: nn.Module) -> tuple[Any, ...]:
    """The hooks on this very module; several hang in a chain of `hooks`."""
    hook: Any = getattr(module, "_hf_hook", None)
    return tuple(getattr(hook, "hooks", () if hook is None else (hook,)))


def _devices(module: nn.Module) -> Iterator[torch.device]:
    places = (getattr(hook, "execution_device", None) for hook in hooks(module))
    return (torch.device(place) for place in places if place is not None)
