"""How a model can be run, by architecture: its kind and size of cache, how it gets positions, which masks it takes."""

from __future__ import annotations

from typing import Any

from specdec.models.protocols import AttentionKind, Capability, Positions
from specdec.options.fields import is_list, is_whole

# model_type -> why its rows keep the library's own cache. What works depends on versions and kernels, so it is probed.
REPLAY: dict[str, str] = dict.fromkeys(
    ["mamba", "mamba2", "falcon_mamba", "recurrent_gemma", "qwen3_next", "jamba", "bamba", "falcon_h1", "lfm2", "rwkv"],
    "its recurrent state cannot be cut back, only restored",
)
COUNTS_COLUMNS = {"gpt_neo", "mpt"}  # whose attention counts columns of the cache, not positions

# These continue a text at a mask token, which transformers' `generate` appends for each pass and a cache cannot hold.
AT_MASKS = {"xlm", "xlnet", "flaubert"}

# These read the whole text again where their scaling changes (`prepare_inputs_for_generation`).
_REREADING = {"phi3", "phimoe", "phi4_multimodal"}

_ORIGINAL = "original_max_position_embeddings"
_ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}


def attention_kinds(config: Any) -> tuple[AttentionKind, ...] | None:
    """The kinds of attention layers in a text config; None if a layer is not attention over the past.

    None, too, if layers have a config each (`is_heterogeneous`), with different kinds.
    """
    if getattr(config, "is_heterogeneous", False):
        layers = {attention_kinds(layer) for layer in config.per_layer_config}
        return layers.pop() if len(layers) == 1 else None
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    names = getattr(config, "layer_types", None)
    if not names:
        return (AttentionKind("all", window, None if window else chunk),)
    if not set(names) <= _ATTENTION_KINDS:
        return None
    limits = {"sliding_attention": (window, None), "chunked_attention": (None, chunk)}
    return tuple(AttentionKind(name, *limits.get(name, (None, None))) for name in sorted(set(names)))


def rope_boundary(config: Any) -> int | None:
    """The length of text where rotary scaling changes; None if it does not."""
    longest, boundaries = getattr(config, "max_position_embeddings", None), []
    for scaling in _rope_scalings(config):
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind in ("dynamic", "longrope"):
            length = kind == "longrope" and (scaling.get(_ORIGINAL) or getattr(config, _ORIGINAL, None))
            boundaries.append(length or longest)
    return min((limit for limit in boundaries if limit), default=None)


def trained_positions(config: Any) -> int | None:
    """How many positions a model was trained on or is scaled to; None if the config does not say, as with ALiBi."""
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None or getattr(config, "alibi", False):
        return None
    scaled = [(rope.get(_ORIGINAL) or longest) * (rope.get("factor") or 1.0) for rope in _rope_scalings(config)]
    return int(max(longest, *scaled))


def _rope_scalings(config: Any) -> list[dict[str, Any]]:
    """The parameters of rotary scaling, by kind of layer if the kinds differ."""
    scalings = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [value for value in scalings.values() if isinstance(value, dict)] or [scalings]


def cache_reset_length(config: Any) -> int | None:
    """The length beyond which a text is read again; None if scaling does not change."""
    resets = config.model_type in _REREADING and rope_boundary(config) is not None
    return getattr(config, "original_max_position_embeddings", None) if resets else None


def kv_capability(positions: Positions, kinds: tuple[AttentionKind, ...]) -> Capability:
    """Sessions with keys and values of our own, and one mask for each kind of layer."""
    return Capability("kv", positions, "dict" if len(kinds) > 1 else "single", kinds)


def kv_width(config: Any, layers: int | None = None) -> int:
    """Numbers that the widest layer of a text decoder, or of its first `layers`, keeps of a position: keys and values.

    An estimate, for limits of memory and the sizes of buffers: a field of the config may be missing.
    """
    if getattr(config, "is_heterogeneous", False):  # layers of different widths, each with a config
        return max(map(kv_width, config.per_layer_config[:layers]))
    heads = _number(config, "decoder_attention_heads", "num_attention_heads", "num_heads", "n_head", "n_heads") or 1
    hidden = _number(config, "hidden_size", "d_model", "n_embd") or 1
    has_one_head = getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False)
    kv_heads = 1 if has_one_head else _number(config, "num_key_value_heads", "num_kv_heads") or heads
    width = _number(config, "head_dim", "d_kv") or max(hidden // heads, 1)
    parts = [_number(config, name) for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")]
    unequal = [part for part in parts if part is not None]
    if len(unequal) == len(parts):  # keys and values differ in width
        return heads * sum(unequal)
    return 2 * kv_heads * width


def _number(config: Any, *names: str) -> int | None:
    """The first of these fields that is a number, or the largest of its numbers, one a layer; None without one."""
    for name in names:
        value = getattr(config, name, None)
        values: Any = value if is_list(value) else [value]
        if numbers := [int(number) for number in values if is_whole(number) and number > 0]:
            return max(numbers)
    return None
