"""The published forms of heads, told by their files, and each as the form of vLLM's `speculators` library.

Layers of the target are numbered by their inputs, as there; other forms name the layers whose outputs a head reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

Config = Mapping[str, Any]
Weights = Mapping[str, Tensor]

_ASSISTANT = {
    "target_layer_ids",
    "block_size",
    "mask_token_id",
}  # transformers' assistants that guess blocks have these
_GEMMA = r"gemma4\w*_assistant"  # the `model_type` of Gemma 4's assistants
_NAMES = r"(?=.*ForCausalLM).*?(Eagle3?)|(DFlash2?)DraftModel"  # architectures of heads, with their kind


def kind_of_config(config: Config) -> str | None:
    """The kind of head ("eagle3", …) whose config.json this is; None if it is no head's."""
    if (kind := config.get("speculators_model_type")) is not None:
        return str(kind)
    if re.fullmatch(_GEMMA, str(config.get("model_type"))):
        return "gemma4"
    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        if (match := re.match(_NAMES, str(name))) is not None:
            return str(match[1] or match[2]).lower()
    if isinstance(config.get("dflash_config"), Mapping) or config.keys() >= _ASSISTANT:
        return "dflash"
    return "eagle3" if "draft_vocab_size" in config else None


def unified(config: Config, weights: Weights) -> tuple[Config, dict[str, Tensor]]:
    """A head's config and weights in the form of `speculators`; its kind is in `speculators_model_type`."""
    kind = kind_of_config(config)
    if "speculators_model_type" not in config:
        if kind == "eagle3":
            config, weights = _native_eagle(config, weights)
        elif kind == "gemma4":
            weights = _gemma(weights)
        elif kind == "dflash" and "dflash_config" in config:
            config = _block_of_z_lab(config)
        elif kind == "dflash":
            config, weights = _block_of_assistant(config, weights)
    return {**config, "speculators_model_type": kind}, dict(weights)


def _native_eagle(config: Config, weights: Weights) -> tuple[Config, Weights]:
    """EAGLE-3's own form, which SafeAILab, SpecForge and ModelOpt write: one config, and a `midlayer`."""
    read = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    layers = {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in read]} if read else {}
    stage_weights = {
        re.sub(r"^(model\.)?midlayer\.", "layers.0.", name).removeprefix("model."): t for name, t in weights.items()
    }
    return {**config, "transformer_layer_config": {"model_type": "llama", **config}, **layers}, stage_weights


def _block_of_z_lab(config: Config) -> Config:
    """DFlash's own form: `dflash_config` in the config of the layers, whose windows count each token itself."""
    block, window = config["dflash_config"], config.get("sliding_window")
    fields = {name: block.get(name, config.get(name)) for name in ("block_size", "mask_token_id")}
    return {
        **config,
        **block,
        **{name: value for name, value in fields.items() if value is not None},
        "transformer_layer_config": {**config, "sliding_window": window and window - 1},
        "aux_hidden_state_layer_ids": [layer + 1 for layer in block["target_layer_ids"]],
        "sliding_window_non_causal": config.get("is_causal") is False,
        "windows_from_anchor": False,
    }


def _block_of_assistant(config: Config, weights: Weights) -> tuple[Config, Weights]:
    """The form of transformers' assistants that guess blocks."""
    stage_weights = {
        name.removeprefix("encoder.").replace("output_norm_enc.", "hidden_norm."): tensor
        for name, tensor in weights.items()
    }
    return {
        **config,
        "transformer_layer_config": {"vocab_size": 0, **config, "model_type": "qwen3"},  # 0: it has no number
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config["target_layer_ids"]],
        "sliding_window_non_causal": True,
        "windows_from_anchor": False,
    }, stage_weights


def _gemma(weights: Weights) -> Weights:
    """An assistant's weights without keys and values, which are stored although its layers use the target's."""
    stage_weights = {
        name.removeprefix("model."): tensor
        for name, tensor in weights.items()
        if not re.search(r"\.self_attn\.[kv]_(proj|norm)\.", name)
    }
    tied = {"lm_head.weight": stage_weights["embed_tokens.weight"]} if "embed_tokens.weight" in stage_weights else {}
    return {**tied, **stage_weights}
