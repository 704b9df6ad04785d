"""Passes without padding over the new nodes of all rows, recorded where that can be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from specdec.core.drafts import Chained, ChainRule
from specdec.core.work import Work
from specdec.errors import UnsupportedError
from specdec.models.backends.frame_encoder import FrameEncoder
from specdec.models.backends.fused_layers import fused
from specdec.models.backends.packed_layers import alike
from specdec.models.backends.ragged_inputs import PassInputs, RowNodes, StepInputs
from specdec.models.backends.ragged_model import POSITIONS, RaggedModel
from specdec.models.backends.recorded import draft_chain, record
from specdec.models.cache.layout import ColumnMap
from specdec.models.hf.model_state import runs_other_code
from specdec.models.hf.private_api import CACHE, gives_hidden_states, per_layer
from specdec.models.hf.sides import trial_ids
from specdec.models.probe import trial_encoding
from specdec.models.protocols import ModelSpec

_TOKENS = 12  # a trial has so many


class RaggedForward:
    """A model's ragged passes; UnsupportedError for models that cannot run so."""

    def __init__(self, language: ModelSpec) -> None:
        if reason := _obstacle(language):
            raise UnsupportedError(f"{type(language.model).__name__} {reason}")
        self._language = language
        self._no_nodes = torch.empty(0, dtype=torch.long, device=language.device)
        self.model = RaggedModel(language)
        try:
            trial, expected = self._trial()
            logits = self._trial_logits(trial)
            self.fused = fused(self.model, [language.model], partial(self._trial_logits, trial))
            self.fused.cuts &= not self._runs_other_code
        except Exception as error:  # whatever an architecture raises: it does not run so
            raise UnsupportedError(f"{type(language.model).__name__} does not attend as others do ({error})") from error
        blind = max(kind.first for kind in language.capability.kinds)  # nodes that see nothing
        if not alike(logits[blind:], expected[blind:], language.model):
            raise UnsupportedError(f"{type(language.model).__name__} gives other logits with attention of our own")

    @cached_property
    def recorded(self) -> Any:
        """The recorded passes; None for models that cannot be recorded, or in which a caller's code runs."""
        records = self._language.capability.records and not self._runs_other_code
        return record(self.fused) if records else None

    @property
    def _runs_other_code(self) -> bool:
        """Whether a caller changed what the model runs, as by hooks, which see all nodes."""
        return not self._language.is_owned and runs_other_code(self._language.model)

    @cached_property
    def frame_encoder(self) -> FrameEncoder | None:
        """What runs Whisper's encoder; None for other models."""
        return FrameEncoder.of(self.model.model, [self._language.model])

    def __call__(
        self, inputs: PassInputs, layers: bool | Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Logits `[logit nodes, vocab]`, and each layer's hidden state `[nodes, width]`, or None if not in `layers`.

        True stands for all layers.
        """
        inputs = self._cut(inputs, bool(layers))
        if self.recorded is None:
            logits, hidden = self.fused.output(inputs, layers or False)
            return logits[0], tuple(None if state is None else state[0] for state in hidden)
        state_nodes = self._state_nodes(inputs.ids.shape[1], layers)
        logits, *states = self.recorded.run(inputs._replace(state_nodes=state_nodes).tensors)
        pairs = zip(states, state_nodes, strict=True) if layers else ()
        return logits[0], tuple(None if nodes is self._no_nodes else state[0] for state, nodes in pairs)

    @property
    def draft_chains(self) -> bool:
        """Whether `draft_chain` works: on recorded passes, with tokens or an embedding table as inputs."""
        return self.recorded is not None and (not self.model.reads_embeds or self._embeddings is not None)

    def draft_chain(self, inputs: PassInputs, steps: StepInputs, rules: Sequence[ChainRule]) -> Chained:
        """Drafts a chain after the node with logits of every row, by up to `steps` more passes."""
        embeddings = self._embeddings
        nodes = [self._no_nodes if embeddings is None else inputs.logit_nodes] * self.model.states
        inputs = self._cut(inputs, embeddings is not None)
        rules = [rule._replace(width=min(rule.width, self._language.vocab_size)) for rule in rules]
        return draft_chain(self.recorded, inputs._replace(state_nodes=nodes), steps, rules, embeddings)

    def _cut(self, inputs: PassInputs, returns: bool) -> PassInputs:
        """The inputs with the nodes that the last layer computes to its end: all if a pass `returns` hidden states."""
        if returns or not self.fused.cuts:
            return inputs
        return inputs._replace(last=inputs.logit_nodes, logit_nodes=torch.arange(len(inputs.logit_nodes)))

    @property
    def _embeddings(self) -> Tensor | None:
        """The embedding table of a head, as `PackedLinear.table`; None for models that read tokens."""
        return self._language.model.embedding.table if self.model.reads_embeds else None

    def _state_nodes(self, count: int, layers: bool | Sequence[int]) -> list[Tensor]:
        """The nodes whose hidden states are returned, by layer: all `count` for `layers`, none for other layers."""
        if not layers:
            return [self._no_nodes] * self.model.states
        all_nodes, states = torch.arange(count, device=self._no_nodes.device), range(self.model.states)
        return [all_nodes if layers is True or layer in layers else self._no_nodes for layer in states]

    @torch.no_grad()
    def _trial(self) -> tuple[list[PassInputs], Tensor]:
        """Two passes over a text, and the model's own logits of it; notes the shapes of keys and values."""
        language = self._language
        ids = trial_ids(language.num_ids, _TOKENS).to(language.device)
        text, frames = DynamicCache(), DynamicCache()
        call: dict[str, Any] = {CACHE: text}
        call["inputs_embeds" if self.model.reads_embeds else self.model.prefix + "input_ids"] = self.model.inputs(ids)
        encoding = trial_encoding(language)
        if encoding is not None:
            call[CACHE] = EncoderDecoderCache(text, frames)
            call["encoder_outputs"] = encoding.output
        returns = gives_hidden_states(language.decoder)
        output = language.model(**call, use_cache=True, output_hidden_states=returns)
        self.model.states = len(per_layer(output, "hidden_states"))
        pairs, size = _pairs(text), _TOKENS + 1
        self.model.widths = [(keys.shape[1], keys.shape[3], values.shape[3]) for keys, values in pairs]
        buffers: Any = [tuple(side.new_zeros(2, side.shape[1], size, side.shape[3]) for side in pair) for pair in pairs]
        columns, passes = ColumnMap(), []
        for tokens in torch.tensor_split(ids[0], 2):
            work = Work.text(1, tokens.tolist(), len(tokens))
            encoders = None if encoding is None else [[0, 0, 0, encoding.hidden.shape[1]]]
            inputs = PassInputs.of([RowNodes(1, columns, work)], language.capability.kinds, language.device, encoders)
            ids = self.model.inputs(inputs.ids)
            passes.append(inputs._replace(ids=ids, buffers=buffers, frames=_pairs(frames)))
            columns.base = columns.top = columns.base + len(tokens)
        return passes, output.logits[0]

    @torch.no_grad()
    def _trial_logits(self, passes: Sequence[PassInputs]) -> Tensor:
        """The logits of passes of the trial."""
        return torch.cat([self.model.output(inputs)[0][0] for inputs in passes])


def _obstacle(language: ModelSpec) -> str | None:
    capability = language.capability
    if language.is_offloaded:
        return "has weights that are read for each pass"
    if language.device.type != "cpu":
        return "does not compute on the CPU, for which our operators are"
    if capability.cache_kind != "kv":
        return f"does not run on the buffers of keys and values ({capability.reason})"
    if capability.positions not in POSITIONS:
        return "has positions that are added to attention scores"
    if capability.boundary is not None:
        return "has rotary scaling that depends on the length"
    return None


def _pairs(cache: DynamicCache) -> list[tuple[Tensor, Tensor]]:
    return [(layer.keys, layer.values) for layer in cache.layers]
