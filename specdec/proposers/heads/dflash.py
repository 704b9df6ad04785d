"""DFlash heads (arXiv 2602.06036): one pass guesses a whole block, which attends to the target's hidden states.

Nodes are of two kinds: text, for which the head makes only keys and values, from the target's hidden states; and the
block, i.e. the last token and mask tokens after it, which attend to the text and to one another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3 import modeling_qwen3

from specdec.errors import UnsupportedError
from specdec.models.cache.layout import AttentionKind
from specdec.models.capability import attention_kinds
from specdec.models.hf.private_api import set_attention
from specdec.models.language_model import LanguageModel
from specdec.options.load import Loading
from specdec.proposers.heads.checkpoint import Checkpoint
from specdec.proposers.heads.proposer import HeadDraft
from specdec.proposers.heads.stage import Block, Embedding, Stage


class DFlashStage(Stage):
    """The layers of a DFlash head, which reads `hidden` layers of the target.

    `anchored`: a block's windows start from its first token, otherwise from each token; `causal`: in windowed layers,
    the nodes of a block attend backwards only. `whole`: the target's output layer, if the head has none of its own.
    """

    compiles = False  # nodes of a block attend to later ones

    def __init__(
        self,
        config: Qwen3Config,
        embedding: Embedding,
        vocab_size: int,
        *,
        hidden: int,
        anchored: bool = True,
        causal: bool = False,
        whole: Any = None,
        vocabulary: Tensor | None = None,
    ) -> None:
        width, eps = config.hidden_size, config.rms_norm_eps
        kinds = [  # windows do not count the node itself
            kind if kind.window is None else AttentionKind(kind.name, kind.window + 1)
            for kind in attention_kinds(config) or ()
        ]
        super().__init__(config, embedding, width + 1, vocab_size, kinds, depth=-1, vocabulary=vocabulary)
        self.anchored, self.causal, self._whole = anchored, causal, (whole,)  # in a tuple: not a submodule
        self.fc = nn.Linear(hidden * width, width, bias=False)
        self.hidden_norm = modeling_qwen3.Qwen3RMSNorm(width, eps=eps)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(modeling_qwen3.Qwen3DecoderLayer(config, layer) for layer in layers)
        self.norm = modeling_qwen3.Qwen3RMSNorm(width, eps=eps)
        if whole is None:
            size = vocab_size if vocabulary is None else len(vocabulary)
            self.lm_head = nn.Linear(width, size, bias=False)
        with torch.device("cpu"):
            self.rotary_emb = modeling_qwen3.Qwen3RotaryEmbedding(config)

    def features(self, states: Tensor) -> Tensor:
        """Projected hidden states `[tokens, layers, width]` with a 0 that marks text: `[tokens, width + 1]`."""
        return F.pad(self.hidden_norm(self.fc(states.flatten(1))), (0, 1))

    def masked(self) -> Tensor:
        """The feature `[width + 1]` of all tokens of a block: zeros and a 1."""
        return F.pad(self.norm.weight.new_zeros(self.width - 1), (0, 1), value=1.0)

    def write(
        self, embeds: Tensor, features: Tensor, masks: Mapping[str, Tensor], positions: Tensor, cache: Any
    ) -> Tensor:
        """The last layer's output, and a column of zeros."""
        context, block = features[..., :-1], features[..., -1:] > 0
        seen = {name: self._widened_mask(name, mask, block[..., 0]) for name, mask in masks.items()}
        angles, hidden = self.rotary_emb(embeds, positions), embeds
        layers: list[Any] = list(self.layers)
        for number, (layer, name) in enumerate(zip(layers, self.config.layer_types, strict=True)):
            normed = layer.input_layernorm(hidden)
            sources = torch.where(block, normed, context)
            hidden = hidden + _attention(layer.self_attn, normed, sources, angles, seen[name], cache, number)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return F.pad(hidden, (0, 1))

    def guess(self, written: Tensor) -> Tensor:
        normed = self.norm(written[..., :-1])
        return (self._whole[0] or self.lm_head)(normed)

    def _widened_mask(self, name: str, mask: Tensor, block: Tensor) -> Tensor:
        """`mask` `[rows, 1, nodes, end]`, in which the nodes of a `block` `[rows, nodes]` also see one another."""
        first = block.int().argmax(1)
        last = block.shape[1] - 1 - block.flip(1).int().argmax(1)
        begin, end = (mask.gather(2, at.view(-1, 1, 1, 1).expand(-1, 1, 1, mask.shape[3])) for at in (first, last))
        back = begin if self.anchored else mask
        ahead = mask if self.causal and name == "sliding_attention" else end
        return torch.where(block[:, None, :, None], torch.maximum(back, ahead), mask)


def _attention(
    attention: Any, normed: Tensor, sources: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor, cache: Any, layer: int
) -> Tensor:
    """Attention with keys and values made of `sources` `[rows, nodes, hidden]`, and queries of `normed`."""
    shape = (*normed.shape[:-1], -1, attention.head_dim)
    query = attention.q_norm(attention.q_proj(normed).view(shape)).transpose(1, 2)
    key = attention.k_norm(attention.k_proj(sources).view(shape)).transpose(1, 2)
    value = attention.v_proj(sources).view(shape).transpose(1, 2)
    query, key = modeling_qwen3.apply_rotary_pos_emb(query, key, *angles)
    if cache is not None:
        key, value = cache.update(key, value, layer)
    seen = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=attention.scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return attention.o_proj(seen.transpose(1, 2).flatten(2))


def load_dflash(checkpoint: Checkpoint, target: LanguageModel, how: Loading) -> HeadDraft:
    """A DFlash head in the `speculators` format.

    Raises OptionError if it was made for another target, LoadError for a broken checkpoint.
    """
    given, config = checkpoint.config, _layers_of(checkpoint.layers_config(), checkpoint)
    checkpoint.check_target(
        target, width=given.get("target_hidden_size") or config.hidden_size, vocab_size=config.vocab_size
    )
    layers = checkpoint.read_layers("aux_hidden_state_layer_ids", target)
    vocabulary = checkpoint.vocabulary(target, given.get("draft_vocab_size", target.vocab_size))
    has_head = "lm_head.weight" in checkpoint.weights
    options = {
        "causal": not given.get("sliding_window_non_causal", False),
        "whole": None if has_head or vocabulary is not None else target.output_embeddings,
        "vocabulary": vocabulary,
    }
    size, anchor = given.get("block_size", 8), bool(given.get("sample_from_anchor", False))
    return _head(config, checkpoint, target, how, layers, size, anchor=anchor, **options)


def load_assistant(checkpoint: Checkpoint, target: LanguageModel, how: Loading) -> HeadDraft:
    """A DFlash head in the format of transformers' assistants; raises as `load_dflash`."""
    config = _layers_of(checkpoint.config, checkpoint)
    layers = [layer + 1 for layer in checkpoint.config["target_layer_ids"]]  # the outputs of these layers
    if not all(0 < layer <= target.num_layers for layer in layers):
        raise checkpoint.unfit(f"it reads what layers {list(checkpoint.config['target_layer_ids'])} write", target)
    checkpoint.check_target(target, width=config.hidden_size, vocab_size=target.vocab_size)
    weights = {
        name.removeprefix("encoder.").replace("output_norm_enc.", "hidden_norm."): weight
        for name, weight in checkpoint.weights.items()
    }
    options = {"anchored": False, "whole": target.output_embeddings}
    size = checkpoint.config["block_size"]
    return _head(config, replace(checkpoint, weights=weights), target, how, layers, size, anchor=False, **options)


def _head(
    config: Qwen3Config,
    checkpoint: Checkpoint,
    target: LanguageModel,
    how: Loading,
    layers: list[int],
    size: Any,
    *,
    anchor: bool,
    **options: Any,
) -> HeadDraft:
    """The head with its weights; `options` are `DFlashStage`'s, `anchor`: the last token's node guesses as well."""
    embedding = Embedding(target.input_embeddings)
    with torch.device("meta"):
        stage = DFlashStage(config, embedding, target.vocab_size, hidden=len(layers), **options)
    masks = checkpoint.count(size, "block_size", 1 if anchor else 2) - 1
    token = checkpoint.mask_token(embedding)
    checkpoint.fill(stage, checkpoint.dtype(how, target), target.device)
    block = Block(masks + anchor, token, masks, stage.masked(), reads_itself=True)
    return HeadDraft([stage], layers, backend=how.backend, block=block)


def _layers_of(given: Any, checkpoint: Checkpoint) -> Qwen3Config:
    """The config of the layers, which are Qwen3's in all checkpoints; raises UnsupportedError for other attention."""
    fields = given if isinstance(given, Mapping) else given.to_dict()
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "hidden_act",
        "attention_bias", "layer_types", "sliding_window",
    )  # fmt: skip
    kept = {name: fields[name] for name in names if fields.get(name) is not None}
    kinds = kept.setdefault("layer_types", ["full_attention"] * kept.get("num_hidden_layers", 1))
    if not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise checkpoint.broken(
            f"it has layers of kinds {sorted(set(kinds))}, known are full_attention and sliding_attention",
            UnsupportedError,
        )
    config = Qwen3Config(**kept, use_sliding_window="sliding_attention" in kinds)
    set_attention(config, "sdpa")
    return config
