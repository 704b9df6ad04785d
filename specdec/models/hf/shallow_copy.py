"""A second model over the weights of a first one, so that nothing of the first has to be changed."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from specdec.models.hf.patching import settled
from specdec.models.hf.private_api import set_attention


def shallow_copy(model: Any, *, attention: str | None = None) -> Any:
    """A model of copied modules that share all weights with those of `model`; what is put into them stays theirs.

    Its layers compute with the `attention` that transformers knows by this name, if one is named. Passes of the model
    may run meanwhile.
    """
    made: dict[nn.Module, nn.Module] = {}
    configs: dict[int, Any] = {}

    def of(module: nn.Module) -> nn.Module:
        if module not in made:
            made[module] = other = type(module).__new__(type(module))
            # What is hooked to one of them is not to the other.
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
