"""A head's stage: a few decoder layers that run in the sessions of any language model.

For every token, a stage reads the token's embedding and a *feature* of the token before it; it writes a feature of its
own and the logits of the next token. In text, the features are made of the target's hidden states; after a guess, the
stage reads the feature that it wrote.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

from specdec.models.backends.packed_layers import PackedEmbedding
from specdec.models.cache.layout import AttentionView
from specdec.models.hf.private_api import CACHE
from specdec.models.protocols import AttentionKind


class Stage(nn.Module, ABC):
    """A stage as a model that sessions run; its inputs are embeddings and features concatenated, `[..., both widths]`.

    `config` and `kinds` (of attention) are its layers'. Features are `width` wide. The first `blind` tokens of a text
    have no feature and are masked. `vocabulary`: the target's ids of its own logits, None if it has all `vocab_size`.
    `reads`: the target's layers whose inputs it reads (their number: the input of the language head).
    `records`: its passes may be recorded, and repeated for other tokens. `proposer`: the class that runs it, None for
    `HeadProposer`.
    """

    records: ClassVar[bool] = True
    proposer: ClassVar[Any] = None
    reads: Sequence[int]
    vocabulary: Tensor | None

    def __init__(
        self,
        config: Any,
        embedding: Embedding,
        width: int,
        vocab_size: int,
        kinds: Sequence[AttentionKind],
        *,
        blind: int = 1,
        vocabulary: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.config, self.embedding, self.width, self.vocab_size = config, embedding, width, vocab_size
        self.kinds = tuple(replace(kind, first=blind) for kind in kinds)
        self.inputs = Blank(embedding.vocab_size, embedding.width + width)
        self.register_buffer("vocabulary", vocabulary, persistent=False)

    @abstractmethod
    def features(self, states: Tensor) -> Tensor:
        """The features `[tokens, width]` of the target's `states` `[tokens, layers, width]`."""

    @abstractmethod
    def write(
        self, embeds: Tensor, features: Tensor, masks: Mapping[str, Tensor], positions: Tensor, cache: Any
    ) -> Tensor:
        """The features `[rows, nodes, width]` that it writes.

        `embeds`: `[rows, nodes, hidden]`, `features`: `[rows, nodes, width]`, `masks` by kind of attention:
        `[rows, 1, nodes, end]`, `positions`: `[rows, nodes]`.
        """

    @abstractmethod
    def guess(self, written: Tensor) -> Tensor:
        """Logits `[..., vocabulary]` of the next token, from the features that it wrote."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights."""
        return self.inputs.blank.dtype

    def get_decoder(self) -> nn.Module:
        """Itself, for the protocol of models."""
        return self

    def get_input_embeddings(self) -> Blank:
        """The blank inputs, which the session replaces by embeddings and features."""
        return self.inputs

    def get_output_embeddings(self) -> Any:
        """An object with the width of its logits."""
        return SimpleNamespace(out_features=self.vocab_size)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Mapping[str, Tensor] | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool = False,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, and as hidden states the features that it writes, for `[rows, nodes]` tokens as `write` has them.

        Without `inputs_embeds` (a trial of its speed), features are zero and logits are of its own vocabulary.
        """
        trial, cache = inputs_embeds is None, options.get(CACHE)
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = F.pad(self.embedding(input_ids).to(self.dtype), (0, self.width))
        embeds = inputs_embeds[..., : -self.width]
        if attention_mask is None or position_ids is None:  # new nodes in rows of equal length
            start = 0 if cache is None else cache.get_seq_length()
            keys = torch.arange(start + embeds.shape[1], device=embeds.device).expand(len(embeds), -1)
            position_ids = keys[:, start:]
            view = AttentionView(position_ids, keys, keys[:, None] <= position_ids[:, :, None])
            attention_mask = {kind.name: view.mask(kind, inputs_embeds.dtype) for kind in self.kinds}
        written = self.write(embeds, inputs_embeds[..., -self.width :], attention_mask, position_ids, cache)
        last = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.guess(written[:, last])
        if self.vocabulary is not None and not trial:
            logits = _widened(logits, self.vocabulary, self.vocab_size)
        return CausalLMOutputWithPast(logits=logits, hidden_states=(written,) if output_hidden_states else None)


def _widened(logits: Tensor, ids: Tensor, width: int) -> Tensor:
    """Scatters `logits` `[..., ids]` of these tokens into `[..., width]`; the others are -inf."""
    scattered = logits.new_full((*logits.shape[:-1], width), float("-inf"))
    scattered[..., ids] = logits
    return scattered


class Blank(nn.Module):
    """Zeros `[..., width]` for ids `[...]`, which sessions replace by a stage's inputs."""

    blank: Tensor

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = vocab_size, width
        self.register_buffer("blank", torch.zeros(width, device="cpu"), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.blank.expand(*ids.shape, -1)


class Embedding:
    """Looks tokens up in a weight `[vocab, width]` or the target's module; `as_stored`: without the module's scaling.

    It is not an `nn.Module`, so that the target's weights are not among the head's, nor stored with them.
    """

    def __init__(self, table: Any, *, as_stored: bool = True) -> None:
        weight = table if isinstance(table, Tensor) else getattr(table, "weight", None)
        shape = (table.num_embeddings, table.embedding_dim) if weight is None else weight.shape
        self.vocab_size, self.width = int(shape[0]), int(shape[1])
        self._look_up: Any = table
        self._stored: Any = None
        if isinstance(table, PackedEmbedding):
            if as_stored or table.scale is None:
                self._look_up, self._stored = table.head.rows, table.head
        elif weight is not None and not weight.is_meta:
            looks_up_alone = type(table) is nn.Embedding and not table._forward_hooks and "forward" not in vars(table)
            if as_stored or looks_up_alone:
                self._look_up, self._stored = partial(F.embedding, weight=weight), weight

    def __getstate__(self) -> dict[str, int]:
        return {"vocab_size": self.vocab_size, "width": self.width}

    @property
    def table(self) -> Tensor | None:
        """The weights as in `PackedLinear.table`; None if only a module can look them up."""
        return self._stored[:, None, None] if isinstance(self._stored, Tensor) else getattr(self._stored, "table", None)

    def __call__(self, ids: Tensor) -> Tensor:
        """Embeddings `[..., width]` of ids `[...]`."""
        return self._look_up(ids)
