"""A second model over the weights of a first one, which stays unchanged."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from specdec.models.hf.patching import settled
from specdec.models.hf.private_api import set_attention


def shallow_copy(model: Any, *, attention: str | None = None) -> Any:
    """A model of copied modules that share all weights with `model`; changes of its modules stay its own.

    Its layers use the named `attention`, if any. Passes of `model` may run meanwhile.
    """
    made: dict[nn.Module, nn.Module] = {}
    configs: dict[int, Any] = {}

    def of(module: nn.Module) -> nn.Module:
        if module not in made:
            made[module] = other = type(module).__new__(type(module))
            # Dicts are copied, so that hooks of one are not shared.
            other.__dict__.update({n: v.copy() if isinstance(v, dict) else v for n, v in settled(module).items()})
            children = {name: None if child is None else of(child) for name, child in module._modules.items()}
            other.__dict__["_modules"] = children
            if attention is not None and hasattr(module, "config"):
                other.__dict__["config"] = config(module.config)
        return made[module]

    def config(own: Any) -> Any:
        if id(own) not in configs:
            configs[id(own)] = copied = copy.deepcopy(own)
            set_attention(copied, attention)
        return configs[id(own)]

    return of(model)
