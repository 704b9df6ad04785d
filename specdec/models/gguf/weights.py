"""A model of a GGUF file, loaded one tensor after the other: blocks as they lie, in packed layers, or as floats."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn

from specdec import kernels
from specdec.errors import LoadError
from specdec.models.backends.experts import Stack, expert_stacks, router_stacks
from specdec.models.backends.packed_layers import replaced, sharing, without_saving
from specdec.models.gguf.reader import GgufReader, StoredTensor, floats, part_names
from specdec.models.gguf.tensors import TensorPart, tensor_map
from specdec.models.hf.load_hook import with_bar

_log = logging.getLogger(__name__)
_Pieces = list[tuple[TensorPart, StoredTensor]]
_NUMBERS = {"F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64"}
"""Types of tensors that are no blocks."""


@torch.no_grad()
def read_model(reader: GgufReader, config: Any, dtype: torch.dtype, *, packs: bool = False, rounds: bool = True) -> Any:
    """Reads the model of a config of `read_config`, its weights from the file in `dtype`, ties of the config tied.

    If it `packs`, linear layers and embeddings keep the file's blocks, which needs `specdec.kernels.available`; without
    `rounds`, only layers whose rows need no rounding keep them. Raises LoadError for weights that are missing or have
    another shape; a bias that is missing is zero.
    """
    model, parts = empty_model(config, dtype), tensor_map(reader, config)
    empty = dict(model.named_parameters(remove_duplicate=False))
    counts = dict.fromkeys(empty, 0)  # how many numbers were read
    layers, rounded_kinds = dict[str, kernels.PackedLinear](), Counter[str]()
    mapped = kernels.Mapped(part_names(reader.path))
    matrices = _pieces_of_experts(model, parts, reader) if packs else {}
    for name, tensor_parts in with_bar(parts.items(), "Loading weights"):
        for part in tensor_parts:
            if part.parameter not in empty:
                raise LoadError(f"{reader.path} has the tensor {name}, and the model has no {part.parameter} for it")
            tensor = reader.tensors[name]
            stack, pieces = matrices.get(part.parameter, (None, []))
            if stack and part is pieces[0][0] and (layer := _packed_blocks(stack, pieces, rounds)):
                layers[part.parameter], counts[part.parameter] = layer, stack.parameter.numel()
            if part.parameter in layers:
                continue
            if packs and _is_packable(model, part, tensor):
                kind = tensor.tensor_type.name
                if kind not in kernels.BLOCKS:
                    rounded_kinds[kind] += 1
                if kind in kernels.IN_FLOATS or rounds:
                    layers[part.parameter] = _packed(tensor, part, rounds)
                    counts[part.parameter] = empty[part.parameter].numel()
                    continue
            counts[part.parameter] += _put(model, part, tensor, reader.path)
            if stack and counts[part.parameter] == stack.parameter.numel():
                layers[part.parameter] = layer = _packed_numbers(stack, pieces, rounds)
                rounded_kinds.update([tensor.tensor_type.name] if layer.rounds else ())
                _set(model, part.parameter, torch.empty_like(stack.parameter, device="meta"))
        mapped.used(reader.tensors[name].data.nbytes)
    model.tie_weights()
    for name, parameter in model.named_parameters():
        if counts[name] == 0 and name.endswith("bias"):
            _set(model, name, torch.zeros_like(parameter, device="cpu"))
        elif counts[name] != parameter.numel():
            raise LoadError(f"{reader.path} lacks weights of {name}: it is incomplete, make it again")
    mapped.forget()
    for name, layer in layers.items():
        owner = matrices[name][0] if name in matrices else model.get_submodule(name.rpartition(".")[0])
        bias = getattr(owner, "bias", None)
        layer.bias = None if bias is None else bias.detach().float()
    put_packed(model, layers)
    if rounded_kinds:
        kinds = ", ".join(f"{count} of {kind}" for kind, count in rounded_kinds.items())
        _log.warning("%s: tensors in fewer bits than kernels know take 8 bits each (%s)", reader.path, kinds)
    return model


def empty_model(config: Any, dtype: torch.dtype) -> Any:
    """The model with its buffers, and weights of `dtype` that take no memory."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with init_empty_weights(include_buffers=False):
            model = getattr(transformers, config.architectures[0])(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def _is_packable(model: Any, part: TensorPart, tensor: StoredTensor) -> bool:
    """Whether a tensor is the whole weight, in blocks, of a linear layer or an embedding."""
    module, _, leaf = part.parameter.rpartition(".")
    owner = model.get_submodule(module)
    is_layer = type(owner) is nn.Linear or owner is model.get_input_embeddings()
    if not is_layer or leaf != "weight" or tensor.data.ndim != 2 or part.flipped or part.plus or part.place is not None:
        return False
    rows = int(tensor.shape[1]) if part.rows is None else len(part.rows)
    return owner.weight.shape == (rows, tensor.shape[0]) and tensor.tensor_type.name not in _NUMBERS


def _packed(tensor: StoredTensor, part: TensorPart, rounds: bool) -> kernels.PackedLinear:
    kind = tensor.tensor_type.name
    if kind not in kernels.BLOCKS:
        return kernels.round_weight(converted(tensor, part), 8, rounds=rounds)
    raw = torch.from_numpy(np.asarray(tensor.data))
    return kernels.pack_blocks(raw, kind, int(tensor.shape[0]), order=part.rows, rounds=rounds)


def _pieces_of_experts(
    model: Any, parts: Mapping[str, Sequence[TensorPart]], reader: GgufReader
) -> dict[str, tuple[Stack, _Pieces]]:
    """The tensors of each matrix of experts, by parameter; none if all of them are plain numbers."""
    matrices: dict[str, tuple[Stack, _Pieces]] = {name: (stack, []) for name, stack in expert_stacks(model).items()}
    for name, tensor_parts in parts.items():
        for part in tensor_parts:
            if part.parameter in matrices:
                matrices[part.parameter][1].append((part, reader.tensors[name]))
    return {} if all(_kinds(pieces) <= _NUMBERS for _, pieces in matrices.values()) else matrices


def _packed_blocks(stack: Stack, pieces: _Pieces, rounds: bool) -> kernels.PackedLinear | None:
    """The matrices over a file's blocks; None for blocks of several kinds, or of one that is not packed."""
    kind, *further_kinds = _kinds(pieces)
    sizes = {(len(tensor.data), tensor.shape[0]) for _, tensor in pieces}
    is_whole = sizes == {(stack.count, stack.inputs)} and sum(t.data.shape[1] for _, t in pieces) == stack.rows
    if further_kinds or not is_whole or kind not in (kernels.BLOCKS if rounds else kernels.IN_FLOATS):
        return None
    raw, row, begin = list[Tensor](), torch.empty(stack.rows, dtype=torch.long), 0
    for part, tensor in pieces:  # for each expert, their rows lie one behind the other
        raw.append(torch.from_numpy(np.asarray(tensor.data)))
        row[part.place or slice(None)] = torch.arange(begin, begin := begin + raw[-1].shape[1])
    order = (torch.arange(stack.count)[:, None] * stack.rows + row).flatten()
    blocks = (torch.cat(raw, 1) if len(raw) > 1 else raw[0]).flatten(0, 1)
    return kernels.pack_blocks(blocks, kind, stack.inputs, order=order, rounds=rounds)


def _packed_numbers(stack: Stack, pieces: _Pieces, rounds: bool) -> kernels.PackedLinear:
    """The matrices of a parameter that was read, rounded to 8 bits if the file has fewer."""
    is_plain = not rounds or _kinds(pieces) <= _NUMBERS
    return kernels.pack(stack.weight) if is_plain else kernels.round_weight(stack.weight, 8)


def _kinds(pieces: _Pieces) -> set[str]:
    return {tensor.tensor_type.name for _, tensor in pieces}


def put_packed(model: Any, layers: dict[str, kernels.PackedLinear]) -> None:
    """Puts packed layers, by the names of their weights, in the places of weights without memory."""
    names = sharing(model)
    stacks = expert_stacks(model) | router_stacks(model)
    for name, layer in layers.items():
        if stack := stacks.get(name):
            stack.put(layer)
            continue
        first, *tied = (place.rpartition(".")[0] for place in names[id(model.get_parameter(name))])
        replaced(model, first, layer, tied)
    if layers:
        without_saving(model)


def converted(tensor: StoredTensor, part: TensorPart) -> Tensor:
    """The float32 numbers of a tensor as they lie in `part.place` of the parameter."""
    value = torch.from_numpy(floats(tensor))
    if part.rows is not None:
        value = value.index_select(_axis(tensor.name, value.dim()), part.rows)
    if part.plus:
        value += part.plus
    return value.transpose(-1, -2) if part.flipped else value


def _put(model: Any, part: TensorPart, tensor: StoredTensor, path: str) -> int:
    """Copies a tensor into its part of a parameter; returns the count of its numbers."""
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
