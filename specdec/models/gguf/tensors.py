"""Where each tensor of a GGUF file lies in the transformers model, and how llama.cpp changed it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.errors import UnsupportedError
from specdec.models.gguf.header import architecture_of
from specdec.models.gguf.reader import GgufReader


@dataclass(frozen=True)
class TensorPart:
    """Rows of a tensor and their place in a parameter, which has its name in the model's state dict.

    Matrices, and stacks of them [experts, rows, columns], have rows in the last dimension but one; vectors, and biases
    [experts, rows], in the last one.

    `rows`: the tensor's rows in the order of the parameter; None: all of them, as they lie.
    `place`: which rows of the parameter they are; None: all rows. `flipped`: the parameter has rows and columns
    exchanged, and `place` counts its columns. `plus`: to be added to each number.
    """

    parameter: str
    rows: Tensor | None = None
    place: slice | None = None
    flipped: bool = False
    plus: float = 0.0


def tensor_map(reader: GgufReader, config: Any) -> dict[str, tuple[TensorPart, ...]]:
    """The parts of every tensor of a file; a tensor that holds no weights, such as factors of positions, has none.

    `config`: the result of `read_config`. Raises UnsupportedError for a tensor that is not known, which names it.
    """
    names = {**_EVERYWHERE, **_OF_ARCHITECTURE.get(architecture_of(reader), {})}
    return {name: _parts(name, tensor, names, config, reader) for name, tensor in reader.tensors.items()}


def _parts(name: str, tensor: Any, names: dict[str, str], config: Any, reader: GgufReader) -> tuple[TensorPart, ...]:
    if name in _NO_WEIGHTS:
        return ()
    base, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)", base)
    module = names.get(layer[2] if layer else base)
    if module is None or kind not in ("weight", "bias") or (layer and int(layer[1]) >= config.num_hidden_layers):
        raise UnsupportedError(
            f"{reader.path} has the tensor {name}, and where it belongs in models of {architecture_of(reader)} is not "
            "known: use another file, or the checkpoint in safetensors that it was made of"
        )
    prefix = f"model.layers.{layer[1]}." if layer else ""
    if "attn_qkv" in base and module == _SPLIT:
        return _attention_parts(prefix, kind, config)
    if "{}" in module:  # one parameter for each row
        count = int(tensor.shape[1])
        return tuple(
            TensorPart(f"{prefix}{module.format(row)}.{kind}", rows=torch.tensor([row])) for row in range(count)
        )
    if "exps" in base:
        return (
            _expert_part(base, kind, prefix + module, config, int(tensor.data.shape[-2 if kind == "weight" else -1])),
        )
    parameter = f"{prefix}{module}" if module.endswith(".sinks") else f"{prefix}{module}.{kind}"
    has_added_one = config.model_type.startswith("gemma") and base.endswith("_norm")  # which transformers adds itself
    return (TensorPart(parameter, _row_order(base, config), plus=-1.0 if has_added_one else 0.0),)


def _attention_parts(prefix: str, kind: str, config: Any) -> tuple[TensorPart, ...]:
    """Queries, keys and values of one tensor."""
    heads, start, parts = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads), 0, []
    for name, count in zip(("q", "k", "v"), heads, strict=True):
        rows = torch.arange(start, start := start + count * config.head_dim)
        order = _row_order(f"attn_{name}", config)
        parameter = f"{prefix}self_attn.{name}_proj.{kind}"
        parts.append(TensorPart(parameter, rows if order is None else rows[order]))
    return tuple(parts)


def _expert_part(base: str, kind: str, parameter: str, config: Any, rows: int) -> TensorPart:
    """The part of a tensor of all experts; gates and the projections that they scale share a parameter."""
    if config.model_type == "gpt_oss":
        suffix = "_bias" if kind == "bias" else ""
        place = {"ffn_gate_exps": slice(0, None, 2), "ffn_up_exps": slice(1, None, 2)}.get(base.rpartition(".")[2])
        return TensorPart(parameter + suffix, place=place, flipped=kind == "weight")
    places = {"ffn_gate_exps": slice(0, rows), "ffn_up_exps": slice(rows, 2 * rows)}
    return TensorPart(parameter, place=places.get(base.rpartition(".")[2]))


def _row_order(base: str, config: Any) -> Tensor | None:
    """The order of queries' or keys' rows where llama.cpp turns neighbours and transformers turns halves."""
    name = base.rpartition(".")[2]
    if config.model_type not in _NEIGHBOURS or name not in ("attn_q", "attn_k"):
        return None
    heads = config.num_attention_heads if name == "attn_q" else config.num_key_value_heads
    return torch.arange(heads * config.head_dim).view(heads, config.head_dim // 2, 2).transpose(1, 2).flatten()


_SPLIT = "split"  # into queries, keys and values
_NEIGHBOURS = ("llama", "mistral", "mixtral", "granite", "smollm3")  # by `model_type`
_NO_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_EVERYWHERE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": _SPLIT,
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""A tensor's name without its layer -> the module's."""
_GEMMA = {"ffn_norm": "pre_feedforward_layernorm"}
_OF_ARCHITECTURE: dict[str, dict[str, str]] = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gpt-oss": {"attn_sinks": "self_attn.sinks", "ffn_gate_inp": "mlp.router"},
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "stablelm": {"attn_q_norm": "self_attn.q_layernorm.norms.{}", "attn_k_norm": "self_attn.k_layernorm.norms.{}"},
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
}
