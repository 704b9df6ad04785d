"""The attributes of a model that caches, backends and probes use, without the class that has them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from specdec.models.cache.session import Session
from specdec.models.capability import Capability


class ModelSpec(Protocol):
    """A transformers `model` and how to run it; `LanguageModel` implements this and documents each attribute."""

    model: Any
    config: Any
    capability: Capability
    input_names: frozenset[str]
    vocab_size: int
    max_positions: int | None
    device: torch.device
    dtype: torch.dtype
    is_encoder_decoder: bool
    is_strict: bool
    sees: bool

    @property
    def decoder(self) -> Any: ...
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
    def see(self) -> Any: ...
    def session(self) -> Session: ...
    def with_capability(self, model: Any, capability: Capability) -> ModelSpec: ...
    def check_attentions(self, *, drafted: bool = False, branched: bool = False) -> None: ...
    def looked_up(self, query: Tensor, key: Tensor) -> AbstractContextManager[None]: ...
    def scaled(self, spans: Tensor | None) -> AbstractContextManager[None]: ...
