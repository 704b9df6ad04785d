"""Fewer bits than are stored: in drafts, whose rounding cannot change a text, and in models that hear speech."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from specdec import kernels
from specdec.errors import UnsupportedError
from specdec.kernels.build import measured
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

_log = logging.getLogger(__name__)
_LEAST = 2**26  # weights: passes of smaller models spend their time elsewhere, and roundings hurt them more
_LARGE = 2**16  # tokens
_WIDE, _GAIN = 8, 1.3  # bits from which on a copy in 4 pays, and how many times fewer a copy has at least
_LEAST_HEARING = 2**24
_FRAMES = 256  # an encoder of speech reads far more at once, which other programs would interrupt while it is timed
_OF_FRAMES = ("encoder_attn.k_proj", "encoder_attn.v_proj")  # the decoder's layers that read them
# Rows -> runs, of which the fastest counts, as other programs disturb most; count and size of the timed layers: for one
# row, as in use, so many that no cache holds them.
_SAMPLES = {1: (12, 16, 2048, 4096), _FRAMES: (72, 1, 512, 2048)}


def lightened(model: Any, *, owned: bool) -> Any:
    """The draft model with the decoder's linear layers in 4 bits, or in 8 where 8 bits are faster.

    Its head computes the first third of a large vocabulary first, where tokenizers have their most frequent tokens, and
    the rest only where no token of the third is sure. Its encoder, which may be the target's, stays as it is. Changes
    the model if `owned`, and else a copy. Returns it as it is where fewer bits bring nothing: without a CPU or kernels,
    in float16, for fewer than 64 million weights, and where memory has no room for the copy.
    """
    if why_not_packed(model) is not None or (count := _count(model)) < _LEAST or not kernels.available():
        return model
    if not owned and free_bytes(torch.device("cpu")) < 2 * count:
        _log.warning("the draft keeps its weights as they are: memory has no room for a copy of them in fewer bits")
        return model
    return _in_few_bits(model if owned else shallow_copy(model), _LARGE)


def quantized(model: Any) -> Any:
    """A copy of a target's model like `lightened`'s, which drafts for it, of any size.

    Raises UnsupportedError without kernels, for a model that cannot be packed or has fewer than 8 bits already, where
    memory has no room, and where the copy's logits are others.
    """
    kernels.check("draft='quantized'")
    bits, size = _bits(model), _count(model)
    reason = why_not_packed(model) or ("has few bits already" if bits < _WIDE else None)
    if reason is None and free_bytes(torch.device("cpu")) < size:
        reason = f"has {size:,} weights, and memory has no room for a copy of them in 4 bits"
    if reason is None:
        few = _in_few_bits(shallow_copy(model), _LARGE // 2)
        if _bits(few) < bits / _GAIN:
            return few
        reason = "reads weights of its layers by itself, or has other logits in 4 bits"
    raise UnsupportedError(f"{type(model).__name__} {reason}: draft='quantized' is not for it, name another draft")


def may_draft(model: Any) -> bool:
    """Whether a copy in 4 bits drafts well for this model: it is large beside what its passes cost otherwise.

    It has floats or 8 bits on a CPU, and memory has room for twice the copy.
    """
    least = _LEAST_HEARING if _hears(model.config) else _LEAST
    if why_not_packed(model) is not None or not kernels.available() or _bits(model) < _WIDE:
        return False
    return least <= _count(model) < free_bytes(torch.device("cpu")) / 2


def _in_few_bits(model: Any, large: int) -> Any:
    """The model with its decoder's linear layers in few bits; a head of at least `large` tokens computes in parts."""
    bits, (layers, blocks) = 4 if _are_faster("int4", "int8", 1) else 8, _decoder_layers(model)
    changed(model, lambda: pack_layers(model, layers, lambda _, layer: _rounded(layer, bits)))
    for name, layer in blocks.items():
        if layer.kind not in ("int4", f"int{bits}"):
            model.set_submodule(name, kernels.round_weight(layer, bits, layer.bias))
    head = model.get_output_embeddings()
    if isinstance(head, kernels.PackedLinear) and head.rounds and head.outputs >= large:
        head.likely = head.outputs // 96 * 32
    return model


def _decoder_layers(model: Any) -> tuple[dict[str, Any], dict[str, kernels.PackedLinear]]:
    """The linear layers of a model's decoder by name: those that can be packed, and packed ones, as a GGUF file's."""
    encoder = _encoder(model)
    layers = {name: layer for name, layer in packable_layers(model).items() if layer not in encoder}
    tables = {f"{name}.head" for name, layer in model.named_modules() if isinstance(layer, PackedEmbedding)}
    modules = model.named_modules(remove_duplicate=False)
    packed = {name: layer for name, layer in modules if isinstance(layer, kernels.PackedLinear) and name not in tables}
    return layers, {name: layer for name, layer in packed.items() if layer not in encoder}


def _sizes(model: Any) -> dict[str, tuple[int, int]]:
    """How many weights each linear layer of a model's decoder has, and their bytes, by name."""
    layers, blocks = _decoder_layers(model)
    sizes = {name: (layer.weight.numel(), layer.weight.nbytes) for name, layer in layers.items()}
    for name, layer in blocks.items():
        sizes[name] = layer.inputs * layer.outputs, sum(buffer.nbytes for buffer in layer.buffers())
    return sizes


def _count(model: Any) -> int:
    """How many weights the linear layers of a model's decoder have."""
    return sum(count for count, _ in _sizes(model).values())


def _bits(model: Any) -> float:
    """Bits of a weight in the linear layers of a model's decoder that read no frames, on average."""
    if getattr(model, "is_quantized", False):  # by another library
        return 0.0
    read = [size for name, size in _sizes(model).items() if not name.endswith(_OF_FRAMES)]
    return 8 * sum(count for _, count in read) / max(sum(count for count, _ in read), 1)


def stored_dtype(config: Any) -> torch.dtype | None:
    """The dtype of a model's weights on disk if `hearing` narrows them; None of other models."""
    narrows = _hears(config) and kernels.available() and _are_faster("bfloat16", "float32", _FRAMES)
    return config.dtype if narrows else None


@torch.no_grad()
def narrowed(model: Any, files: Sequence[str]) -> None:
    """Makes a model bfloat16 whose weights are views of these files, of which only a part is in memory meanwhile."""
    mapped = kernels.Mapped(files, most=2**24)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            mapped.used(tensor.nbytes)
            tensor.data = tensor.data.to(torch.bfloat16)
    mapped.forget()


def hearing(model: Any) -> Any:
    """A model of the Whisper family in the numbers that are fastest here; any other model unchanged.

    Its numbers are bfloat16 if that is faster, and linear layers that read frames have 8 bits if these are faster. The
    word error of read speech is float32's; with 8 bits in other layers of the decoder, or in its head, it was not.
    """
    if not _hears(model.config) or why_not_packed(model) is not None or not kernels.available():
        return model
    if _are_faster("bfloat16", "float32", _FRAMES):
        model.to(torch.bfloat16)
    floats, encoder, layers = str(model.dtype).removeprefix("torch."), _encoder(model), packable_layers(model)
    names = [name for name, layer in layers.items() if layer in encoder or name.endswith(_OF_FRAMES)]
    names = names if _are_faster("int8", floats, _FRAMES) else []
    changed(model, lambda: pack_layers(model, names, lambda _, layer: _rounded(layer, 8)))
    numbers = f"{floats}{' and 8 bits' if names else ''}"
    _log.info("speech is heard in %s, the fastest here (`dtype='float32'` gives transformers' text exactly)", numbers)
    return model


def _hears(config: Any) -> bool:
    """Whether these are models of the Whisper family with enough weights in linear layers."""
    if config.model_type != "whisper" or not config.is_encoder_decoder:
        return False
    width, in_encoder, in_decoder = config.d_model, config.encoder_ffn_dim, config.decoder_ffn_dim
    inputs = config.encoder_layers * (4 * width + 2 * in_encoder) + config.decoder_layers * (8 * width + 2 * in_decoder)
    return bool(width * (inputs + config.vocab_size) >= _LEAST_HEARING)


def _rounded(layer: Any, bits: int) -> kernels.PackedLinear:
    return kernels.round_weight(weight_of(layer), bits, layer.bias)


def _encoder(model: Any) -> set[nn.Module]:
    """The modules of a model's encoder."""
    return set(model.get_encoder().modules()) if model.config.is_encoder_decoder else set()


def _are_faster(kind: str, rival: str, rows: int) -> bool:
    """Whether weights of a kind multiply so many rows faster than weights of its rival; timed once per machine."""

    def work(kind: str) -> Callable[[], object]:
        _, count, *shape = _SAMPLES[rows]
        weight = torch.linspace(-1, 1, shape[0] * shape[1], device="cpu").view(*shape)
        dtype = kernels.FLOATS.get(kind)
        layer = kernels.pack(weight.to(dtype)) if dtype else kernels.round_weight(weight, int(kind[3:]))
        x = torch.ones(rows, shape[1], dtype=dtype, device="cpu")
        layers = [deepcopy(layer) for _ in range(count)]
        return lambda: [layer(x) for layer in layers]

    def faster() -> list[int]:
        works = work(kind), work(rival)
        turns = [[kernels.best_seconds(run, 1) for run in works] for _ in range(_SAMPLES[rows][0])]
        return [int(min(seconds for seconds, _ in turns) < min(seconds for _, seconds in turns))]

    return bool(measured(f"{rows}-rows-{kind}-before-{rival}", 1, faster)[0])
