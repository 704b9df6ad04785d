"""Makes untrained EAGLE-3 heads, and writes heads in the `speculators` format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig

from specdec.errors import UnsupportedError
from specdec.models.hf.private_api import set_attention
from specdec.models.language_model import LanguageModel
from specdec.proposers.heads.eagle3 import EagleStage
from specdec.proposers.heads.stage import Embedding

FORMAT = "0.9.0"  # the version of `speculators` whose config this is


def layers_to_read(target: LanguageModel) -> list[int]:
    """The layers whose hidden states a new head reads: a low, a middle and a high one, the format's default."""
    most = target.num_layers
    return [2, most // 2, most - 3] if most > 6 else list(range(max(most - 3, 0), most))


def make_eagle(target: LanguageModel, vocabulary: Tensor | None, layers: int = 1) -> EagleStage:
    """A head in float32 that guesses the tokens `vocabulary` `[ids]` (None: all).

    Its projection starts as the highest hidden state that it reads, its output layer and matching weights as copies of
    the target's. Raises UnsupportedError for targets with an encoder, without hidden states, or with another output
    layer than `nn.Linear`.
    """
    if target.is_encoder_decoder:
        raise UnsupportedError(f"a head needs a decoder-only target, and {type(target.model).__name__} has an encoder")
    reads = layers_to_read(target)
    target.check_hidden_states(reads)
    head = target.output_embeddings
    if type(head) is not nn.Linear or head.weight.is_meta:
        raise UnsupportedError(
            f"a head copies the target's output layer, which is {type(head).__name__} and not nn.Linear"
        )
    embedding = Embedding(target.input_embeddings)
    if embedding.width != target.config.hidden_size:
        raise UnsupportedError(
            f"the embeddings of {type(target.model).__name__} are {embedding.width} wide, its layers "
            f"{target.config.hidden_size}: no head reads both"
        )
    config = _config(target, layers)
    set_attention(config, "sdpa")
    stage = EagleStage(config, embedding, target.vocab_size, reads, vocabulary=vocabulary)
    stage.to(target.device)
    with torch.no_grad():
        width = config.hidden_size
        for parameter in (*stage.fc.parameters(), *stage.layers.parameters()):
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.5 / parameter.shape[1] ** 0.5)
        stage.fc.weight[:, -width:] += torch.eye(width, device=target.device)
        stage.lm_head.weight.copy_(head.weight if vocabulary is None else head.weight[vocabulary])
        _copy_last(target, stage)
    return stage


def _config(target: LanguageModel, layers: int) -> Any:
    """A Llama layer of the target's sizes."""
    config = target.config
    width, heads = config.hidden_size, config.num_attention_heads
    inner = getattr(config, "intermediate_size", None)
    rope = getattr(config, "rope_parameters", None) or {}
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=width,
        intermediate_size=inner if isinstance(inner, int) else 4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or width // heads,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 10000.0))},
    )


def _copy_last(target: LanguageModel, stage: EagleStage) -> None:
    """Copies the weights of the target's last layer and norm that have the same names and shapes."""
    final: Any = getattr(target.decoder, "norm", None)
    if getattr(final, "weight", None) is not None and final.weight.shape == stage.norm.weight.shape:
        stage.norm.weight.copy_(final.weight)
    name = f".layers.{target.num_layers - 1}."
    last = {key.partition(name)[2]: tensor for key, tensor in target.model.state_dict().items() if name in key}
    for key, tensor in stage.layers[0].state_dict().items():
        source = last.get(key)
        if source is None or source.ndim != tensor.ndim:
            continue
        if source.shape == tensor.shape:
            tensor.copy_(source)
        elif source.shape[0] == tensor.shape[0] and 2 * source.shape[1] == tensor.shape[1]:
            tensor[:, source.shape[1] :] = source  # the half of the inputs that are features


def save_eagle(stage: EagleStage, target: LanguageModel, folder: Path, *, guesses: int) -> None:
    """Writes a head to `folder`, in the target's dtype, with `guesses` per round in its config."""
    dtype, vocabulary = target.dtype, stage.vocabulary
    weights = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in stage.state_dict().items()}
    every = torch.arange(target.vocab_size, device=target.device)
    weights["embed_tokens.weight"] = stage.embedding(every).detach().to("cpu", dtype).contiguous()
    if vocabulary is not None:
        ids = vocabulary.cpu()
        weights["d2t"] = ids - torch.arange(len(ids))
        weights["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": FORMAT,
        "draft_vocab_size": stage.lm_head.out_features,
        "eagle_aux_hidden_state_layer_ids": layers_to_read(target),
        "target_hidden_size": target.config.hidden_size,
        "norm_before_residual": stage.layers[0].norm_before_residual,
        "transformer_layer_config": stage.config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": guesses,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "architectures": [type(target.model).__name__],
                "name_or_path": str(target.model.config.name_or_path) or None,
            },
        },
        "dtype": str(dtype).removeprefix("torch."),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
