"""A model of a GGUF file in floats, loaded one tensor after the other."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from specdec.errors import LoadError
from specdec.models.gguf.config import model_class
from specdec.models.gguf.reader import GgufReader, StoredTensor, floats
from specdec.models.gguf.tensors import Part, tensor_map


def read_model(reader: GgufReader, config: Any, dtype: torch.dtype) -> Any:
    """The model with a config of `read_config`, its weights from the file in `dtype`.

    Raises LoadError for weights that are missing or have another shape; a bias that is missing is zero.
    """
    model = empty_model(config, dtype)
    fill(model, reader, tensor_map(reader, config))
    return model


def empty_model(config: Any, dtype: torch.dtype) -> Any:
    """The model with its buffers, and weights of `dtype` that take no memory."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with init_empty_weights(include_buffers=False):
            model = model_class(config)(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


@torch.no_grad()
def fill(model: Any, reader: GgufReader, parts: dict[str, tuple[Part, ...]]) -> None:
    """Gives the parameters of `empty_model` memory and the file's numbers, and ties those that the config ties."""
    empty = dict(model.named_parameters(remove_duplicate=False))
    filled = dict.fromkeys(empty, 0)  # numbers
    for name, places in parts.items():
        for part in places:
            if part.parameter not in empty:
                raise LoadError(f"{reader.path} has the tensor {name}, and the model has no {part.parameter} for it")
            filled[part.parameter] += _put(model, part, reader.tensors[name], reader.path)
    model.tie_weights()
    for name, parameter in model.named_parameters():
        if filled[name] == 0 and name.endswith("bias"):
            _set(model, name, torch.zeros_like(parameter, device="cpu"))
        elif filled[name] != parameter.numel():
            raise LoadError(f"{reader.path} lacks weights of {name}: it is incomplete, make it again")


def converted(tensor: StoredTensor, part: Part) -> Tensor:
    """The float32 numbers of a tensor as they lie in `part.place` of the parameter."""
    numbers = floats(tensor)
    value = torch.from_numpy(numbers if numbers.flags.writeable else numbers.copy())  # not the file itself
    if part.rows is not None:
        value = value.index_select(_axis(tensor.name, value.dim()), part.rows)
    if part.plus:
        value += part.plus
    return value.transpose(-1, -2) if part.flipped else value


def _put(model: Any, part: Part, tensor: StoredTensor, path: str) -> int:
    """Copies a tensor into its part of a parameter; how many numbers these are."""
    parameter, value = model.get_parameter(part.parameter), converted(tensor, part)
    axis = -1 if part.flipped else _axis(part.parameter, parameter.dim())
    if part.place is None:
        place, shape = parameter, parameter.shape
    else:
        if parameter.is_meta:
            parameter = _set(model, part.parameter, torch.empty_like(parameter, device="cpu"))
        place = parameter[(..., part.place) if axis == -1 else (..., part.place, slice(None))]
        shape = place.shape
    if value.numel() != shape.numel() or (value.dim() == len(shape) and value.shape != shape):
        raise LoadError(
            f"{path} has the tensor {tensor.name} of {tuple(value.shape)}, and {tuple(shape)} belong there: it is "
            "broken, make it again"
        )
    value = value.view(shape) if value.dim() != len(shape) else value
    if part.place is None:
        _set(model, part.parameter, value.to(parameter.dtype).contiguous())
    else:
        place.copy_(value)
    return shape.numel()


def _axis(name: str, dimensions: int) -> int:
    """The dimension of a parameter's, or tensor's, rows."""
    return -1 if dimensions == 1 or name.endswith("bias") else -2


def _set(model: Any, name: str, value: Tensor) -> Tensor:
    module, _, leaf = name.rpartition(".")
    parameter = nn.Parameter(value, requires_grad=value.is_floating_point())
    setattr(model.get_submodule(module), leaf, parameter)
    return parameter
