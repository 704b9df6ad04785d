"""Matrices of experts of a GGUF file as packed layers: blocks as they lie, gates beside what they let through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec import kernels
from specdec.models.backends.experts import Stack, expert_stacks
from specdec.models.gguf.reader import GgufReader, StoredTensor
from specdec.models.gguf.tensors import TensorPart

Pieces = list[tuple[TensorPart, StoredTensor]]
NUMBERS = {"F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64"}
"""Types of tensors that are no blocks."""


def pieces_of_experts(
    model: Any, parts: Mapping[str, Sequence[TensorPart]], reader: GgufReader
) -> dict[str, tuple[Stack, Pieces]]:
    """The tensors of each matrix of experts, by parameter; none if all of them are plain numbers."""
    matrices: dict[str, tuple[Stack, Pieces]] = {name: (stack, []) for name, stack in expert_stacks(model).items()}
    for name, tensor_parts in parts.items():
        for part in tensor_parts:
            if part.parameter in matrices:
                matrices[part.parameter][1].append((part, reader.tensors[name]))
    return {} if all(_kinds(pieces) <= NUMBERS for _, pieces in matrices.values()) else matrices


def packed_blocks(stack: Stack, pieces: Pieces, rounds: bool) -> kernels.PackedLinear | None:
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


def packed_numbers(stack: Stack, pieces: Pieces, rounds: bool) -> kernels.PackedLinear:
    """The matrices of a parameter that was read, rounded to 8 bits if the file has fewer."""
    is_plain = not rounds or _kinds(pieces) <= NUMBERS
    return kernels.pack(stack.weight) if is_plain else kernels.round_weight(stack.weight, 8)


def _kinds(pieces: Pieces) -> set[str]:
    return {tensor.tensor_type.name for _, tensor in pieces}
