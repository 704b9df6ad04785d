"""EAGLE-3 heads (arXiv 2503.01840): decoder layers over three hidden states of the target.

A feature is the projection of these hidden states or, at a guessed token, the head's own output. The first layer's
attention reads embedding and feature concatenated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from specdec.errors import UnsupportedError
from specdec.models.capability import attention_kinds
from specdec.models.hf.private_api import CACHE
from specdec.models.language_model import LanguageModel
from specdec.proposers.heads.checkpoint import Checkpoint
from specdec.proposers.heads.stage import Embedding, Stage

KINDS: dict[str, tuple[Any, Any, Any]] = {
    "llama": (modeling_llama.LlamaDecoderLayer, modeling_llama.LlamaRMSNorm, modeling_llama.LlamaRotaryEmbedding),
    "qwen3": (modeling_qwen3.Qwen3DecoderLayer, modeling_qwen3.Qwen3RMSNorm, modeling_qwen3.Qwen3RotaryEmbedding),
}
"""Layer, norm and rotary embedding by the `model_type` of the layers' config."""
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Where an EAGLE-3 head may normalize, by the format's names.

`norm_before_residual`: the first layer's residual is the normalized feature. Before projection, `norm_before_fc`
normalizes the hidden states of all layers together, `fc_norm` each layer's. `norm_output`: the features that it writes
are normalized, not only the logits' input (EAGLE 3.1).
"""


class FirstLayer(nn.Module):
    """A decoder layer whose attention reads embedding and feature concatenated."""

    def __init__(self, layer: Any, norm: Any, config: Any, *, norm_before_residual: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.hidden_norm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm_before_residual = norm_before_residual
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            wide = nn.Linear(2 * config.hidden_size, old.out_features, bias=old.bias is not None)
            setattr(self.self_attn, name, wide)

    def forward(self, embeds: Tensor, features: Tensor, **attention: Any) -> Tensor:
        """The output `[rows, nodes, hidden]` for embeddings and features of that shape."""
        normed = self.hidden_norm(features)
        residual = normed if self.norm_before_residual else features
        both = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        hidden = residual + self.self_attn(hidden_states=both, **attention)[0]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleStage(Stage):
    """The one stage of an EAGLE-3 head; its layers `reads` are `target_width` wide, `norms` are some of `NORMS`."""

    def __init__(
        self,
        config: Any,
        embedding: Embedding,
        vocab_size: int,
        reads: Sequence[int],
        *,
        target_width: int | None = None,
        norms: Collection[str] = (),
        vocabulary: Tensor | None = None,
    ) -> None:
        width, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(config, embedding, width, vocab_size, attention_kinds(config) or (), vocabulary=vocabulary)
        layer, norm, rotary = KINDS[config.model_type]
        self.reads, read = reads, len(reads) * (target_width or width)
        self._names = getattr(config, "layer_types", None) or [self.kinds[0].name] * config.num_hidden_layers
        self.norm_output = "norm_output" in norms
        first = FirstLayer(layer(config, 0), norm, config, norm_before_residual="norm_before_residual" in norms)
        self.layers = nn.ModuleList([first, *(layer(config, i) for i in range(1, config.num_hidden_layers))])
        self.fc = nn.Linear(read, width, bias=False)
        self.input_norm = norm(read, eps=eps) if "norm_before_fc" in norms else None
        each = (norm(read // len(reads), eps=eps) for _ in reads)
        self.fc_norm = nn.ModuleList(each) if "fc_norm" in norms else None
        self.norm = norm(width, eps=eps)
        self.lm_head = nn.Linear(width, vocab_size if vocabulary is None else len(vocabulary), bias=False)
        with torch.device("cpu"):
            self.rotary_emb = rotary(config)

    def features(self, states: Tensor) -> Tensor:
        if self.fc_norm is not None:
            states = torch.stack([norm(states[:, i]) for i, norm in enumerate(self.fc_norm)], dim=1)
        together = states.flatten(1)
        if self.input_norm is not None:
            together = self.input_norm(together)
        return self.fc(together)

    def write(
        self, embeds: Tensor, features: Tensor, masks: Mapping[str, Tensor], positions: Tensor, cache: Any
    ) -> Tensor:
        common = {
            "position_ids": positions,
            "position_embeddings": self.rotary_emb(features, positions),
            CACHE: cache,
        }
        first, *further = self.layers
        hidden = first(embeds, features, attention_mask=masks[self._names[0]], **common)
        for layer, name in zip(further, self._names[1:], strict=True):
            hidden = layer(hidden, attention_mask=masks[name], **common)
        return self.norm(hidden) if self.norm_output else hidden

    def guess(self, written: Tensor) -> Tensor:
        return self.lm_head(written if self.norm_output else self.norm(written))


def eagle_stage(checkpoint: Checkpoint, target: LanguageModel) -> EagleStage:
    """The stage of an EAGLE-3 head.

    Raises OptionError if it was made for another target, UnsupportedError for unknown layers, LoadError for a broken
    checkpoint.
    """
    config, fields = checkpoint.layers_config(), checkpoint.config
    if config.model_type not in KINDS:
        raise UnsupportedError(
            f"`{checkpoint.argument}` {checkpoint.source!r} has layers of kind {config.model_type!r}; known are "
            f"{', '.join(KINDS)}"
        )
    if (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1) != 1:
        raise checkpoint.broken("rotary embeddings over a part of each attention head are unknown", UnsupportedError)
    width = fields.get("target_hidden_size") or config.hidden_size
    checkpoint.check_target(target, width=width, vocab_size=config.vocab_size)
    layers = checkpoint.read_layers("eagle_aux_hidden_state_layer_ids", target)
    embedding = checkpoint.embedding(target)
    if embedding.width != config.hidden_size:
        raise checkpoint.broken(f"embeddings are {embedding.width} wide, its layers {config.hidden_size}")
    vocabulary = checkpoint.vocabulary(target)
    norms = [name for name in NORMS if fields.get(name)]
    if {"norm_before_fc", "fc_norm"} <= {*norms}:
        raise checkpoint.broken("`norm_before_fc` and `fc_norm` exclude each other")
    checkpoint.kinds(config)
    options = {"target_width": width, "norms": norms, "vocabulary": vocabulary}
    return EagleStage(config, embedding, target.vocab_size, layers, **options)
