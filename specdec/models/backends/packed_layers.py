"""The backend of a model's layers: as loaded ("eager"), or packed ("packed").

A packed layer (`specdec.kernels`) reads its weight at the speed of the memory and sums each row in one order. Owned
models, which were loaded here, are packed in place, layer by layer. Of a caller's model a shallow copy is packed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.models.whisper.modeling_whisper import WhisperEncoder
from transformers.pytorch_utils import Conv1D

from specdec import kernels
from specdec.errors import UnsupportedError
from specdec.models.backends.experts import Stack, expert_stacks, router_stacks
from specdec.models.encoding import EncoderOutput
from specdec.models.hf.derived import shallow_copy
from specdec.models.hf.device_hooks import execution_device, is_offloaded
from specdec.models.hf.probe_cache import holds
from specdec.models.hf.sides import num_ids, num_source_ids, reads_ids_alone, source_width, text_embedding, trial_ids

_log = logging.getLogger(__name__)
_LEAST = 2**21  # bytes of weights: smaller models spend their time elsewhere
_WIDTHS = (1, 6)  # nodes of the timed passes
_TRIES = 6
_WINS = 0.97  # packed passes must take less than this share of the time as loaded
_ALIKE = 0.9  # least cosine of a model's logits before and after a change
_EQUAL, _EQUAL_IN_HALF = 0.9999, 0.98  # least cosine of logits that differ by roundings


class PackedEmbedding(nn.Module):
    """An embedding over the packed weight of the head that it is tied to; some models scale its rows."""

    def __init__(self, head: kernels.PackedLinear, dtype: torch.dtype, scale: Any = None) -> None:
        super().__init__()
        self.head, self.num_embeddings, self.embedding_dim = head, head.outputs, head.inputs
        self.dtype, self.scale = dtype, scale

    def forward(self, ids: Tensor) -> Tensor:
        """`[...]` to `[..., embedding_dim]`, in `dtype`."""
        rows = self.head.rows(ids).to(self.dtype)
        if self.scale is None:
            return rows
        return rows * (self.scale.to(rows.dtype) if isinstance(self.scale, Tensor) else self.scale)


def is_packed(model: nn.Module) -> bool:
    return any(isinstance(module, kernels.PackedLinear) for module in model.modules())


def in_backend(model: Any, backend: str, *, owned: bool) -> Any:
    """The model in this backend: itself, changed only if `owned`, or a shallow copy.

    "auto" packs owned models where that makes passes faster here, which is measured once per machine and kind of model.
    Raises UnsupportedError for "packed" where that is impossible, and without kernels.
    """
    if backend == "eager" or (backend == "auto" and not owned):
        return model
    reason = why_not_packed(model)
    if backend == "packed":
        kernels.check("`backend`='packed'")
        model = model if owned or reason else shallow_copy(model)
        if reason is None and changed(model, partial(_pack, model)) is None:
            reason = "reads weights of its layers by itself, or no ids alone"
        if reason is not None:
            raise UnsupportedError(f"{type(model).__name__} {reason}: leave out `backend`='packed'")
    elif reason is None and sum(m.weight.nbytes for m in packable_layers(model).values()) >= _LEAST:
        _pack_if_faster(model)
    return model


def why_not_packed(model: Any) -> str | None:
    """Why no layer of a model can be packed; None if some can."""
    if is_offloaded(model):
        return "has weights that are read for each pass"
    if execution_device(text_embedding(model)).type != "cpu":
        return "does not compute on the CPU, for which weights are packed"
    if not (packable_layers(model) or is_packed(model)):
        return f"has no linear layers in {' or '.join(sorted(kernels.FLOATS))}"
    return None


def packable_layers(model: Any) -> dict[str, Any]:
    """Layers that can be packed, by name, and matrices of experts, each as a layer.

    Encoders that read ids are packed, since `_logits` can run them, and Whisper's encoder.
    """
    encoder = model.get_encoder() if model.config.is_encoder_decoder else None
    packs_all = encoder is None or type(encoder) is WhisperEncoder or reads_ids_alone(model)
    plain = set() if encoder is None or packs_all else set(encoder.modules())  # modules that stay as they are
    layers = {name: module for name, module in model.named_modules() if module not in plain and is_plain(module)}
    stacks = expert_stacks(model)
    return layers | {
        name: stack for name, stack in stacks.items() if stack.owner not in plain and not stack.parameter.is_meta
    }


def is_plain(module: nn.Module) -> bool:
    """Whether a module is a linear layer without hooks, whose weight can be packed."""
    if type(module) not in (nn.Linear, Conv1D) or module._forward_hooks or module._forward_pre_hooks:
        return False
    weight: Any = module.weight
    dtypes = kernels.FLOATS.values()
    return (
        type(weight) is nn.Parameter and weight.dtype in dtypes and not weight.is_meta and "forward" not in vars(module)
    )


@torch.no_grad()
def _pack(model: Any) -> Callable[[], None]:
    names = [*packable_layers(model), *router_stacks(model)]
    return pack_layers(model, names, lambda _, layer: weight_of(layer))


def layer_of(model: Any, name: str) -> Any:
    """A module, or a parameter of experts and routers as a layer, by name; raises AttributeError."""
    module, _, leaf = name.rpartition(".")
    owner = model.get_submodule(module)
    return Stack(owner, leaf) if leaf in owner._parameters else model.get_submodule(name)


def pack_layers(
    model: Any, names: Iterable[str], weight: Callable[[str, Any], kernels.Weight | kernels.PackedLinear | None]
) -> Callable[[], None]:
    """Replaces layers by packed ones; returns the undoing.

    `weight(name, layer)` is the packed layer, or the weight to pack; None leaves the layer as it is.
    """
    undo, tied, any_packed = ExitStack(), tied_embeddings(model), False
    for name in names:
        layer = layer_of(model, name)
        if (source := weight(name, layer)) is not None:
            packed = source if isinstance(source, kernels.PackedLinear) else kernels.pack(source, bias=layer.bias)
            del layer, source  # frees the weight
            undo.callback(replaced(model, name, packed, tied.get(name, ())))
            any_packed = True
    if any_packed:
        undo.callback(without_saving(model))
    return undo.close


def without_saving(model: Any) -> Callable[[], None]:
    """Makes `save_pretrained` of a model refuse, as no checkpoint can hold layers of our own; returns the undoing."""
    has_adapters = getattr(model, "_hf_peft_config_loaded", False)  # then it saves these alone
    if has_adapters or "save_pretrained" in vars(model):
        return lambda: None
    model.save_pretrained = _refuse_to_save
    return lambda: delattr(model, "save_pretrained")


def _refuse_to_save(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError(
        "`save_pretrained` cannot save this model, whose weights specdec packed or quantized into layers of its own: "
        "write them with `specdec pack`, or save a model that was loaded with `backend`='eager', without "
        "`quantization` and `gguf_file`"
    )


def weight_of(layer: Any) -> Tensor:
    """The weight `[outputs, inputs]` of a linear layer; a Conv1D holds it transposed."""
    weight: Tensor = layer.weight
    return weight.T.contiguous() if isinstance(layer, Conv1D) else weight


def replaced(model: Any, name: str, packed: kernels.PackedLinear, tied: Sequence[str]) -> Callable[[], None]:
    """Replaces a layer or embedding, and embeddings `tied` to its weight, by `packed`; returns the undoing.

    The undoing gives the layer the weight of `packed`, in the layer's dtype.
    """
    layer = layer_of(model, name)
    if isinstance(layer, Stack):
        return layer.put(packed)
    dtype, flipped = layer.weight.dtype, isinstance(layer, Conv1D)
    places = {name: layer, **{embedding: model.get_submodule(embedding) for embedding in tied}}
    for place, module in places.items():
        module.weight = None
        scale = getattr(module, "embed_scale", None)
        is_table = isinstance(module, nn.Embedding) or scale is not None
        model.set_submodule(place, PackedEmbedding(packed, dtype, scale) if is_table else packed)

    def undo() -> None:
        weight = packed.weight().to(dtype)
        shared = nn.Parameter(weight.T.contiguous() if flipped else weight, requires_grad=False)
        for place, module in places.items():
            module.weight = shared
            model.set_submodule(place, module)

    return undo


def sharing(model: Any) -> dict[int, list[str]]:
    """The names of a model's parameters by their `id`; a tied parameter has several."""
    names = dict[int, list[str]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def tied_embeddings(model: Any) -> dict[str, list[str]]:
    """Names of the embeddings that share the weight of a linear layer, by the layer's name.

    A Conv1D has none, nor has a layer whose weight other modules than embeddings share.
    """
    embeddings: dict[str, list[str]] = {}
    for names in sharing(model).values():
        modules = {place: model.get_submodule(place) for place in (name.rpartition(".")[0] for name in names)}
        tied = [place for place, m in modules.items() if type(m) is nn.Embedding or hasattr(m, "embed_scale")]
        layers = [place for place in modules if place not in tied]
        kinds = {modules[place] for place in layers}
        if tied and len(kinds) == 1 and all(is_plain(m) and not isinstance(m, Conv1D) for m in kinds):
            embeddings |= dict.fromkeys(layers, tied)
    return embeddings


def changed(model: Any, change: Callable[[], Callable[[], None]]) -> Callable[[], None] | None:
    """Applies `change`, which returns its undoing, to a model; returns that undoing.

    Returns None, with the change undone, if the model then fails or gives other logits, and for models that read no
    ids alone, which cannot be compared.
    """
    try:
        expected = _logits(model, encodes=True)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever an architecture raises
        return None
    undo = change()
    with suppress(Exception):  # some models read weights of layers that were replaced, or change a layer's dtype
        # Roundings may grow in half precision, but a layer used in another way gives quite other logits.
        if likeness(_logits(model, encodes=True), expected) > _ALIKE:
            return undo
    undo()
    return None


def likeness(logits: Tensor, expected: Tensor) -> float:
    """The cosine of all `logits` of a pass and the `expected` ones, both `[..., vocab]`."""
    return float(torch.cosine_similarity(logits.flatten().float(), expected.flatten().float(), dim=0))


def alike(logits: Tensor, expected: Tensor, model: nn.Module) -> bool:
    """Whether logits `[..., vocab]` are the expected ones, but for half precision and rows in 8 bits."""
    rounds = any(isinstance(module, kernels.PackedLinear) and module.rounds for module in model.modules())
    is_exact = expected.dtype in (torch.float32, torch.float64) and not rounds
    least = _EQUAL if is_exact else _EQUAL_IN_HALF
    ruled_out = torch.minimum(logits.float(), expected.float()) == -math.inf  # what a draft's head leaves out
    return likeness(logits.masked_fill(ruled_out, 0), expected.masked_fill(ruled_out, 0)) >= least


def _pack_if_faster(model: Any) -> None:
    """Packs a model if there are kernels, and undoes that if its passes become slower."""
    if not kernels.available():
        return
    processor = f"{kernels.instructions()}, {torch.get_num_threads()} threads"
    what = ["packed passes are faster", processor, type(model).__name__]
    what += sorted(
        f"{type(m).__name__} {list(m.weight.shape)} {m.weight.dtype}" for m in packable_layers(model).values()
    )

    def faster() -> bool:
        try:
            before = _seconds(model)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # as in `changed`
            return False
        undo = changed(model, partial(_pack, model))
        if undo is None:
            return False
        after = _seconds(model)
        _log.debug("passes take %.1f ms as loaded and %.1f ms over packed weights", 1e3 * before, 1e3 * after)
        if after >= _WINS * before:
            undo()
        return after < _WINS * before

    # A trial that ran just now has packed the model; one of an earlier process has not.
    if holds("\n".join(what), faster) and packable_layers(model):
        _pack(model)


def _seconds(model: Any) -> float:
    """Seconds of short passes, the fastest of each width."""
    return sum(kernels.best_seconds(partial(_logits, model, width), _TRIES) for width in _WIDTHS)


@torch.no_grad()
def _logits(model: Any, width: int = _WIDTHS[-1], *, encodes: bool = False) -> Tensor:
    """The logits of a pass over `width` tokens; `encodes`: through the encoder, if it reads ids."""
    ids, inputs = trial_ids(num_ids(model), width), dict[str, Any]()
    if not model.config.is_encoder_decoder:
        inputs["input_ids"] = ids
    else:
        inputs["decoder_input_ids"] = ids
        if encodes and reads_ids_alone(model):
            inputs["input_ids"] = trial_ids(num_source_ids(model), width)
        else:
            hidden = torch.ones(1, 8, source_width(model), dtype=model.dtype)
            inputs["encoder_outputs"] = EncoderOutput(last_hidden_state=hidden)
    logits: Tensor = model(**inputs, use_cache=False).logits
    return logits.float()
