"""Tiny random models, one per architecture, loud enough that a wrong mask or position shows in the logits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import wraps
from typing import Any, TypeVar

import torch
from transformers import AutoConfig, PreTrainedModel

from specdec.models.hf.tiny_models import SIZES, WINDOW, random_model

ROPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GQA = {**ROPE, "num_key_value_heads": 2}
HEADS = {**GQA, "head_dim": 8}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MAMBA = {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
MIXED = ["linear_attention", "full_attention"]
_SEQ2SEQ = ("t5", "mt5", "umt5", "bart", "mbart", "marian", "pegasus", "blenderbot", "m2m_100", "whisper")

# name -> (model_type, options); the families that the package knows have its sizes
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, options) for name, options in SIZES.items() if name not in _SEQ2SEQ},
    "falcon_alibi": ("falcon", {**SIZES["falcon"], "alibi": True}),
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
ENCODER_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, SIZES[name]) for name in _SEQ2SEQ}
NAMES: tuple[str, ...] = (*DECODERS, *ENCODER_DECODERS)


Make = TypeVar("Make", bound=Callable[..., Any])


def copied(make: Make) -> Make:
    """A function that makes a thing of plain arguments once, and then copies it, which takes a fraction of the time."""
    things: dict[str, Any] = {}

    @wraps(make)
    def copy(*args: Any, **options: Any) -> Any:
        key = repr((args, sorted(options.items())))
        if key not in things:
            things[key] = make(*args, **options)
        return deepcopy(things[key])

    return copy  # type: ignore[return-value]


@copied
def tiny(name: str, vocab: int = 64, seed: int = 0, **options: Any) -> PreTrainedModel:
    """The architecture `name` with random float32 weights, in eval mode; equal arguments give equal weights."""
    model_type, common = DECODERS[name] if name in DECODERS else ENCODER_DECODERS[name]
    ids: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": vocab}
    if name in ENCODER_DECODERS:
        ids["decoder_start_token_id"] = 1
    if model_type == "marian":
        ids["decoder_vocab_size"] = vocab
    config = AutoConfig.for_model(model_type, **{**ids, **deepcopy(common), **options})
    return random_model(config, seed)


def never(*_: Any, **__: Any) -> Any:
    """A forward for calls that must end before it."""
    raise AssertionError("a forward pass was run")


def silent(model: PreTrainedModel) -> PreTrainedModel:
    """The model, which from now on must not run."""
    model.forward = never
    if model.config.is_encoder_decoder:
        model.get_encoder().forward = never
    return model


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Context in which torch computes on so many threads."""
    held = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(held)


def tiny_inputs(name: str, rows: int = 1, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random encoder inputs for an encoder-decoder: ids with a ragged mask, or features for Whisper."""
    generator = torch.Generator().manual_seed(seed)
    if name == "whisper":
        return {"input_features": torch.randn(rows, 8, 40, generator=generator)}
    ids = torch.randint(3, 64, (rows, 9), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, 9 - row % 4 :] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
