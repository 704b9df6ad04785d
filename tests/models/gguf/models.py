"""Tiny random models, and GGUF files of them as llama.cpp's converter writes them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig

from specdec.models.hf.tiny_models import SIZES, VOCABULARY
from tests.models.gguf.files import written
from tests.tiny import random_model

Keys = dict[str, Any]
ROPE = {"rope_theta": 10000.0}
PARTLY = {"rope_parameters": {**ROPE, "rope_type": "default", "partial_rotary_factor": 0.5}}


class Kind(NamedTuple):
    """An architecture of files, transformers' `model_type`, options of its config, and keys beside the common ones."""

    architecture: str
    model_type: str
    options: dict[str, Any] = {}  # noqa: RUF012
    keys: Callable[[Any], Keys] = lambda config: {}


def _window(config: Any) -> Keys:
    return {".attention.sliding_window": config.sliding_window}


def _experts(config: Any) -> Keys:
    width = getattr(config, "moe_intermediate_size", config.intermediate_size)
    shared = getattr(config, "shared_expert_intermediate_size", None)
    return {
        **({} if shared is None else {".expert_shared_feed_forward_length": shared}),
        ".expert_count": config.num_local_experts if hasattr(config, "num_local_experts") else config.num_experts,
        ".expert_used_count": config.num_experts_per_tok,
        ".expert_feed_forward_length": width,
    }


def _granite(config: Any) -> Keys:
    return {
        ".attention.scale": config.attention_multiplier,
        ".embedding_scale": config.embedding_multiplier,
        ".residual_scale": config.residual_multiplier,
        ".logit_scale": config.logits_scaling,
    }


def _gemma2(config: Any) -> Keys:
    caps = {f".{name}": getattr(config, name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    return {**_window(config), **caps}


def _olmo3(config: Any) -> Keys:
    pattern = [kind == "sliding_attention" for kind in config.layer_types]
    return {**_window(config), ".attention.sliding_window_pattern": pattern}


_MULTIPLIERS = {
    "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0,
}  # fmt: skip
KINDS = {
    "llama": Kind("llama", "llama"),
    "llama, tied": Kind("llama", "llama", {"tie_word_embeddings": True}),
    "llama, biases": Kind("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": Kind("llama", "mistral", keys=_window),
    "mixtral": Kind("llama", "mixtral", keys=_experts),
    "qwen2": Kind("qwen2", "qwen2"),
    "qwen3": Kind("qwen3", "qwen3"),
    "qwen3, wide heads": Kind("qwen3", "qwen3", {"head_dim": 16}),
    "qwen2moe": Kind("qwen2moe", "qwen2_moe", keys=_experts),
    "qwen3moe": Kind("qwen3moe", "qwen3_moe", {"norm_topk_prob": True}, _experts),
    "gemma2": Kind("gemma2", "gemma2", {"query_pre_attn_scalar": 8}, _gemma2),
    "gemma3": Kind(
        "gemma3", "gemma3_text", {"sliding_window_pattern": 6, "num_hidden_layers": 7, "query_pre_attn_scalar": 8},
        keys=_window,
    ),
    "phi3": Kind("phi3", "phi3", keys=_window),
    "phi3, partly turned": Kind("phi3", "phi3", {"sliding_window": None, **PARTLY}),
    "smollm3": Kind("smollm3", "smollm3", {"num_hidden_layers": 5}),
    "granite": Kind("granite", "granite", _MULTIPLIERS, _granite),
    "olmo2": Kind("olmo2", "olmo2"),
    "olmo3": Kind("olmo2", "olmo3", {**SIZES["mistral"], "num_hidden_layers": 5}, _olmo3),
    "starcoder2": Kind("starcoder2", "starcoder2", {"sliding_window": None}),
    "stablelm": Kind("stablelm", "stablelm", {"use_qkv_bias": True, **PARTLY}),
    "stablelm, parallel": Kind("stablelm", "stablelm", {"use_parallel_residual": True, "qk_layernorm": True, **PARTLY}),
    "command-r": Kind("command-r", "cohere", {"logit_scale": 0.25}, lambda config: {".logit_scale": 0.25}),
    "command-r, norms": Kind("command-r", "cohere", {"use_qk_norm": True, "logit_scale": 1.0}),
    "gpt-oss": Kind("gpt-oss", "gpt_oss", keys=lambda config: {**_experts(config), **_window(config)}),
}  # fmt: skip


def model_of(kind: Kind, **options: Any) -> Any:
    """The model with large random weights, also of norms and biases, in eval mode."""
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": VOCABULARY}
    sizes = {**SIZES.get(kind.model_type, {}), "rope_parameters": {**ROPE, "rope_type": "default"}}
    if kind.model_type in ("gemma3_text", "olmo3"):
        del sizes["rope_parameters"]
    model = random_model(AutoConfig.for_model(kind.model_type, **{**ids, **sizes, **kind.options, **options}), 0)
    numbers = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or "norm" in name or name.endswith("bias"):  # of few digits: norms may have 1 added
            parameter.data += torch.randint(-4, 5, parameter.shape, generator=numbers) / 16
    return model


def keys_of(kind: Kind, config: Any) -> Keys:
    """What a file says of a model's shape, and the ids of three tokens."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    turned = int(width * rope.get("partial_rotary_factor", 1.0))
    norm = "layer_norm_rms_epsilon" if hasattr(config, "rms_norm_eps") else "layer_norm_epsilon"
    epsilon = next(
        getattr(config, name) for name in ("rms_norm_eps", "norm_epsilon", "layer_norm_eps") if hasattr(config, name)
    )
    keys = {
        ".block_count": config.num_hidden_layers, ".context_length": config.max_position_embeddings,
        ".embedding_length": config.hidden_size, ".feed_forward_length": config.intermediate_size,
        ".attention.head_count": heads, ".attention.head_count_kv": config.num_key_value_heads,
        f".attention.{norm}": epsilon, ".rope.dimension_count": turned, "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [f"<{number}>" for number in range(config.vocab_size)],
        "tokenizer.ggml.padding_token_id": 0, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    if width * heads != config.hidden_size or kind.architecture.startswith("gemma"):
        keys |= {".attention.key_length": width, ".attention.value_length": width}
    return keys | {".rope.freq_base": float(rope["rope_theta"])} | kind.keys(config)


def saved(
    path: Path,
    kind: Kind,
    model: Any,
    keys: Keys | None = None,
    tensors: dict[str, Any] | None = None,
    experts: str = "F32",
) -> str:
    """The model in a file of float32 numbers, `experts` in this type; `keys` that are None are left out."""
    every = {
        name: value for name, value in {**keys_of(kind, model.config), **(keys or {})}.items() if value is not None
    }
    arrays = {name: tensor.detach().numpy() for name, tensor in tensors_of(kind, model)}
    return written(path, kind.architecture, every, {**arrays, **(tensors or {})}, experts)


def tensors_of(kind: Kind, model: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and numbers of a model's tensors in files."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == kind.architecture)
    names, config = get_tensor_name_map(number, model.config.num_hidden_layers), model.config
    for name, weight in _parts(model.state_dict(), config):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        base, _, end = name.rpartition(".")
        yield f"{names.get_name(base)}.{end}", _converted(base, weight, config)


def _parts(state: dict[str, Tensor], config: Any) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's names, experts divided into gates and what they let through, norms of heads in one tensor."""
    heads: dict[str, list[Tensor]] = {}
    for name, weight in state.items():
        base, _, part = name.rpartition(".")
        if part.startswith("gate_up_proj") or (part.startswith("down_proj") and "experts" in name):
            end = "bias" if part.endswith("_bias") else "weight"
            swapped = config.model_type == "gpt_oss"
            weight = weight.transpose(1, 2) if swapped and end == "weight" else weight
            if part.startswith("down"):
                yield f"{base}.down_proj.{end}", weight
            else:
                halves = (weight[:, ::2], weight[:, 1::2]) if swapped else weight.chunk(2, dim=1)
                yield from zip((f"{base}.gate_proj.{end}", f"{base}.up_proj.{end}"), halves, strict=True)
        elif "layernorm.norms." in name:
            heads.setdefault(name.split(".norms.")[0], []).append(weight)
        else:
            yield (f"{name}.weight" if name.endswith("sinks") else name), weight
    for base, weights in heads.items():
        yield f"{base}.weight", torch.stack(weights)


def _converted(base: str, weight: Tensor, config: Any) -> Tensor:
    neighbours = config.model_type in ("llama", "mistral", "mixtral", "granite", "smollm3")
    if neighbours and base.endswith(("q_proj", "k_proj")):
        heads = config.num_attention_heads if base.endswith("q_proj") else config.num_key_value_heads
        return weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
    if config.model_type.startswith("gemma") and base.endswith("norm"):
        return weight + 1
    return weight.squeeze(0) if base.endswith("shared_expert_gate") else weight
