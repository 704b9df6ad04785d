"""The two sides of a model: what its encoder and its decoder read, each of which may be any module."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor


def input_names(side: Any) -> frozenset[str]:
    """The arguments of a side's class; a side need not be a `PreTrainedModel`, which has `main_input_name`."""
    return frozenset(inspect.signature(type(side).forward).parameters)


def encoder_inputs(model: Any) -> frozenset[str]:
    """The arguments of a model's encoder; none without an encoder."""
    return input_names(model.get_encoder()) if model.config.is_encoder_decoder else frozenset()


def num_ids(model: Any) -> int | None:
    """How many ids a model's text may hold: the size of the embedding that its decoder reads; None if it has none."""
    return _num_ids(model.get_decoder() if model.config.is_encoder_decoder else model)


def num_source_ids(model: Any) -> int | None:
    """How many ids a model's encoder reads; None without an encoder, or if that looks up no ids."""
    return _num_ids(model.get_encoder()) if "input_ids" in encoder_inputs(model) else None


def _num_ids(side: Any) -> int | None:
    embedding = getattr(side, "embed_tokens", None)
    with suppress(AttributeError, NotImplementedError):  # of modules, and of models that look up hashes of ids
        embedding = side.get_input_embeddings()
    count = getattr(embedding, "num_embeddings", None)
    return None if count is None else int(count)


def source_width(model: Any) -> int:
    """The width of what a model's encoder returns."""
    config = getattr(model.get_encoder(), "config", model.config)
    return int(getattr(config, "d_model", None) or config.hidden_size)


def trial_ids(count: int | None, length: int) -> Tensor:
    """Ids `[1, length]` of `count`, far from special tokens, which stand at the ends."""
    most = count or length
    return (torch.arange(length) + most // 2)[None] % most
