"""The key of compiled code: models with equal ones run the same code, over weights of their own."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
import transformers
from torch import nn
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

from specdec import kernels
from specdec.models.backends.compiler import WRITTEN, tensors_of
from specdec.models.backends.ragged_model import RaggedModel

_PLAIN = (bool, int, float, str, torch.dtype)
_FUNCTIONS = (BuiltinFunctionType, FunctionType, MethodType)
_RELEASED = ("builtins", "torch", "transformers")  # packages whose versions are part of the key


def code_key(model: RaggedModel) -> str:
    config = model.model.config.to_json_string(use_diff=False)
    parts = [
        torch.__version__,
        transformers.__version__,
        kernels.digest(),
        _own_code(),
        *(_digest([file]) for file in sorted(_files(model))),
        *(f"{name} {type(module).__module__}.{type(module).__qualname__}" for name, module in model.named_modules()),
        *(
            f"{name} {tensor.dtype} {list(tensor.shape)} {tensor.stride()}"
            for name, tensor in tensors_of(model).items()
        ),
        *(f"{name} {tensor.tolist()}" for name, tensor in tensors_of(model).items() if tensor.numel() <= WRITTEN),
        *(f"{name} {_plain(module)} {_functions(module)}" for name, module in model.named_modules()),
        *(line for line in config.splitlines() if "_name_or_path" not in line),
        f"{model.widths} {model.states}",
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _digest(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@cache
def _own_code() -> str:
    """A digest of the Python code that defines passes."""
    root = Path(__file__).parents[2]
    return _digest(sorted(file for room in ("kernels", "models") for file in (root / room).rglob("*.py")))


def _files(model: RaggedModel) -> set[Path]:
    """The files that define a model's modules and the functions put into them; of remote code the whole folder."""
    classes = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    functions = {function.__module__ for module in model.modules() for function in _callables(module)}
    files = set[Path]()
    for name in classes | functions:
        package = name.partition(".")[0]
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and package not in _RELEASED:
            files.update(
                Path(file).parent.glob("*.py") if package == TRANSFORMERS_DYNAMIC_MODULE_NAME else [Path(file)]
            )
    return files


def _plain(module: nn.Module) -> list[tuple[str, object]]:
    """Attributes of a module that tracing turns into constants."""
    held = sorted((name, value) for name, value in vars(module).items() if isinstance(value, _PLAIN))
    return [(name, value) for name, value in held if name[0] != "_" and name != "name_or_path"]


def _callables(module: nn.Module) -> list[Any]:
    """Functions put into a module that its forward may call, and hooks that are not transformers' own."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    functions = [value for _, value in sorted(vars(module).items()) if isinstance(value, _FUNCTIONS)]
    return functions + [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("transformers.")]


def _functions(module: nn.Module) -> list[str]:
    return [f"{one.__module__}.{getattr(one, '__qualname__', type(one).__qualname__)}" for one in _callables(module)]
