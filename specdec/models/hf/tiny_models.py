"""Tiny models of the known families with large random weights: wrong masks or positions change their logits."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from specdec.models.hf.derived import media_modules
from specdec.models.hf.private_api import auto_class
from specdec.models.hf.sides import decoder_config

VOCABULARY = 64
WINDOW = 12  # tokens that sliding and chunked layers of these models see

_ROPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_GQA = {**_ROPE, "num_key_value_heads": 2}
_WINDOWED = {**_GQA, "sliding_window": WINDOW}
_HEADS = {**_GQA, "head_dim": 8}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
_ROTATED = {**_GPT, "rotary_dim": 4}
_BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 512,
}  # fmt: skip
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

# model_type -> options of its config
SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["llama", "qwen2", "stablelm", "cohere", "olmo", "olmo2", "granite", "smollm3"], _GQA),
    **dict.fromkeys(["mistral", "phi3", "starcoder2"], _WINDOWED),
    **dict.fromkeys(["qwen3", "gemma", "glm4"], _HEADS),
    **dict.fromkeys(["gpt_neox", "phi"], _ROPE),
    **dict.fromkeys(["gpt2", "gpt_bigcode"], _GPT),
    **dict.fromkeys(["gptj", "codegen"], _ROTATED),
    **dict.fromkeys(["bart", "mbart", "pegasus", "m2m_100"], _BART),
    **dict.fromkeys(["t5", "mt5", "umt5"], _T5),
    "gemma2": {**_HEADS, "sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    "gemma3_text": {**_HEADS, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    "opt": {**_ROPE, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 512},
    "falcon": {**_ROPE, "alibi": False, "new_decoder_architecture": False},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 512},
    "gpt_neo": {
        "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 512,
        "attention_types": [[["global", "local"], 1]], "window_size": WINDOW,
    },
    "mixtral": {**_GQA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {**_HEADS, **_SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_GQA, **_MOE, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**_HEADS, **_MOE},
    "olmoe": {**_GQA, "num_experts": 4, "num_experts_per_tok": 2},
    "cohere2": {**_GQA, **_SLIDING},
    "llama4_text": {
        **_HEADS, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": WINDOW,
        "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
    },
    "deepseek_v3": {
        **_ROPE, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_key_value_heads": 4,
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
    },
    "marian": {**_BART, "forced_eos_token_id": None},
    "blenderbot": {**_BART, "forced_eos_token_id": None},
    "whisper": {**_BART, "max_target_positions": 448, "max_source_positions": 20, "num_mel_bins": 8},
}  # fmt: skip
# What a decoder's config says about its part in a model
_ROLE = ("is_decoder", "is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size")
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def tiny_model(model_type: str, **options: Any) -> Any:
    """A tiny model of a known family in float32, on the CPU and in eval mode, with further config `options`.

    Raises whatever the library raises if none can be built; torch's random state is unchanged.
    """
    sizes = deepcopy(SIZES[model_type])  # configs change their arguments
    vocabulary = dict.fromkeys(["vocab_size", "decoder_vocab_size"], VOCABULARY)
    config = AutoConfig.for_model(model_type, **{**_IDS, **vocabulary, **sizes, **options})
    return random_model(config)


def random_model(config: Any, seed: int = 0) -> Any:
    """A model of this config, with large random weights in float32, in eval mode."""
    return with_random_weights(lambda: auto_class(config).from_config(config, dtype=torch.float32), seed)


def with_random_weights(make: Callable[[], Any], seed: int = 0) -> Any:
    """The model that `make` makes, with large random weights on the CPU, in eval mode."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        model = make()
        shake(model)
    return model.eval()


def tiny_alike(model: Any, family: Any) -> Any:
    """A tiny model of the class of `model` around a decoder of the tiny model `family`, to try how passes of text run.

    It is `family` itself where that is of this class. Encoders and what reads pictures have no weights. Raises whatever
    the library raises if none can be built.
    """
    if type(model) is type(family):
        return family
    part = decoder_config(model.config)
    tiny = deepcopy(family.config)
    vars(tiny).update({name: value for name in _ROLE if (value := getattr(part, name, None)) is not None})
    if part is model.config:
        return with_random_weights(lambda: type(model)(tiny))
    [place] = [name for name, value in vars(model.config).items() if value is part]
    config = deepcopy(model.config)
    setattr(config, place, tiny)
    return with_random_weights(lambda: _around(tiny, type(model), config))


def _around(tiny: Any, kind: Any, config: Any) -> Any:
    """A model of a class around a decoder of the config `tiny`; the modules that read no text have empty weights."""
    with torch.device("meta"):
        wrapper = kind(config)
    decoder = wrapper.get_decoder()
    [path] = [name for name, module in wrapper.named_modules() if module is decoder]
    wrapper.set_submodule(path, type(decoder)(tiny))
    unread = [wrapper.get_encoder()] if wrapper.config.is_encoder_decoder else media_modules(wrapper).values()
    unread_modules = {module for part in unread for module in part.modules()}
    for module in wrapper.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    weight = torch.zeros(0 if module in unread_modules else tensor.shape, dtype=tensor.dtype)
                    tensors[name] = (
                        nn.Parameter(weight, tensor.requires_grad) if tensors is module._parameters else weight
                    )
    return wrapper


@torch.no_grad()
def shake(model: nn.Module) -> None:
    """Sets random weights so large that attention to every key matters, unlike with the library's own."""
    constants = {id(p) for m in model.modules() if "Sinusoidal" in type(m).__name__ for p in m.parameters()}
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        special = last in {"A_log", "D", "dt_bias"} or "conv1d" in name  # recurrent layers must stay stable
        if id(parameter) in constants or parameter.dim() < 2 or special:
            continue
        embedding = isinstance(model.get_submodule(owner), nn.Embedding)
        nn.init.normal_(parameter, std=0.7 if embedding else 1.6 / parameter.shape[-1] ** 0.5)
