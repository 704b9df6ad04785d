"""Tiny random models of any class of transformers, from the defaults of its config."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import fields
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from specdec.models.hf.tiny_models import VOCABULARY, WINDOW, with_random_weights
from tests.tiny import DECODERS, ENCODER_DECODERS, MOE

_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_LARGEST = 20_000_000  # parameters
# What a field's name says -> the most that a tiny model has of it; the first that matches counts
_MOST: tuple[tuple[str, int], ...] = (
    (r"vocab_size", VOCABULARY), (r"(kv|key_value)_(heads|groups)$", 2), (r"(heads|n_head)$", 4),
    (r"(^|_)(n_layers?|layers|depth)$", 2), (r"(head_dim|d_kv|dim_head|head_size)$", 8),
    (r"(ffn_dim|intermediate_size|d_ff|mlp_dim|ffn_hidden_size)$", 48),
    (r"(hidden_size|d_model|n_embd|dim|emb_dim|embed_dim|embedding_size|projection_dim|width)$", 32),
    (r"lora_rank$", 16), (r"experts$", 4), (r"(experts_per_tok|moe_topk|moe_k|n_group)$", 2), (r"topk_group$", 1),
    (r"(base_channels|_channels)$", 32), (r"(positions|position_embeddings|max_seq_len|block_size)$", 512),
    (r"(sliding_window|attention_chunk_size)$", WINDOW),
)  # fmt: skip

_AXES = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
_WITHOUT_HEADS = ("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "hunyuan_vl", "ministral", "nemotron")
_WITH_AXES = (
    *("glm4v_text", "glm_ocr_text", "glm_image_text", "paddleocr_vl_text", "qwen2_vl_text", "qwen2_5_vl_text"),
    *("qwen2_5_omni_text", "qwen2_5_omni_talker", "qwen3_omni_moe_text", "cosmos3_edge_text"),
)
# model_type -> options that no rule gives
EXCEPTIONS: dict[str, dict[str, Any]] = {
    **dict(reversed([*DECODERS.values(), *ENCODER_DECODERS.values()])),
    **{kind: {"head_dim": 8, "num_key_value_heads": 2} for kind in _WITHOUT_HEADS},
    **{kind: {"head_dim": 8, "rope_parameters": _AXES} for kind in _WITH_AXES},
    "glm4v_moe_text": {"head_dim": 8, "rope_parameters": {**_AXES, "mrope_section": [1, 1, 0]}},
    "ernie4_5_vl_moe_text": {
        "head_dim": 8, "rope_parameters": _AXES, "moe_num_experts": 4, "moe_intermediate_size": [24, 24],
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": {
        "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8,
        "layer_types": ["mamba", "attention"],
    },
    "zamba2": {"n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 1, "mamba_d_state": 8, "chunk_size": 8},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 2},
    "nemotron_h": {"n_groups": 1, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "chunk_size": 8},
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [48] * 4,
    },
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "local"], "is_decoder": True},
    "chameleon": {"vocabulary_map": {"<image>": 60}},
    "emu3": {"vocabulary_map": {"<image>": 60, "<|extra_200|>": 59}},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX", "is_decoder": True},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], **MOE, "num_experts": 4},
    "molmo2_adapter": {"vision_feature_layer": [-1, -2]},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 58, "vision_end_token_id": 59},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 58, "vision_end_token_id": 59},
    "wav2vec2": {"conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3]},
    "speecht5": {"conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3]},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8}},
}  # fmt: skip


def class_named(name: str) -> Any:
    """The class of this name; the test is skipped where transformers does not have it yet."""
    return getattr(transformers, name, None) or pytest.skip(f"transformers {transformers.__version__} has no {name}")


def tiny_of(kind: Any) -> PreTrainedModel:
    """A tiny random model of this class; raises whatever the class raises, and ValueError if it stays large."""
    config = shrunk(kind.config_class)
    with torch.device("meta"):
        count = sum(weights.numel() for weights in kind(deepcopy(config)).parameters())
    if count > _LARGEST:
        raise ValueError(f"{count:,} parameters remain")
    model = with_random_weights(lambda: kind(config).float())
    if model.can_generate():
        model.generation_config.update(**{**_IDS, "eos_token_id": None})
    return model


def shrunk(kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    """A tiny config of this class."""
    return kind(**_small(kind()))


def _small(config: PreTrainedConfig) -> dict[str, Any]:
    """The options that make a tiny config of one of usual size, with the parts of it."""
    made: dict[str, Any] = {}
    usual = {field.name: field.default for field in fields(config)}
    layers = _layer_lists(config)
    count = max([2, *map(len, layers.values())])
    place = iter(range(VOCABULARY - 1, 0, -1))
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            made[name] = {**_small(value), "model_type": value.model_type}
            if name in ("encoder", "decoder"):
                made[name] |= dict.fromkeys(["is_decoder", "add_cross_attention"], name == "decoder")
        elif name in _IDS:
            made[name] = _IDS[name]
        elif name in layers:
            made[name] = [*layers[name], *layers[name][-1:] * (count - len(layers[name]))]
        elif name == "is_decoder":
            made[name] = True
        elif name == "rope_parameters" and "mrope_section" in (value or {}):
            made[name] = {**value, "mrope_section": [1, 1, 2]}  # together half of a head
        elif isinstance(value, bool) or usual.get(name) is None:
            continue
        elif isinstance(value, int) and re.search(r"token_(id|index)$", name):
            made[name] = next(place)
        elif isinstance(value, int):
            most = next((most for pattern, most in _MOST if re.search(pattern, name)), value)
            if re.search(r"layers?$", name) and most == 2:
                most = count
            if name == "num_key_value_heads" and value == vars(config).get("num_attention_heads"):
                most = 4
            made[name] = min(value, most)
    return {**made, **deepcopy(EXCEPTIONS.get(config.model_type, {}))}


def _layer_lists(config: PreTrainedConfig) -> dict[str, list[Any]]:
    """The lists with an entry a layer, cut to the kinds of layers."""
    count = getattr(config, "num_hidden_layers", None)
    lists = {n: v for n, v in vars(config).items() if isinstance(v, list | tuple) and len(v) == count and count > 2}
    plain = {n: v for n, v in lists.items() if all(isinstance(one, str | int | float) for one in v)}
    return {name: list(dict.fromkeys(values))[:4] for name, values in plain.items()}
