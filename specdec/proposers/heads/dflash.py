"""DFlash heads (arXiv 2602.06036): one pass guesses a whole block, which attends to the target's hidden states.

Of text, the head makes only keys and values, from the target's hidden states. The block is the last token and mask
tokens after it, which attend to the text and to one another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3 import modeling_qwen3 as qwen

from specdec.core.budget import Budget
from specdec.core.drafts import SequenceView
from specdec.core.tree import EMPTY, Tree
from specdec.core.work import Logits, Work
from specdec.decoding.samplers import fit
from specdec.models.language_model import LanguageModel
from specdec.proposers.growth import Feed, Growth
from specdec.proposers.heads.checkpoint import Checkpoint
from specdec.proposers.heads.proposer import HeadProposer
from specdec.proposers.heads.stage import Embedding, Stage


class DFlashProposer(HeadProposer):
    """Makes all guesses of a round in one pass, independently of each other; none for the branches of a search."""

    shift = 0

    def _limit(self, seq: SequenceView, budget: Budget) -> int:
        return 0 if seq.tree.tokens else min(super()._limit(seq, budget), self._head.stage.guesses)

    def _grow(self, growths: Sequence[Growth]) -> None:
        """One pass over missing text and blocks, whose logits are the levels; the cache holds no guesses."""
        works = [(growth, work) for growth in growths if (work := growth.first()) is not None]
        passed = self._run([Feed(growth.cached, work) for growth, work in works]) if works else []
        for (growth, work), out in zip(works, passed, strict=True):
            level: Work | None = work
            for logits in fit(out.logits.cpu(), self._vocab_size):
                level = level and growth.take(level, logits.expand(level.num_logits, -1))
            growth.cached.num_text, growth.cached.guesses = self._session.length(growth.cached.cache_row), []
            growth.cached.branches = EMPTY

    def _run(self, feeds: Sequence[Feed], level: int = 0) -> list[Logits]:
        """A pass over text and, if logits are wanted, the block; returns the block's logits `[guesses, vocab]`."""
        block, guesses = self._head.stage, any(feed.work.num_logits for feed in feeds)
        masks = [block.mask] * block.masks if guesses else []
        fed = []
        for feed in feeds:
            tokens, context = feed.work.new_tokens, self._text(feed, feed.work.num_text - guesses)
            marked = F.pad(context.new_zeros(len(masks) + guesses, context.shape[1] - 1), (0, 1), value=1.0)
            embeds = self._head.inputs(tokens + masks, torch.cat([context, marked]))
            more = {"num_logits": guesses * block.guesses, "embeds": embeds}
            fed.append(replace(feed.work, tree=Tree.chain(tokens + masks), **more))
        outputs = self._session.run(fed)
        paths = [list(range(feed.work.num_text - guesses)) for feed in feeds]
        self._session.commit([feed.work.row for feed in feeds], paths)
        return outputs


class DFlashStage(Stage):
    """The layers of a DFlash head: `masks` tokens `mask` make `guesses`.

    Raises OptionError for other targets, UnsupportedError for unknown layers, LoadError for a broken checkpoint.
    """

    records = False  # nodes of a block attend to later ones
    proposer = DFlashProposer

    def __init__(self, checkpoint: Checkpoint, target: LanguageModel) -> None:
        fields, config, embedding = checkpoint.config, checkpoint.layers_config(), Embedding(target.input_embeddings)
        width, eps = config.hidden_size, config.rms_norm_eps
        size, vocab = fields.get("target_hidden_size") or width, config.vocab_size or target.vocab_size
        checkpoint.check_target(target, width=size, vocab_size=vocab)
        self.reads = checkpoint.read_layers("aux_hidden_state_layer_ids", target)
        vocabulary, anchor = checkpoint.vocabulary(target), bool(fields.get("sample_from_anchor"))
        self.masks = checkpoint.count(fields.get("block_size", 8), "block_size", 1 if anchor else 2) - 1
        self.mask = checkpoint.count(fields.get("mask_token_id"), "mask_token_id", 0, embedding.vocab_size - 1)
        self.guesses = self.masks + anchor
        kinds = [replace(kind, window=kind.window and kind.window + 1) for kind in checkpoint.kinds(config)]  # + itself
        super().__init__(config, embedding, width + 1, target.vocab_size, kinds, blind=0, vocabulary=vocabulary)
        # Windows may start from a block's first token, and windowed layers may attend backwards only.
        self._anchored = fields.get("windows_from_anchor", True)
        self._causal = () if fields.get("sliding_window_non_causal") else ("sliding_attention",)
        self._scales = [fields.get(name, 1.0) for name in ("input_embedding_scale", "output_multiplier")]
        self._softcap = fields.get("final_logit_softcapping")
        self.fc = nn.Linear(len(self.reads) * width, width, bias=False)
        self.hidden_norm, self.norm = qwen.Qwen3RMSNorm(width, eps=eps), qwen.Qwen3RMSNorm(width, eps=eps)
        self.layers = nn.ModuleList(qwen.Qwen3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        has_head = vocabulary is not None or "lm_head.weight" in checkpoint.weights
        self.lm_head = nn.Linear(width, checkpoint.vocabulary_size(target), bias=False) if has_head else None
        self._whole = (target.output_embeddings,)  # in a tuple: not a submodule
        with torch.device("cpu"):
            self.rotary_emb = qwen.Qwen3RotaryEmbedding(config)

    def features(self, states: Tensor) -> Tensor:
        """Projected hidden states `[tokens, layers, width]` with a 0 that marks text: `[tokens, width + 1]`."""
        return F.pad(self.hidden_norm(self.fc(states.flatten(1))), (0, 1))

    def write(
        self, embeds: Tensor, features: Tensor, masks: Mapping[str, Tensor], positions: Tensor, cache: Any
    ) -> Tensor:
        """The last layer's output, and a column of zeros."""
        context, block = features[..., :-1], features[..., -1:] > 0
        block_masks = {name: self._widened_mask(name, mask, block[..., 0]) for name, mask in masks.items()}
        angles, hidden = self.rotary_emb(embeds, positions), embeds * self._scales[0]
        layers: Any = zip(self.layers, self.config.layer_types, strict=True)
        for number, (part, name) in enumerate(layers):
            normed = part.input_layernorm(hidden)
            sources = torch.where(block, normed, context)
            hidden = hidden + _attention(part.self_attn, normed, sources, angles, block_masks[name], cache, number)
            hidden = hidden + part.mlp(part.post_attention_layernorm(hidden))
        return F.pad(hidden, (0, 1))

    def guess(self, written: Tensor) -> Tensor:
        logits = (self.lm_head or self._whole[0])(self.norm(written[..., :-1])) * self._scales[1]
        return torch.tanh(logits / self._softcap) * self._softcap if self._softcap else logits

    def _widened_mask(self, name: str, mask: Tensor, block: Tensor) -> Tensor:
        """`mask` `[rows, 1, nodes, end]`, in which the nodes of a `block` `[rows, nodes]` also see one another."""
        first = block.int().argmax(1)
        last = block.shape[1] - 1 - block.flip(1).int().argmax(1)
        begin, end = (mask.gather(2, at.view(-1, 1, 1, 1).expand(-1, 1, 1, mask.shape[3])) for at in (first, last))
        back, ahead = begin if self._anchored else mask, mask if name in self._causal else end
        return torch.where(block[:, None, :, None], torch.maximum(back, ahead), mask)


def _attention(
    attention: Any, normed: Tensor, sources: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor, cache: Any, layer: int
) -> Tensor:
    """Attention with keys and values made of `sources`, and queries of `normed`, both `[rows, nodes, hidden]`."""
    shape = (*normed.shape[:-1], -1, attention.head_dim)
    query = attention.q_norm(attention.q_proj(normed).view(shape)).transpose(1, 2)
    key = attention.k_norm(attention.k_proj(sources).view(shape)).transpose(1, 2)
    value = attention.v_proj(sources).view(shape).transpose(1, 2)
    query, key = qwen.apply_rotary_pos_emb(query, key, *angles)
    key, value = (key, value) if cache is None else cache.update(key, value, layer)
    attended = F.scaled_dot_product_attention(query, key, value, mask, scale=attention.scaling, enable_gqa=True)
    return attention.o_proj(attended.transpose(1, 2).flatten(2))
