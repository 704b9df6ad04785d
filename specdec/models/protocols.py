"""Interfaces between the layers of this folder: how a model runs, its sessions, and a model's attributes.

`ModelSpec` has the attributes of a model that caches, backends and probes use, without importing the class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from specdec.core.drafts import Chained, ChainRule
from specdec.core.work import Logits, Work
from specdec.errors import UnsupportedError
from specdec.models.encoding import Encoding

CacheKind = Literal["kv", "replay", "none"]
Positions = Literal["ids", "embedding", "bias", "alibi", "native"]
Pair = tuple[Tensor, Tensor]
Prefix = list[Pair]
"""Keys and values of a text, per layer `[heads, tokens, head width]`; shorter where last layers share others' keys."""


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """A kind of attention layer: its name in the mask dict, and what of the past it sees (None: everything).

    `first` is the first visible position.
    """

    name: str
    window: int | None = None
    chunk: int | None = None
    first: int = 0

    def first_seen(self, positions: Any) -> Any:
        """The first position that nodes at `positions` see; tensors and arrays alike."""
        if self.window is not None:
            begins = positions - self.window + 1
        elif self.chunk is not None:
            begins = positions // self.chunk * self.chunk
        else:
            begins = positions * 0
        return begins.clip(self.first)


@dataclass(frozen=True, slots=True)
class Capability:
    """How sessions run one model; lengths are in tokens.

    `cache_kind`: our own keys and values ("kv"), the library's cache with snapshots ("replay"), or no cache at all.
    `positions`: an argument of the forward, looked up by a wrapper, or left to the model ("native"). `inputs`: token
    ids, or embeddings for heads. `masks`: one mask for all layers, or a dict by layer kind (`kinds`). `chunks`: whether
    one pass takes several more tokens of a text. `boundary`: the length of text where rotary scaling changes; each node
    then has a span (`hf.positions`). `cache_reset_length`: the length beyond which the library drops its cache, once,
    and reads the text again. `padding`: the padding id after which positions count, and which is the position of each
    padding token; None where they count from 0 (`places`). `records`: passes may be recorded, and repeated for other
    tokens. `reason`: why, for errors and reports.
    """

    cache_kind: CacheKind
    positions: Positions = "native"
    masks: Literal["single", "dict"] = "single"
    kinds: tuple[AttentionKind, ...] = (AttentionKind("full_attention"),)
    chunks: bool = True
    boundary: int | None = None
    cache_reset_length: int | None = None
    inputs: Literal["ids", "embeds"] = "ids"
    padding: int | None = None
    records: bool = True
    reason: str = ""

    def places(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The `position_ids` of tokens `ids` at these `positions`, both `[rows, nodes]`."""
        if self.padding is None:
            return positions
        return torch.where(ids == self.padding, self.padding, positions + self.padding + 1)


class Session(ABC):
    """Rows of one model with their keys and values, and passes over them.

    `add` and `fork` return a row's number, which never changes. A row holds a text and, after its end, *pending
    branches*: a tree of nodes that may become text (beams). With a `cache_reset_length` a text that grows beyond it
    must be read again from its beginning: no node of a pass may lie beyond that length while the text does not.
    `keeps_prefixes`: whether `keep_prefix` and `read_from` work; `draft_chains`: whether `draft_chain` may work.
    """

    cache_reset_length: int | None
    keeps_prefixes = False
    draft_chains: bool = False

    def bound(self, rows: int, columns: int) -> None:
        """Bounds the session to this many rows and positions, for now."""

    @abstractmethod
    def add(self, encoding: Encoding | None = None) -> int:
        """Adds an empty row; `encoding` is its encoder output."""

    @abstractmethod
    def fork(self, row: int, length: int) -> int:
        """Adds a row with the first `length` tokens of `row`'s text, and its encoding.

        Raises OptionError if the row has fewer tokens.
        """

    def keep_prefix(self, row: int, length: int) -> Prefix:
        """Copies the keys and values of the first `length` tokens, which must be settled text.

        Raises UnsupportedError, as `read_from` does, unless the session `keeps_prefixes`.
        """
        raise UnsupportedError(f"{type(self).__name__} cannot copy prefixes: check `keeps_prefixes`")

    def read_from(self, prefix: Prefix, length: int, shift: int = 0) -> int:
        """Adds a row with the first `length` tokens of a kept prefix, whose positions go on by `shift`."""
        raise UnsupportedError(f"{type(self).__name__} cannot read prefixes: check `keeps_prefixes`")

    @abstractmethod
    def remove(self, rows: Sequence[int]) -> None:
        """Removes these rows; no other row changes."""

    @abstractmethod
    def length(self, row: int) -> int:
        """Tokens of the row's text."""

    @abstractmethod
    def run(
        self, works: Sequence[Work], *, hidden: bool | Sequence[int] = False, attentions: bool = False
    ) -> list[Logits]:
        """One pass over the new nodes of these rows, several where the model cannot run all in one; commits nothing.

        `hidden`: True to return the hidden states of all layers, or the numbers of layers, as transformers counts. Rows
        without a work, and works without new nodes, cost nothing.
        """

    def draft_chain(
        self,
        rows: Sequence[int],
        texts: Sequence[list[int]],
        rules: Sequence[ChainRule],
        embeds: Sequence[Tensor] | None = None,
    ) -> Chained | None:
        """Extends texts and drafts a chain after each by its rule, in one call; None where that is not possible.

        Rows then hold all guesses but the last. `embeds` `[tokens, width]` of each text are for models that read them.
        """
        return None

    @abstractmethod
    def commit(
        self,
        rows: Sequence[int],
        paths: Sequence[list[int]],
        *,
        num_texts: Sequence[int] | None = None,
        final: bool = True,
    ) -> None:
        """Keeps the nodes `paths[i]` of the row's last tree, parents first, and drops the others.

        The first `num_texts[i]` of them (None: all) are a chain that extends the text, the others pending branches.
        `final=False`: they are guesses, which `truncate` may take back.
        """

    def refresh(self, rows: Sequence[int]) -> None:
        """Empties the rows whose text has reached `cache_reset_length`, if they must be fed their text again."""

    @abstractmethod
    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Cuts texts to `lengths[i]` tokens, and drops the branches of texts that were longer."""


class ModelSpec(Protocol):
    """A transformers `model` and how to run it; `LanguageModel` implements this and documents each attribute."""

    model: Any
    config: Any
    capability: Capability
    input_names: frozenset[str]
    prefix: str
    vocab_size: int
    num_ids: int
    source_names: frozenset[str]
    max_positions: int | None
    device: torch.device
    dtype: torch.dtype
    is_encoder_decoder: bool
    is_strict: bool
    is_owned: bool
    reads_media: bool

    @property
    def decoder(self) -> Any: ...
    @property
    def ragged(self) -> Any: ...
    @property
    def logits_argument(self) -> str | None: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def is_offloaded(self) -> bool: ...
    @property
    def forgets_order(self) -> bool: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    def load_media_modules(self) -> Any: ...
    def session(self) -> Session: ...
    def project(self, encoding: Encoding) -> list[tuple[Tensor, Tensor]]: ...
    def check_attentions(self, *, drafted: bool = False, branched: bool = False) -> None: ...
    def lookup(self, query: Tensor, key: Tensor) -> AbstractContextManager[None]: ...
    def scaling(self, spans: Tensor | None) -> AbstractContextManager[None]: ...
