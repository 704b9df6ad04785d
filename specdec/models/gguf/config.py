"""The transformers config that computes what a GGUF file says, for architectures whose every key is read here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import transformers

from specdec.errors import UnsupportedError
from specdec.models.gguf.end_tokens import special_ids
from specdec.models.gguf.header import Header
from specdec.models.gguf.reader import GgufReader
from specdec.models.gguf.rope import rope_parameters


def read_config(reader: GgufReader) -> Any:
    """The config, with all end tokens in `eos_token_id`; `config.architectures` names the model's class.

    Raises UnsupportedError for other architectures than `ARCHITECTURES` and, with key and value, for a key that is not
    read and may change what the model computes; LoadError for a key that is missing.
    """
    header = Header(reader)
    if header.architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"{reader.path} has the architecture {header.architecture}, and {', '.join(sorted(ARCHITECTURES))} are "
            "read: use the checkpoint in safetensors that it was made of"
        )
    name, steps = ARCHITECTURES[header.architecture]
    fields = _common(header)
    for step in steps:
        name = step(header, fields) or name
    header.check()
    config = getattr(transformers, f"{name}Config")(**fields)
    config.architectures = [f"{name.removesuffix('Text')}ForCausalLM"]
    return config


def _common(header: Header) -> dict[str, Any]:
    width, heads = header.need("embedding_length"), header.number("attention.head_count")
    head = header.number("attention.key_length", width // heads)
    if (values := header.number("attention.value_length", head)) != head:
        raise header.refusal("attention.value_length", values, f"keys have {head} values: heads of two sizes")
    header.get("vocab_size")  # the embedding's rows count
    ids = special_ids(header.reader)
    embedding, head_weight = header.tensor("token_embd.weight"), header.tensor("output.weight")
    return {
        "vocab_size": int(embedding.shape[-1]) if embedding is not None else header.need("vocab_size"),
        "hidden_size": width,
        "num_hidden_layers": header.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.number("attention.head_count_kv", heads),
        "head_dim": head,
        "intermediate_size": header.number("feed_forward_length"),
        "max_position_embeddings": header.need("context_length"),
        "tie_word_embeddings": head_weight is None,
        "bos_token_id": ids.bos,
        "eos_token_id": list(ids.ends) or None,
        "pad_token_id": ids.pad,
    }


def _rms(header: Header, fields: dict[str, Any]) -> None:
    fields["rms_norm_eps"] = float(header.need("attention.layer_norm_rms_epsilon"))


def _whole_heads(header: Header, fields: dict[str, Any]) -> None:
    """Sets the rope parameters of heads that turn whole."""
    count = header.number("rope.dimension_count", fields["head_dim"])
    if count != fields["head_dim"]:
        raise header.refusal("rope.dimension_count", count, f"heads of {fields['head_dim']} turn whole")
    fields["rope_parameters"] = rope_parameters(header)


def _parts_of_heads(header: Header, fields: dict[str, Any]) -> None:
    """Sets the rope parameters of heads whose first values turn."""
    count = header.number("rope.dimension_count", fields["head_dim"])
    share = count / fields["head_dim"]
    while int(fields["head_dim"] * share) < count:  # transformers rounds the product down
        share = math.nextafter(share, 2.0)
    fields["rope_parameters"] = rope_parameters(header) | {"partial_rotary_factor": share}


def _one_base(header: Header, fields: dict[str, Any]) -> None:
    base = fields["rope_parameters"]["rope_theta"]
    if (window_base := header.get("rope.freq_base_swa", base)) != base:
        raise header.refusal("rope.freq_base_swa", window_base, f"all layers turn with the base {base}")


def _two_bases(header: Header, fields: dict[str, Any], base: float) -> None:
    """Sets unscaled rope parameters for layers that see a window; their base is the file's, else `base`."""
    window = {"rope_type": "default", "rope_theta": float(header.get("rope.freq_base_swa", base))}
    fields["rope_parameters"] = {"full_attention": fields["rope_parameters"], "sliding_attention": window}


def _biases(header: Header, fields: dict[str, Any]) -> None:
    fields["attention_bias"] = any(_has(header, f"attn_{part}.bias") for part in ("q", "qkv", "output"))


def _wide_biases(header: Header, fields: dict[str, Any]) -> None:
    _biases(header, fields)
    fields["mlp_bias"] = _has(header, "ffn_up.bias")


def _has(header: Header, part: str) -> bool:
    return header.tensor(f"blk.0.{part}") is not None


def _window(header: Header, fields: dict[str, Any]) -> None:
    fields["sliding_window"] = header.get("attention.sliding_window") or None


def _windows(header: Header, fields: dict[str, Any], every: int, default: int | None = None) -> None:
    """Sets which layers see a window; each `every`th layer sees all positions."""
    fields["sliding_window"] = header.get("attention.sliding_window", default) or None
    pattern, layers = header.get("attention.sliding_window_pattern", every), fields["num_hidden_layers"]
    if not isinstance(pattern, np.ndarray):
        pattern = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(layers)]
    slides = [bool(flag) and fields["sliding_window"] is not None for flag in pattern[:layers]]
    fields["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in slides]


def _llama(header: Header, fields: dict[str, Any]) -> str | None:
    if header.get("expert_count"):
        _experts(header, fields, "num_local_experts")
        _window(header, fields)
        return "Mixtral"
    if header.get("attention.sliding_window"):
        _window(header, fields)
        return "Mistral"
    _wide_biases(header, fields)
    return None


def _experts(header: Header, fields: dict[str, Any], count: str = "num_experts") -> None:
    fields[count] = header.need("expert_count")
    fields["num_experts_per_tok"] = header.number("expert_used_count")
    header.get("expert_feed_forward_length")  # the tensor's rows count
    down = header.tensor("blk.0.ffn_down_exps.weight")
    if down is None:
        raise header.refusal("expert_count", fields[count], "the file has no tensor ffn_down_exps of all experts")
    fields["moe_intermediate_size" if count == "num_experts" else "intermediate_size"] = int(down.shape[0])
    if (gate := header.get("expert_gating_func", 1)) not in (0, 1):
        raise header.refusal("expert_gating_func", gate, "only 1, a softmax over all experts, is computed")


def _qwen2moe(header: Header, fields: dict[str, Any]) -> None:
    _experts(header, fields)
    header.get("expert_shared_feed_forward_length")
    shared = header.tensor("blk.0.ffn_down_shexp.weight")
    fields["shared_expert_intermediate_size"] = int(shared.shape[0]) if shared is not None else 0
    fields["norm_topk_prob"] = bool(header.get("expert_weights_norm", False))


def _qwen3moe(header: Header, fields: dict[str, Any]) -> None:
    _experts(header, fields)
    fields["norm_topk_prob"] = bool(header.get("expert_weights_norm", True))


def _gemma(header: Header, fields: dict[str, Any], layers_of_27b: int) -> None:
    largest = fields["num_hidden_layers"] == layers_of_27b
    width = fields["hidden_size"] // fields["num_attention_heads"] if largest else fields["head_dim"]
    fields["query_pre_attn_scalar"] = width


def _gemma2(header: Header, fields: dict[str, Any]) -> None:
    _gemma(header, fields, layers_of_27b=46)
    _windows(header, fields, every=2, default=4096)
    fields["attn_logit_softcapping"] = float(header.get("attn_logit_softcapping", 50.0)) or None
    fields["final_logit_softcapping"] = float(header.get("final_logit_softcapping", 30.0)) or None


def _gemma3(header: Header, fields: dict[str, Any]) -> None:
    _gemma(header, fields, layers_of_27b=62)
    _windows(header, fields, every=6)
    _two_bases(header, fields, 10000.0)
    fields["final_logit_softcapping"] = float(header.get("final_logit_softcapping", 0.0)) or None


def _phi3(header: Header, fields: dict[str, Any]) -> None:
    original = fields["rope_parameters"].get("original_max_position_embeddings")
    fields["original_max_position_embeddings"] = original or fields["max_position_embeddings"]


def _smollm3(header: Header, fields: dict[str, Any]) -> None:
    fields["no_rope_layers"] = [int((layer + 1) % 4 != 0) for layer in range(fields["num_hidden_layers"])]


def _granite(header: Header, fields: dict[str, Any]) -> None:
    if header.get("rope.scaling.finetuned") is False:  # here a switch for all turning
        raise header.refusal("rope.scaling.finetuned", False, "Granite without rotary positions is not computed")
    fields |= {
        "attention_multiplier": float(header.get("attention.scale") or 1 / math.sqrt(fields["head_dim"])),
        "embedding_multiplier": float(header.get("embedding_scale") or 1.0),
        "residual_multiplier": float(header.get("residual_scale") or 1.0),
        "logits_scaling": float(header.need("logit_scale")),
    }


def _olmo2(header: Header, fields: dict[str, Any]) -> str | None:
    _windows(header, fields, every=4)
    if fields["sliding_window"] is None:
        del fields["sliding_window"], fields["layer_types"]
        return None
    _two_bases(header, fields, fields["rope_parameters"]["rope_theta"])
    return "Olmo3"


def _starcoder2(header: Header, fields: dict[str, Any]) -> None:
    fields |= {"norm_epsilon": float(header.need("attention.layer_norm_epsilon")), "use_bias": True}


def _stablelm(header: Header, fields: dict[str, Any]) -> None:
    header.get("use_parallel_residual")  # a second norm's absence says it, in llama.cpp too
    fields |= {
        "layer_norm_eps": float(header.need("attention.layer_norm_epsilon")),
        "use_qkv_bias": _has(header, "attn_q.bias"),
        "qk_layernorm": _has(header, "attn_q_norm.weight"),
        "use_parallel_residual": not _has(header, "ffn_norm.weight"),
    }


def _command_r(header: Header, fields: dict[str, Any]) -> None:
    fields |= {
        "layer_norm_eps": float(header.need("attention.layer_norm_epsilon")),
        "logit_scale": float(header.get("logit_scale") or 1.0),
        "use_qk_norm": _has(header, "attn_q_norm.weight"),
    }


def _gpt_oss(header: Header, fields: dict[str, Any]) -> None:
    _windows(header, fields, every=2)
    _experts(header, fields, "num_local_experts")
    if fields["rope_parameters"]["rope_type"] == "yarn":
        fields["rope_parameters"]["truncate"] = False  # as it was trained; no key says it


Step = Callable[[Header, dict[str, Any]], str | None]
ARCHITECTURES: dict[str, tuple[str, tuple[Step, ...]]] = {
    "command-r": ("Cohere", (_whole_heads, _biases, _command_r)),
    "gemma2": ("Gemma2", (_rms, _biases, _whole_heads, _one_base, _gemma2)),
    "gemma3": ("Gemma3Text", (_rms, _biases, _whole_heads, _gemma3)),
    "gpt-oss": ("GptOss", (_rms, _whole_heads, _one_base, _gpt_oss)),
    "granite": ("Granite", (_rms, _whole_heads, _wide_biases, _granite)),
    "llama": ("Llama", (_rms, _whole_heads, _llama)),
    "olmo2": ("Olmo2", (_rms, _whole_heads, _biases, _olmo2)),
    "phi3": ("Phi3", (_rms, _parts_of_heads, _window, _phi3)),
    "qwen2": ("Qwen2", (_rms, _whole_heads)),
    "qwen2moe": ("Qwen2Moe", (_rms, _whole_heads, _qwen2moe)),
    "qwen3": ("Qwen3", (_rms, _whole_heads, _biases)),
    "qwen3moe": ("Qwen3Moe", (_rms, _whole_heads, _biases, _qwen3moe)),
    "smollm3": ("SmolLM3", (_rms, _whole_heads, _wide_biases, _smollm3)),
    "stablelm": ("StableLm", (_parts_of_heads, _stablelm)),
    "starcoder2": ("Starcoder2", (_whole_heads, _window, _starcoder2)),
}
"""An architecture's name in the file -> a class of transformers, and the steps that set fields of its config beside the
fields of `_common`; a step that returns a name chooses another class."""
