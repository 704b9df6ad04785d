"""Passes without padding: the nodes of all rows in a line, over attention of our own.

transformers' layers run as they are, on a batch of one row. Where they would attend, they find our operators, which
write each node's keys and values to its place in the buffers and read what the node's table says it sees
(`specdec.models.backends.ragged_inputs`). So rows and trees of any sizes share a pass, no mask is built, and keys are
never repeated.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from specdec import kernels
from specdec.core.drafts import Chained, ChainRule
from specdec.core.tree import Tree
from specdec.errors import UnsupportedError
from specdec.models.backends.cross_attention import Frames
from specdec.models.backends.fused_linear import join, readers
from specdec.models.backends.order_free_activations import make_order_free
from specdec.models.backends.packed_layers import likeness
from specdec.models.backends.ragged_inputs import RaggedInputs, RowNodes, StepInputs
from specdec.models.cache.layout import ColumnMap
from specdec.models.encoding import trial_encoding
from specdec.models.hf.positions import Lookup
from specdec.models.hf.private_api import gives_hidden_states, hidden_states_of
from specdec.models.hf.shallow_copy import shallow_copy

if TYPE_CHECKING:
    from specdec.models.backends.compiled import CompiledForward
    from specdec.models.language_model import LanguageModel

ATTENTION = "specdec"
_POSITIONS = {"ids": "position_ids", "decoder_ids": "decoder_position_ids", "embedding": None, "bias": None}
_TRIED = 12  # tokens that a model is tried with
_ALIKE, _ALIKE_IN_HALF = 0.9999, 0.98  # cosine of logits

Buffers = Sequence[tuple[Tensor, Tensor]]
"""Each layer's keys and values, `[rows, heads, columns, head width]`."""


class PassInputs(NamedTuple):
    """What a pass is given: the tensors of a `RaggedInputs`, the buffers of the text, and encoders' projections
    (`frames`).

    `returned` are, for each of the model's hidden states, the numbers of the nodes of which it is an output: all or
    none.
    """

    ids: Tensor
    positions: Tensor
    kept: Tensor
    tables: Sequence[Tensor]
    encoders: Sequence[Tensor]
    buffers: Buffers
    frames: Buffers
    returned: Sequence[Tensor]

    @classmethod
    def of(
        cls, inputs: RaggedInputs, buffers: Buffers, frames: Buffers = (), returned: Sequence[Tensor] = ()
    ) -> PassInputs:
        """For the nodes of a line."""
        return cls(inputs.ids, inputs.positions, inputs.kept, inputs.tables, inputs.encoders, buffers, frames, returned)

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, in the order of the fields."""
        pairs = (side for pair in (*self.buffers, *self.frames) for side in pair)
        return [self.ids, self.positions, self.kept, *self.tables, *self.encoders, *pairs, *self.returned]


class _Running(threading.local):
    """The table by which cross-attention of this thread's pass looks at the encoders: no argument would reach it."""

    cross: Tensor | None = None


_running = _Running()


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
    """The attention that transformers' layers call: of the text by the table in place of a mask, else of encoders."""
    table, biases = attention_mask, None
    if table is None:
        table = _running.cross
    elif position_bias is not None:
        biases = position_bias[0, :, 0]  # by distance: see `RaggedModel`
    assert table is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return kernels.attend(query, key, value, table, scale, softcap or 0.0, s_aux, biases), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Of the text there are tables, and of encoders too."""


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)


class _Text(Cache):  # type: ignore[misc]
    """The text's keys and values: writes those of the nodes where the table says, and hands out everything."""

    def __init__(self, buffers: Buffers, table: Tensor) -> None:
        super().__init__(layers=[])
        self._buffers, self._table = buffers, table

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """One layer's new keys and values `[1, heads, nodes, head width]`."""
        keys, values = self._buffers[layer_idx]
        kernels.store_nodes(key_states, value_states, keys, values, self._table)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are given, so nobody counts from here."""
        return 0


class RaggedModel(nn.Module):
    """A model that takes the nodes of a line, and writes to the buffers that it is given.

    Of `language`'s model nothing is changed: a shallow copy computes with our attention, and of strict ones with
    activations that do not depend on a value's place.
    """

    def __init__(self, language: LanguageModel) -> None:
        super().__init__()
        self.model = shallow_copy(language.model, attention=ATTENTION)
        if language.is_strict:
            make_order_free(self.model)
        capability, self.dtype, self.device = language.capability, language.dtype, language.device
        self.kinds = [kind.name for kind in capability.kinds] if capability.masks == "dict" else []
        self.has_encoder, self.reads_embeds = language.is_encoder_decoder, capability.inputs == "embeds"
        self._keeps = "logits_to_keep" in language.input_names
        self._positions, self._style = _POSITIONS[capability.positions], capability.positions
        self.prefix = "decoder_" if language.is_encoder_decoder else ""

    def forward(self, *given: Any) -> tuple[Tensor, ...]:
        """Logits `[1, kept, vocab]`, and every hidden state `[1, returned, width]` of the nodes in `returned`.

        The arguments are the fields of `PassInputs`, as named ones are not traced.
        """
        returned = PassInputs(*given).returned
        logits, hidden = self.output(PassInputs(*given), bool(returned))
        return logits, *(state.index_select(1, nodes) for state, nodes in zip(hidden, returned, strict=True))

    def output(self, given: PassInputs, layers: bool | Sequence[int] = False) -> tuple[Tensor, Sequence[Any]]:
        """Logits, and hidden states `[1, nodes, width]`: of these layers, None of others; nothing where none is asked.

        The layers are those of transformers' `hidden_states`, from the embeddings on.
        """
        tables, text = given.tables, _Text(given.buffers, given.tables[0])
        inputs: dict[str, Any] = {
            "inputs_embeds" if self.reads_embeds else self.prefix + "input_ids": given.ids,
            self.prefix + "attention_mask": dict(zip(self.kinds, tables, strict=True)) if self.kinds else tables[0],
            "past_key_values": text,
            "use_cache": True,
            "return_dict": True,
        }
        if self._positions is not None:
            inputs[self._positions] = given.positions
        if self._keeps:
            inputs["logits_to_keep"] = given.kept
        if given.frames:
            projected = Cache(layers=[Frames(*pair) for pair in given.frames])
            inputs["past_key_values"] = EncoderDecoderCache(text, projected)
            # Of no use, but that layers ask whether there is an encoder.
            nothing = torch.zeros(1, 1, given.frames[0][0].shape[-1], dtype=self.dtype, device=given.ids.device)
            inputs["encoder_outputs"] = BaseModelOutput(last_hidden_state=nothing)
        held, _running.cross = _running.cross, given.encoders[0] if given.encoders else None
        try:
            with self._looked_up(given.positions):
                output = self.model(**inputs, output_hidden_states=hidden_states_of(layers))
        finally:
            _running.cross = held
        hidden = output.get("hidden_states") or output.get("decoder_hidden_states") or ()
        return output.logits if self._keeps else output.logits[:, given.kept], hidden

    def inputs(self, ids: Tensor) -> Tensor:
        """For a trial, what stands for tokens `[1, nodes]`: themselves, or embeddings of some kind."""
        if not self.reads_embeds:
            return ids
        width = self.model.get_input_embeddings().embedding_dim
        return torch.sin(1.0 + ids[..., None] * torch.arange(width, device=ids.device)).to(self.dtype)

    def _looked_up(self, positions: Tensor) -> AbstractContextManager[None]:
        """While it lasts, models that take no positions find these; nothing is kept, as a copy has other modules."""
        if self._positions is not None:
            return nullcontext()
        query = key = positions
        if self._style == "bias":  # of one query to keys at every distance that differs from others
            query, key = positions.new_zeros(1, 1), -torch.arange(self._farthest() + 1, device=positions.device)[None]
        return Lookup(self.model.get_decoder(), self._style).running(query, key)

    def _farthest(self) -> int:
        layers = self.model.get_decoder().modules()
        return max(getattr(layer, "relative_attention_max_distance", 0) for layer in layers)


class RaggedForward:
    """A model's passes over nodes in a line; `widths` are heads, and head widths of keys and values, of each layer.

    `states` is how many hidden states it gives. Passes run on compiled code as soon as that is there. Raises
    UnsupportedError for models that cannot be run so.
    """

    def __init__(self, language: LanguageModel) -> None:
        if reason := _obstacle(language):
            raise UnsupportedError(f"{type(language.model).__name__} {reason}")
        self._language = language
        self._none = torch.empty(0, dtype=torch.long, device=language.device)
        self.model = RaggedModel(language)
        self.widths: list[tuple[int, int, int]] = []
        self.states = 0
        self._fusable: list[list[str]] = []
        self.compiled: CompiledForward | None = None
        try:
            agrees = self._agrees()
        except Exception as error:  # whatever an architecture raises, it means that it does not run so
            raise UnsupportedError(f"{type(language.model).__name__} does not attend as others do ({error})") from error
        if not agrees:
            raise UnsupportedError(f"{type(language.model).__name__} gives other logits with attention of our own")

    def __call__(
        self, inputs: RaggedInputs, buffers: Buffers, frames: Buffers = (), layers: bool | Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Logits `[kept, vocab]`, and hidden states `[nodes, width]` of the embeddings and every layer, None of others.

        `frames` are the projections of encoders, if there are any. `layers` are those whose hidden states are wanted,
        True for all; where there are none, none are given.
        """
        if self.compiled is None or not self.compiled.ready:
            logits, hidden = self.model.output(PassInputs.of(inputs, buffers, frames), layers or False)
            return logits[0], tuple(None if state is None else state[0] for state in hidden)
        returned = self._returned(inputs.ids.shape[1], layers)
        logits, *states = self.compiled(*PassInputs.of(inputs, buffers, frames, returned))
        wanted = zip(states, returned, strict=True) if layers else ()
        return logits[0], tuple(state[0] if len(nodes) else None for state, nodes in wanted)

    def join(self) -> None:
        """Lets packed layers that read the same input share a call."""
        for names in self._fusable:
            join(self.model.model, self._language.model, names)

    @property
    def draft_chains(self) -> bool:
        """Whether `draft_chain` can be called: on compiled code, of models that read tokens or whose embeddings
        lie open.
        """
        faster, known = self.compiled, not self.model.reads_embeds or self._embeddings is not None
        return faster is not None and faster.ready and known

    def draft_chain(
        self,
        inputs: RaggedInputs,
        steps: StepInputs,
        rules: Sequence[ChainRule],
        buffers: Buffers,
        frames: Buffers = (),
    ) -> Chained:
        """Guesses after the pass over a line, which keeps a node of every row, and after each of some `steps`."""
        assert self.compiled is not None
        embeddings = self._embeddings
        returned = self._returned(0, ()) if embeddings is None else [inputs.kept] * self.states
        rules = [rule._replace(width=min(rule.width, self._language.vocab_size)) for rule in rules]
        return self.compiled.draft_chain(PassInputs.of(inputs, buffers, frames, returned), steps, rules, embeddings)

    @property
    def _embeddings(self) -> Tensor | None:
        """Those that a head's inputs are made of, as in `AnyLinear.table`; None of models that read tokens."""
        return self._language.model.embedding.table if self.model.reads_embeds else None

    def _returned(self, count: int, layers: bool | Sequence[int]) -> list[Tensor]:
        """Of every hidden state all `count` nodes, or none."""
        none, every = self._none, torch.arange(count if layers else 0, device=self._none.device)
        return [every if layers is True or (layers and layer in layers) else none for layer in range(self.states)]

    @torch.no_grad()
    def _agrees(self) -> bool:
        """Whether a pass in two parts gives the logits of the model's own; notes what keys and values are like."""
        language, own = self._language, self._language.model
        known = own.get_input_embeddings().num_embeddings
        ids = (torch.arange(_TRIED, device=language.device) + known // 2)[None] % known  # far from special tokens
        text, frames = DynamicCache(), DynamicCache()
        given: dict[str, Any] = {"past_key_values": text}
        given["inputs_embeds" if self.model.reads_embeds else self.model.prefix + "input_ids"] = self.model.inputs(ids)
        encoding = trial_encoding(language, 1)
        if encoding is not None:
            given["past_key_values"] = EncoderDecoderCache(text, frames)
            given["encoder_outputs"] = BaseModelOutput(last_hidden_state=encoding.hidden)
        returns = gives_hidden_states(language.decoder)
        output = own(**given, use_cache=True, output_hidden_states=returns)
        self.states = len(output.get("hidden_states") or output.get("decoder_hidden_states") or ())
        self.widths = [(keys.shape[1], keys.shape[3], values.shape[3]) for keys, values in _pairs(text)]
        buffers = [
            tuple(side.new_zeros(2, side.shape[1], _TRIED + 1, side.shape[3]) for side in pair) for pair in _pairs(text)
        ]
        columns, logits = ColumnMap(), []
        for tokens in torch.tensor_split(ids[0], 2):
            tree = Tree.chain(tokens.tolist())
            nodes = RowNodes(1, columns, tree, len(tree))
            encoders = None if encoding is None else [[0, 0, 0, encoding.hidden.shape[1]]]
            inputs = RaggedInputs.of([nodes], language.capability.kinds, language.device, encoders)
            inputs = replace(inputs, ids=self.model.inputs(inputs.ids))
            with readers(self.model.model) as self._fusable:
                logits.append(self(inputs, buffers, _pairs(frames))[0])  # type: ignore[arg-type]
            columns.base = columns.top = columns.base + len(tree)
        blind = max(kind.first for kind in language.capability.kinds)  # whoever sees nothing says nothing
        return alike(torch.cat(logits)[blind:], output.logits[0, blind:])


def alike(logits: Tensor, expected: Tensor) -> bool:
    """Whether they differ by no more than roundings do."""
    least = _ALIKE if expected.dtype in (torch.float32, torch.float64) else _ALIKE_IN_HALF
    ruled_out = expected == -math.inf  # outside the vocabulary of a draft
    return likeness(logits.masked_fill(ruled_out, 0), expected.masked_fill(ruled_out, 0)) >= least


def _obstacle(language: LanguageModel) -> str | None:
    """Why a model's passes cannot run in a line, if that is known."""
    capability = language.capability
    if language.is_offloaded:
        return "has weights that are read for each pass"
    if capability.cache_kind != "kv":
        return f"does not run on the buffers of keys and values ({capability.reason})"
    if capability.positions not in _POSITIONS:
        return "has positions that are added to attention scores"
    if capability.boundary is not None:
        return "has rotary scaling that depends on the length"
    return None


def _pairs(cache: DynamicCache) -> list[tuple[Tensor, Tensor]]:
    return [(layer.keys, layer.values) for layer in cache.layers]
