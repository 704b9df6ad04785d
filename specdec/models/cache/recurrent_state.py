"""Snapshots of transformers' caches: the length of attention's keys and values, a copy of recurrent state."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache

# model_type -> attributes of modules that hold a row's state outside any cache.
MODULE_STATE: dict[str, tuple[str, ...]] = {"recurrent_gemma": ("conv1d_state", "recurrent_states")}
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")
"""Keywords by which models take and return their caches."""


def holds_prompts_apart(config: Any) -> bool:
    """Whether a model's cache keeps the whole prompt, and a window of what follows, as UnlimitedOcr's."""
    return "reference_sliding_attention" in (getattr(config, "layer_types", None) or ())


def cache_for_prompt(config: Any, length: int) -> DynamicCache:
    """An empty cache for a prompt of this length; without it, what comes in the first pass would be the prompt."""
    cache = DynamicCache(config=config)
    for layer in cache.layers:
        if hasattr(layer, "set_prefill_length"):
            layer.set_prefill_length(length)
    return cache


def can_be_cut(cache: Any) -> bool:
    """Whether all layers attend to the whole past, so that cutting keys and values is exact."""
    layers = _layers(cache)
    return layers is not None and len(layers) > 0 and all(type(layer) is DynamicLayer for layer in layers)


def cut_cache(cache: Any, length: int) -> None:
    """Forgets everything after the first `length` tokens of a plain cache."""
    for layer in _layers(cache) or []:
        _cut_layer(layer, length)


def snapshot(cache: Any) -> Any:
    """A state for `restore`; keys and values are not copied, as they are never overwritten."""
    layers = _layers(cache)
    if layers is None:
        return _frozen(cache)
    return [layer.get_seq_length() if type(layer) is DynamicLayer else _copied(vars(layer), layer) for layer in layers]


def restore(cache: Any, state: Any) -> Any:
    """The cache as it was at `snapshot`; a state can be restored repeatedly."""
    layers = _layers(cache)
    if layers is None:
        return _frozen(state)
    for layer, state_of_layer in zip(layers, state, strict=True):
        if isinstance(state_of_layer, int):
            _cut_layer(layer, state_of_layer)
        else:
            vars(layer).update(_copied(state_of_layer, layer))
    return cache


def module_state(model: nn.Module, names: tuple[str, ...]) -> list[tuple[nn.Module, str, Any]]:
    """The current state in modules; the library replaces these tensors, it never writes into them."""
    return [(m, name, vars(m)[name]) for m in model.modules() for name in names if name in vars(m)]


def set_module_state(state: list[tuple[nn.Module, str, Any]]) -> None:
    for module, name, value in state:
        setattr(module, name, value)


def _layers(cache: Any) -> list[Any] | None:
    if isinstance(cache, EncoderDecoderCache):
        return list(cache.self_attention_cache.layers)
    return list(cache.layers) if isinstance(cache, Cache) else None


def _cut_layer(layer: Any, length: int) -> None:
    if layer.is_initialized and layer.keys.shape[-2] > length:
        layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]


def _copied(attributes: dict[str, Any], layer: Any) -> dict[str, Any]:
    # Dynamic layers replace keys and values, so a reference keeps the old ones; other tensors are overwritten.
    skipped = {"keys", "values"} if isinstance(layer, DynamicLayer) else set()
    return {name: value if name in skipped else _frozen(value) for name, value in attributes.items()}


def _frozen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_frozen(item) for item in value])
    return value if not hasattr(value, "layers") else copy.deepcopy(value)
