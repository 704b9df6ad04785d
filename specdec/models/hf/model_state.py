"""What surrounds a model's passes: torch's modes and precision, and what a copy of its weights was made of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from specdec.models.hf.patching import attributes_of
from specdec.models.hf.private_api import CAPTURING


def origins(model: nn.Module) -> dict[str, list[Any]]:
    """The weights, hooks and active adapters of which a copy of a model is made: a copy is right while they are equal.

    Writes through `.data`, attributes and methods are not among them.
    """
    weights, hooks, adapters = list[Any](), list[Any](), list[Any]()
    for module in model.modules():
        for weight in module._parameters.values():
            if weight is not None:
                address = weight.data_ptr() if type(weight) is nn.Parameter else id(weight)  # some have no memory
                weights.append((address, 0 if weight.is_inference() else weight._version))
        module_hooks = (*module._forward_pre_hooks.items(), *module._forward_hooks.items())
        hooks += [key for key, hook in module_hooks if getattr(hook, "__module__", "") != CAPTURING]
        if hasattr(module, "merged_adapters"):  # a layer of PEFT
            layer: Any = module
            names = list(layer.active_adapters), list(layer.merged_adapters)
            adapters.append((layer.disable_adapters, *names, dict(getattr(layer, "scaling", {}))))
    return {"weights": weights, "hooks": hooks, "adapters": adapters}


def runs_other_code(model: nn.Module) -> bool:
    """Whether modules have hooks or a replaced `forward`, which recorded passes would not call."""
    return bool(origins(model)["hooks"]) or any("forward" in attributes_of(module) for module in model.modules())


def float32_is_rounded(device: torch.device) -> bool:
    """Whether torch's settings let float32 matrix products on this device round to fewer bits."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    precision = backend.matmul.fp32_precision
    return precision == "bf16" or (precision == "tf32" and device.type == "cuda")


@cache
def _device_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


@contextmanager
def plain_modes() -> Iterator[None]:
    """Context with the modes of a new thread: no autocast, default device or gradients of a caller."""
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.no_grad())
        for kind in _device_types():
            modes.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            modes.enter_context(torch.device("cpu"))
        yield
