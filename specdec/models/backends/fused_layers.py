"""Layers of the Llama family and of Whisper's decoder as few calls: norms, attention, gated products, whole layers.

A trial says what can be fused. In its passes, each module that looks like one of the family is compared with a call
that should compute the same. Where all results are equal, bit for bit, the call takes the place of the module's
`forward`; all other modules stay as they are, and those that a caller gave hooks or methods. As short passes do not
show what differs far on in a text, only model types are tried that tests compare.

Packed layers that read the same input are joined: query, key and value, or gate and up. A call costs microseconds
before any weight is read, which adds up in a pass over one token. The weights of joined layers lie in one piece, and
the single layers hold views of it. They may round in another way in passes over many rows, where they are one matrix
product.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from specdec import kernels
from specdec.kernels import LAYER_TENSORS, PackedLinear, part
from specdec.models.backends.ragged_model import THREAD_PASS, RaggedModel, Sigmoid, Tanh, thread_values
from specdec.models.hf.derived import shallow_copy
from specdec.models.hf.model_state import runs_other_code
from specdec.models.hf.private_api import CACHE

_log = logging.getLogger(__name__)
_TYPES = {
    *("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma", "gemma2", "gemma3_text", "granite"),
    *("olmo2", "mixtral", "qwen3_moe", "stablelm", "cohere"),  # in parts
    "whisper",
}
_NAMES = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_pytorch_tanh"}
_ACTIVATIONS: dict[type[Any], str] = {type(ACT2FN[name]): kind for name, kind in _NAMES.items()}
_ACTIVATIONS |= {Sigmoid: "sigmoid", Tanh: "tanh"}
_JOINED: WeakValueDictionary[tuple[int, ...], PackedLinear] = WeakValueDictionary()
"""Joined layers by the addresses of their parts: other models over the same layers reuse them."""
_ALONE = None, None, False  # without norms before and after, not added to the input


class _Norm:
    """The `forward` of an RMS norm; families differ in what becomes of its weight, and in when they round."""

    def __init__(self, weight: Tensor, module: Any) -> None:
        eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
        self.part = part("Norm", weight, eps)

    def __call__(self, x: Tensor) -> Tensor:
        return kernels.norm(self.part, x)  # type: ignore[no-any-return]

    @classmethod
    def kinds(cls, module: Any) -> list[Callable[[], _Norm]]:
        weight = module.weight.detach()
        return [partial(cls, form, module) for form in (weight, weight.float(), 1.0 + weight.float())]


class _Attention:
    """The `forward` of an attention module."""

    def __init__(self, index: int, layers: Sequence[PackedLinear], out: PackedLinear, *options: Any) -> None:
        self.index, self.layers = index, layers  # keeps joined layers, which others share
        self.options = list(map(_linear, layers)), _linear(out), *options
        self.part = part("Attention", *self.options, *_ALONE)

    def run(self, part: Any, x: Tensor, turns: tuple[Tensor, Tensor], table: Tensor, text: Any) -> Tensor:
        return kernels.attention(part, x, *turns, table, *text.buffers[self.index])  # type: ignore[no-any-return]

    def __call__(
        self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, **inputs: Any
    ) -> tuple[Tensor, None]:
        return self.run(self.part, hidden_states, position_embeddings, attention_mask, inputs[CACHE]), None


class _Gated:
    """The `forward` of a product of a gate and what it lets through."""

    def __init__(self, layers: Sequence[PackedLinear], is_apart: bool, down: PackedLinear, activation: Any) -> None:
        name, scale = _ACTIVATIONS[type(activation)], getattr(activation, "scale", 1.0)
        self.layers = layers  # as in _Attention
        self.options = list(map(_linear, layers)), is_apart, _linear(down), name, scale
        self.part = part("Gated", *self.options, *_ALONE)

    def __call__(self, x: Tensor) -> Tensor:
        return kernels.gated(self.part, x)  # type: ignore[no-any-return]


class _Layer:
    """The `forward` of a whole layer: attention and a gated product, each between norms and added to its input.

    The last layer's product is computed only for the nodes that something reads.
    """

    is_last = False

    def __init__(self, attention: _Attention, gated: _Gated, norms: Sequence[_Norm | None]) -> None:
        parts = [norm and norm.part for norm in norms]
        self.attention, self.attention_part = attention, part("Attention", *attention.options, *parts[:2], True)
        self.gated, self.gated_part = gated, part("Gated", *gated.options, *parts[2:], True)

    def __call__(
        self, hidden_states: Tensor, attention_mask: Any, *, position_embeddings: Any, **inputs: Any
    ) -> Tensor:
        text = inputs[CACHE]
        x = self.attention.run(self.attention_part, hidden_states, position_embeddings, attention_mask, text)
        return kernels.gated(self.gated_part, x.index_select(1, text.last) if self.is_last else x)  # type: ignore[no-any-return]


class _Crossed:
    """The `forward` of a layer that attends over the text and over an encoder's frames, as Whisper's."""

    def __init__(self, layers: Sequence[PackedLinear], module: Any) -> None:
        text, frames = module.self_attn, module.encoder_attn
        self.index, self.layers = text.layer_idx, layers  # as in _Attention
        projections = text.out_proj, frames.q_proj, frames.out_proj, module.fc1, module.fc2
        norms = [module.self_attn_layer_norm, module.encoder_attn_layer_norm, module.final_layer_norm]
        [(eps, scale, heads)] = {(norm.eps, side.scaling, side.num_heads) for norm in norms for side in (text, frames)}
        tensors = [tensor.detach() for norm in norms for tensor in (norm.weight, norm.bias)]
        name = _ACTIVATIONS[type(module.activation_fn)]
        linears = list(map(_linear, layers)), list(map(_linear, projections))
        self.part = part("Crossed", *linears, tensors, eps, scale, heads, name)

    def __call__(self, hidden_states: Tensor, attention_mask: Any, *_: Any, **inputs: Any) -> Tensor:
        cache, table = inputs[CACHE], THREAD_PASS.cross
        frames = cache.cross_attention_cache.layers[self.index]
        sides = *cache.self_attention_cache.buffers[self.index], table, frames.keys, frames.values
        return kernels.crossed(self.part, hidden_states, attention_mask, *sides)  # type: ignore[no-any-return]


class _Trial:
    """Compares modules of a model with calls that should give the same, in passes that the model runs meanwhile.

    `calls` holds, by module, the call that gave the same until now, or None. Layers are joined in the second pass, for
    calls that gave the same in the first one.
    """

    def __init__(self, model: nn.Module, copies: Sequence[nn.Module], notes: Any) -> None:
        self.calls, self._copies, self._notes = dict[str, Any](), copies, notes
        modules = [(name, module) for name, module in model.named_modules() if name and not runs_other_code(module)]
        self.hooks = [m.register_forward_hook(partial(self._compare, name), with_kwargs=True) for name, m in modules]

    def _compare(self, name: str, module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
        earlier, self._joins = self.calls.get(name), name in self.calls
        if self._joins and earlier is None:
            return
        self.calls[name] = None
        for maker in [lambda: earlier] if isinstance(earlier, _Norm) else self._makers(name, module):
            try:
                call = maker()
                result = call(*arguments, **keywords)
                pair = (result[0], output[0]) if isinstance(output, tuple) else (result, output)
                if torch.equal(*pair):
                    self.calls[name] = call
                    return
            except Exception as error:  # whatever a module of another family lacks
                _log.debug("%s is not fused: %r", name, error)

    def _makers(self, name: str, module: Any) -> Sequence[Callable[[], Any]]:
        """Makers of calls that may be a module's."""
        children = dict(module.named_children())
        if not children and getattr(module._parameters.get("weight"), "ndim", 0) == 1:
            return _Norm.kinds(module)
        if module in self._notes:
            return [partial(self._attention, name, module, children)]
        if "down_proj" in children:
            return [partial(self._gated, name, children)]
        if "encoder_attn" in children:
            return [partial(self._crossed, name, module)]
        return [partial(self._layer, name, children)] if "self_attn" in children else []

    def _attention(self, name: str, module: Any, children: dict[str, Any]) -> _Attention:
        layers = self._joined(name, children, ["qkv_proj"], ["q_proj", "k_proj", "v_proj"])
        norms = [norm and norm.part for norm in self._norms(name, children, "q_norm", "k_norm")]
        return _Attention(module.layer_idx, layers, children["o_proj"], *norms, *self._notes[module])

    def _gated(self, name: str, children: dict[str, Any]) -> _Gated:
        layers = self._joined(name, children, ["gate_up_proj"], ["gate_proj", "up_proj"])
        [activation] = [child for child in children.values() if type(child) in _ACTIVATIONS]
        return _Gated(layers, "gate_up_proj" not in children, children["down_proj"], activation)

    def _layer(self, name: str, children: dict[str, Any]) -> _Layer:
        names = ["input_layernorm", "none", "post_attention_layernorm", "none"]
        if "pre_feedforward_layernorm" in children:  # Gemma's
            names[1:] = ["post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
        attention, gated = (self.calls[f"{name}.{child}"] for child in ("self_attn", "mlp"))
        return _Layer(attention, gated, self._norms(name, children, *names))

    def _crossed(self, name: str, module: Any) -> _Crossed:
        sides, children = [f"{side}_proj" for side in "qkv"], dict(module.self_attn.named_children())
        return _Crossed(self._joined(f"{name}.self_attn", children, ["qkv_proj"], sides), module)

    def _norms(self, name: str, children: dict[str, Any], *names: str) -> list[_Norm | None]:
        """The calls of these norms; None for norms that the module does not have."""
        calls = [self.calls[f"{name}.{child}"] if child in children else None for child in names]
        if any(call is None and child in children for call, child in zip(calls, names, strict=True)):
            raise TypeError("a norm of another kind")
        return calls

    def _joined(self, name: str, children: dict[str, Any], whole: list[str], parts: list[str]) -> list[PackedLinear]:
        """The layer `whole` of a module, or these `parts`, joined if they can be."""
        names = whole if whole[0] in children else parts
        layers = [children[child] for child in names]
        joined = join_layers(layers, self._copies, [f"{name}.{child}" for child in names]) if self._joins else None
        return layers if joined is None else [joined]


def fused(model: RaggedModel, copies: Sequence[nn.Module], run: Callable[[], object]) -> RaggedModel:
    """A copy of a model whose layers are as few calls as can be; `run` runs trial passes of the model.

    Tensors of layers that share an input move to one piece, in the models `copies` over the same layers, too.
    """
    config = model.model.config.get_text_config(decoder=True)
    if config.model_type not in _TYPES or getattr(config, "clip_qkv", None):
        return model
    notes = dict[nn.Module, Any]()
    with thread_values(notes=notes):
        trial = _Trial(model.model, [model.model, *copies], notes)
        try:
            run()
        finally:
            for hook in trial.hooks:
                hook.remove()
    copy: RaggedModel = shallow_copy(model)
    for name, call in trial.calls.items():
        if call is not None:
            copy.model.get_submodule(name).forward = call
        if isinstance(call, _Layer) and call.attention.index == len(model.widths) - 1:
            call.is_last = copy.cuts = True
    return copy


def join_layers(layers: Sequence[PackedLinear], copies: Sequence[Any], names: Sequence[str]) -> PackedLinear | None:
    """One layer with the outputs of all `layers`, if their weights can lie in one piece; None if not.

    The layers of these `names` in the models `copies` become views of it, too.
    """
    if not PackedLinear.can_join(layers):
        return None
    joined = _JOINED.get(_addresses(layers))
    if joined is None:
        joined = PackedLinear.join(layers)
    elif joined.way != layers[0].way:
        joined = shallow_copy(joined)
        joined.way = layers[0].way
    _JOINED[_addresses(layers)] = joined
    for name, layer in zip(names, layers, strict=True):
        for copy in copies:
            copy.get_submodule(name)._buffers.update(layer._buffers)
    return joined


def _addresses(layers: Sequence[PackedLinear]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for layer in layers for tensor in layer.buffers())


def _linear(layer: PackedLinear) -> Any:
    if type(layer) is not PackedLinear:
        raise TypeError(f"{layer} is no packed layer")
    tensors = [layer._buffers[name] for name in LAYER_TENSORS]
    return part("Linear", tensors, layer.outputs, layer.way, layer.likely, layer.rounds)
