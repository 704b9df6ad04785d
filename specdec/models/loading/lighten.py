"""Drafts in fewer bits than they are stored in: their passes get cheaper, and rounding cannot change a text."""

from __future__ import annotations

import logging
from copy import deepcopy
from typing import Any

import torch

from specdec import kernels
from specdec.models.backends.packed_layers import (
    PackedEmbedding,
    changed,
    pack_layers,
    packable_layers,
    weight_of,
    why_not_packed,
)
from specdec.models.cache.buffers import free_bytes
from specdec.models.hf.derived import shallow_copy
from specdec.models.hf.probe_cache import holds

_log = logging.getLogger(__name__)
_LEAST = 2**26  # weights: passes of smaller models spend their time elsewhere, and roundings hurt them more
_LARGE = 2**16  # tokens
_SAMPLE = (16, 2048, 4096)  # layers that are timed, and their sizes: more than caches hold
_RUNS = 12  # of which the fastest counts, as other programs disturb most


def lightened(model: Any, *, owned: bool) -> Any:
    """The draft model with linear layers in 4 bits, or in 8 where these are faster.

    Its head computes the first third of a large vocabulary first, where tokenizers have their most frequent tokens, and
    the rest only where none of these is sure. Changes the model if `owned`, and else a copy. Returns it as it is where
    that brings nothing: elsewhere than on a CPU with kernels, in float16, for fewer than 64 million weights, and where
    memory has no room for the copy.
    """
    if why_not_packed(model) is not None or not kernels.available():
        return model
    layers, blocks = packable_layers(model), _blocks(model)
    count = sum(layer.weight.numel() for layer in layers.values())
    count += sum(layer.inputs * layer.outputs for layer in blocks.values())
    if count < _LEAST:
        return model
    if not owned and free_bytes(torch.device("cpu")) < 2 * count:
        _log.warning("the draft keeps its weights as they are: memory has no room for a copy of them in fewer bits")
        return model
    model, bits = model if owned else shallow_copy(model), 4 if _four_bits_are_faster() else 8

    def rounded(_: str, layer: Any) -> kernels.PackedLinear:
        return kernels.round_weight(weight_of(layer), bits, layer.bias)

    changed(model, lambda: pack_layers(model, list(layers), rounded))
    for name, layer in blocks.items():
        if layer.kind not in ("int4", f"int{bits}"):
            model.set_submodule(name, kernels.round_weight(layer.weight(), bits, layer.bias))
    head = model.get_output_embeddings()
    if isinstance(head, kernels.PackedLinear) and head.rounds and head.outputs >= _LARGE:
        head.likely = head.outputs // 96 * 32
    return model


def _blocks(model: Any) -> dict[str, kernels.PackedLinear]:
    """The linear layers of a model that are packed already, such as a GGUF file's, by name."""
    tables = {layer.head for layer in model.modules() if isinstance(layer, PackedEmbedding)}
    packed = {name: layer for name, layer in model.named_modules() if isinstance(layer, kernels.PackedLinear)}
    return {name: layer for name, layer in packed.items() if layer not in tables}


def _four_bits_are_faster() -> bool:
    """Whether one row is multiplied faster by weights in 4 bits than in 8, which is timed once per machine."""

    def faster() -> bool:
        count, *shape = _SAMPLE
        weight = torch.linspace(-1, 1, shape[0] * shape[1], device="cpu").view(*shape)
        row = torch.ones(1, shape[1], device="cpu")

        def seconds(bits: int) -> float:
            layer = kernels.round_weight(weight, bits)
            layers = [deepcopy(layer) for _ in range(count)]
            return kernels.best_seconds(lambda: [layer(row) for layer in layers], _RUNS)

        return seconds(4) < seconds(8)

    return holds(f"4 bits are faster than 8: {kernels.instructions()}, {torch.get_num_threads()} threads", faster)
