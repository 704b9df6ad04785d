"""Tiny random models, one per architecture, loud enough that a wrong mask or position shows in the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    WhisperForConditionalGeneration,
)

WINDOW = 12
ROPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GQA = {**ROPE, "num_key_value_heads": 2}
HEADS = {**GQA, "head_dim": 8}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 512,
}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
MAMBA = {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
MIXED = ["linear_attention", "full_attention"]

# name -> (model_type, options)
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GQA),
    "mistral": ("mistral", {**GQA, "sliding_window": WINDOW}),
    "qwen2": ("qwen2", GQA),
    "qwen3": ("qwen3", HEADS),
    "gemma": ("gemma", HEADS),
    "gemma2": ("gemma2", {**HEADS, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    "gemma3_text": ("gemma3_text", {**HEADS, "sliding_window": WINDOW, "sliding_window_pattern": 2}),
    "gpt2": ("gpt2", GPT),
    "gpt_bigcode": ("gpt_bigcode", GPT),
    "gpt_neox": ("gpt_neox", ROPE),
    "gptj": ("gptj", {**GPT, "rotary_dim": 4}),
    "gpt_neo": (
        "gpt_neo",
        {
            "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 512,
            "attention_types": [[["global", "local"], 1]], "window_size": WINDOW,
        },
    ),
    "codegen": ("codegen", {**GPT, "rotary_dim": 4}),
    "opt": ("opt", {**ROPE, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 512}),
    "phi": ("phi", ROPE),
    "phi3": ("phi3", {**GQA, "sliding_window": WINDOW}),
    "falcon": ("falcon", {**ROPE, "alibi": False, "new_decoder_architecture": False}),
    "falcon_alibi": ("falcon", {**ROPE, "alibi": True, "new_decoder_architecture": False}),
    "bloom": ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}),
    "mixtral": ("mixtral", {**GQA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("qwen2_moe", {**GQA, **MOE, "num_experts": 4, "shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("qwen3_moe", {**HEADS, **MOE, "num_experts": 4}),
    "olmoe": ("olmoe", {**GQA, "num_experts": 4, "num_experts_per_tok": 2}),
    "stablelm": ("stablelm", GQA),
    "starcoder2": ("starcoder2", {**GQA, "sliding_window": WINDOW}),
    "cohere": ("cohere", GQA),
    "cohere2": ("cohere2", {**GQA, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
    "olmo": ("olmo", GQA),
    "olmo2": ("olmo2", GQA),
    "granite": ("granite", GQA),
    "gpt_oss": (
        "gpt_oss",
        {
            **HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "llama4_text": (
        "llama4_text",
        {
            **HEADS, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
        },
    ),
    "smollm3": ("smollm3", GQA),
    "glm4": ("glm4", HEADS),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **ROPE, **MOE, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
            "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8, "v_head_dim": 6,
        },
    ),
    "biogpt": ("biogpt", {**ROPE, "max_position_embeddings": 512}),
    "xglm": (
        "xglm",
        {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "max_position_embeddings": 512},
    ),
    "mamba": ("mamba", MAMBA),
    "mamba2": ("mamba2", {**MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}),
    "falcon_mamba": ("falcon_mamba", MAMBA),
    "recurrent_gemma": (
        "recurrent_gemma",
        {**ROPE, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": WINDOW, "num_key_value_heads": 1},
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **HEADS, **MOE, "num_experts": 4, "shared_expert_intermediate_size": 24, "layer_types": MIXED,
            "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "jamba": (
        "jamba",
        {
            **GQA, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
            "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
        },
    ),
    "bamba": (
        "bamba",
        {
            **GQA, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1,
            "mamba_d_state": 8, "mamba_chunk_size": 8,
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            **HEADS, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1,
            "mamba_d_state": 8, "mamba_chunk_size": 8,
        },
    ),
    "lfm2": ("lfm2", {**GQA, "layer_types": ["conv", "full_attention"], "block_ff_dim": 48}),
    "rwkv": ("rwkv", {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2}),
}  # fmt: skip
ENCODER_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", T5),
    "mt5": ("mt5", T5),
    "umt5": ("umt5", T5),
    "bart": ("bart", BART),
    "mbart": ("mbart", BART),
    "marian": ("marian", BART),
    "pegasus": ("pegasus", BART),
    "blenderbot": ("blenderbot", BART),
    "m2m_100": ("m2m_100", BART),
    "whisper": ("whisper", {**BART, "max_target_positions": 448, "max_source_positions": 20, "num_mel_bins": 8}),
}
NAMES: tuple[str, ...] = (*DECODERS, *ENCODER_DECODERS)


def tiny(name: str, vocab: int = 64, seed: int = 0, **options: Any) -> PreTrainedModel:
    """The architecture `name` with random float32 weights, in eval mode; equal arguments give equal weights."""
    model_type, common = DECODERS[name] if name in DECODERS else ENCODER_DECODERS[name]
    ids: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": vocab}
    if name in ENCODER_DECODERS:
        ids["decoder_start_token_id"] = 1
        if model_type in {"marian", "blenderbot"}:
            ids["forced_eos_token_id"] = None
        if model_type == "marian":
            ids["decoder_vocab_size"] = vocab
    config = AutoConfig.for_model(model_type, **{**ids, **common, **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build(name, config)
        _shake(model)
    return model.eval()


def tiny_inputs(name: str, rows: int = 1, seed: int = 0, vocab: int = 64) -> dict[str, torch.Tensor]:
    """Random encoder inputs for an encoder-decoder: ids with a ragged mask, or features for Whisper."""
    generator = torch.Generator().manual_seed(seed)
    if name == "whisper":
        return {"input_features": torch.randn(rows, 8, 40, generator=generator)}
    ids = torch.randint(3, vocab, (rows, 9), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, 9 - row % 4 :] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def _build(name: str, config: Any) -> PreTrainedModel:
    if name == "whisper":
        return WhisperForConditionalGeneration(config)
    return (AutoModelForSeq2SeqLM if name in ENCODER_DECODERS else AutoModelForCausalLM).from_config(config)


def _shake(model: PreTrainedModel) -> None:
    """Library initialisations are so small that attention hardly matters; these weights make every key count."""
    fixed = {id(p) for m in model.modules() if "Sinusoidal" in type(m).__name__ for p in m.parameters()}
    for module_name, parameter in model.named_parameters():
        last = module_name.rsplit(".", 1)[-1]
        special = last in {"A_log", "D", "dt_bias"} or "conv1d" in module_name
        if id(parameter) in fixed or parameter.dim() < 2 or special:
            continue
        embedding = isinstance(model.get_submodule(module_name.rpartition(".")[0]), nn.Embedding)
        nn.init.normal_(parameter, std=0.7 if embedding else 1.6 / parameter.shape[-1] ** 0.5)
