"""A model as its ragged passes run it: transformers' layers over operators of our own.

transformers' layers run as they are, on a batch of one row. Where they would attend, they call operators of
`specdec.kernels`, which write each node's keys and values into the buffers and read the columns that the node's table
lists (`specdec.models.backends.ragged_inputs`). So rows and trees of any sizes share a pass, no mask is built, and keys
are never repeated.

A strict model has activations whose results do not depend on a value's place in a tensor. torch computes most of a
tensor with vectors and the rest one by one, and for some functions the two differ in the last bit; the activations here
consist of operators for which the two agree.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, EncoderDecoderCache

from specdec import kernels
from specdec.models.backends.experts import EvenSigmoid
from specdec.models.backends.ragged_inputs import Buffers, PassInputs
from specdec.models.cache.cross_attention import Frames
from specdec.models.encoding import EncoderOutput
from specdec.models.hf.derived import shallow_copy
from specdec.models.hf.positions import Lookup
from specdec.models.hf.private_api import CACHE, hidden_states_of, per_layer
from specdec.models.hf.sides import decoder_of, source_width
from specdec.models.protocols import ModelSpec

ATTENTION = "specdec"
POSITIONS = ("ids", "embedding", "bias")

AttentionOptions = tuple[list[int], float, float, Tensor | None]
"""How a module attends over the text: numbers of heads of queries and keys, widths of keys and values; scale, softcap,
sinks."""


class _ThreadPass(threading.local):
    """What no argument brings to the layers of this thread's pass: the table for cross-attention, and where a trial
    notes how modules attend over the text."""

    cross: Tensor | None = None
    notes: dict[nn.Module, AttentionOptions] | None = None


THREAD_PASS = _ThreadPass()


@contextmanager
def thread_values(**values: Any) -> Iterator[None]:
    """Context in which this thread's passes find these values of `THREAD_PASS`."""
    before = {name: getattr(THREAD_PASS, name) for name in values}
    vars(THREAD_PASS).update(values)
    try:
        yield
    finally:
        vars(THREAD_PASS).update(before)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers' layers: over the text, whose table is the mask, or over encoders."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    table, biases = attention_mask, None
    if table is None:
        table = THREAD_PASS.cross
    elif position_bias is not None:
        biases = position_bias[0, :, 0]  # by distance: see `RaggedModel`
    assert table is not None
    if THREAD_PASS.notes is not None and attention_mask is not None and biases is None:
        sizes = [query.shape[1], key.shape[1], key.shape[3], value.shape[3]]
        THREAD_PASS.notes[module] = sizes, scale, softcap or 0.0, s_aux
    return kernels.attend(query, key, value, table, scale, softcap or 0.0, s_aux, biases), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)  # tables say what nodes see


class _Text(Cache):  # type: ignore[misc]
    """The text's keys and values: writes where the table says, and returns the buffers."""

    def __init__(self, buffers: Buffers, table: Tensor, last: Tensor) -> None:
        super().__init__(layers=[])
        self.buffers, self._table, self.last = buffers, table, last

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """One layer's new keys and values are `[1, heads, nodes, head width]`."""
        keys, values = self.buffers[layer_idx]
        kernels.store_nodes(key_states, value_states, keys, values, self._table)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are passed explicitly."""
        return 0


class RaggedModel(nn.Module):
    """A shallow copy of `language`'s model over our attention, and of a strict one over order-free activations.

    `widths` holds the heads of each layer and the head widths of its keys and values, `states` is the number of hidden
    states; both are known after a first pass. `cuts`: the last layer computes only the nodes `PassInputs.last` to its
    end.
    """

    cuts = False

    def __init__(self, language: ModelSpec) -> None:
        super().__init__()
        self.widths, self.states = list[tuple[int, int, int]](), 0
        self.model = shallow_copy(language.model, attention=ATTENTION)
        has_experts = any(hasattr(module, "_apply_gate") for module in self.model.modules())
        self._even = language.is_strict and has_experts
        if language.is_strict:
            for name, module in list(self.model.named_modules(remove_duplicate=False)):
                if type(module) in _ORDER_FREE:
                    self.model.set_submodule(name, _ORDER_FREE[type(module)])
        capability, self.dtype, self.device = language.capability, language.dtype, language.device
        self.kinds = [kind.name for kind in capability.kinds] if capability.masks == "dict" else []
        self.has_encoder, self.reads_embeds = language.is_encoder_decoder, capability.inputs == "embeds"
        self._places, self._style = capability.places, capability.positions
        self._logits_argument, self.prefix = language.logits_argument, language.prefix
        self._source_width = source_width(self.model) if self.has_encoder else 0

    def forward(self, *fields: Any) -> tuple[Tensor, ...]:
        """Logits `[1, logit nodes, vocab]`, and each hidden state `[1, nodes, width]` of its `state_nodes`.

        The arguments are the fields of `PassInputs`, positional so that they are its tensors in order.
        """
        state_nodes = PassInputs(*fields).state_nodes
        logits, hidden = self.output(PassInputs(*fields), bool(state_nodes))
        return logits, *(state.index_select(1, nodes) for state, nodes in zip(hidden, state_nodes, strict=True))

    def output(self, inputs: PassInputs, layers: bool | Sequence[int] = False) -> tuple[Tensor, Sequence[Any]]:
        """Logits, and hidden states `[1, nodes, width]` of these layers; None for other layers."""
        tables, text = inputs.tables, _Text(inputs.buffers, inputs.tables[0], inputs.last)
        arguments: dict[str, Any] = {
            "inputs_embeds" if self.reads_embeds else self.prefix + "input_ids": inputs.ids,
            self.prefix + "attention_mask": dict(zip(self.kinds, tables, strict=True)) if self.kinds else tables[0],
            CACHE: text,
            "use_cache": True,
            "return_dict": True,
        }
        if self._style == "ids":
            arguments[self.prefix + "position_ids"] = self._places(inputs.ids, inputs.positions)
        if self._logits_argument is not None:
            arguments[self._logits_argument] = inputs.logit_nodes
        if inputs.frames:
            projected = Cache(layers=[Frames(*pair) for pair in inputs.frames])
            arguments[CACHE] = EncoderDecoderCache(text, projected)
            # Unused, but layers check that an encoder exists.
            no_frames = torch.zeros(1, 1, self._source_width, dtype=self.dtype, device=inputs.ids.device)
            arguments["encoder_outputs"] = EncoderOutput(last_hidden_state=no_frames)
        cross = thread_values(cross=inputs.encoders[0] if inputs.encoders else None)
        sigmoid = EvenSigmoid() if self._even else nullcontext()
        with cross, self._position_lookup(inputs.positions), sigmoid:
            output = self.model(**arguments, output_hidden_states=hidden_states_of(layers))
        logits = output.logits if self._logits_argument else output.logits[:, inputs.logit_nodes]
        return logits, per_layer(output, "hidden_states")

    def inputs(self, ids: Tensor) -> Tensor:
        """Trial inputs for tokens `[1, nodes]`: themselves, or made-up embeddings."""
        if not self.reads_embeds:
            return ids
        width = self.model.get_input_embeddings().embedding_dim
        return torch.sin(1.0 + ids[..., None] * torch.arange(width, device=ids.device)).to(self.dtype)

    def _position_lookup(self, positions: Tensor) -> AbstractContextManager[None]:
        """Context in which models without an argument for positions find these; each model needs a `Lookup` of its
        modules."""
        if self._style == "ids":
            return nullcontext()
        query, key, decoder = positions, positions, decoder_of(self.model)
        if self._style == "bias":  # one query, and a key for each distance with another bias
            layers = decoder.modules()
            farthest = max(getattr(layer, "relative_attention_max_distance", 0) for layer in layers)
            query, key = positions.new_zeros(1, 1), -torch.arange(farthest + 1, device=positions.device)[None]
        return Lookup(decoder, self._style).running(query, key)


class Sigmoid(nn.Module):
    """`x / (1 + exp(-scale * x))`: SiLU, and with a scale of 1.702 GELU nearly (arXiv:1606.08415, section 2)."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return (x32 / (1 + torch.exp(-self.scale * x32))).to(x.dtype)


class Tanh(nn.Module):
    """GELU by way of tanh (arXiv:1606.08415, section 2)."""

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        inner = math.sqrt(2 / math.pi) * (x32 + 0.044715 * x32 * x32 * x32)
        return (0.5 * x32 * (1 + torch.tanh(inner))).to(x.dtype)


_ORDER_FREE = {
    type(ACT2FN["silu"]): Sigmoid(),
    type(ACT2FN["swish"]): Sigmoid(),
    type(ACT2FN["quick_gelu"]): Sigmoid(1.702),
    type(ACT2FN["gelu_pytorch_tanh"]): Tanh(),
}
