"""Gemma 4 assistants: a few layers without keys and values of their own, which attend to the target's.

The keys and values of the target's last layer of each kind follow from the hidden states that it reads, so the head
computes them again and needs no access to the target's cache. All guesses of a round have the position of the last
token of the text, and see no other guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Gemma4TextConfig, LlamaConfig
from transformers.models.gemma4 import modeling_gemma4 as gemma
from transformers.models.gemma4_assistant.modeling_gemma4_assistant import Gemma4AssistantMaskedEmbedder as Clusters

from specdec.errors import UnsupportedError
from specdec.models.hf.private_api import set_attention
from specdec.models.language_model import LanguageModel
from specdec.models.protocols import AttentionKind
from specdec.proposers.heads.checkpoint import Checkpoint
from specdec.proposers.heads.stage import Embedding, Stage


class AllShared(Gemma4TextConfig):  # type: ignore[misc]
    """The config of layers none of which makes keys and values; transformers 5.23 refuses to build them."""

    @property
    def kv_sharing_modes(self) -> list[str]:
        return ["reuse"] * self.num_hidden_layers


class AssistantStage(Stage):
    """The layers of an assistant.

    A feature holds a hidden state of the target's width, the token's keys and values by kind, before rotation (in
    features that the stage wrote: its last hidden state), and the token's number among the guesses, 0 in text. Raises
    OptionError or UnsupportedError for targets that do not fit, LoadError for a broken checkpoint.
    """

    records = False  # it reads the keys' positions from its cache

    def __init__(self, checkpoint: Checkpoint, target: LanguageModel) -> None:
        if not type(target.decoder).__name__.startswith("Gemma4") or target.is_offloaded:
            raise UnsupportedError(
                f"`{checkpoint.argument}` is a Gemma 4 assistant, which computes with layers of a whole Gemma 4 model, "
                f"and the target is a {type(target.model).__name__}: use it with the model that it was made for, "
                "without `offload`"
            )
        fields, whole, vocab = checkpoint.config, target.config, target.vocab_size
        shared = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": fields["text_config"]["num_hidden_layers"]}
        text = AllShared.from_dict({**fields["text_config"], **shared})
        set_attention(text, "sdpa")
        checkpoint.check_target(target, width=fields["backbone_hidden_size"], vocab_size=text.vocab_size)
        # by kind, the number of the last layer with keys and values, and how many keys of which width it makes
        kinds = whole.layer_types[: whole.num_hidden_layers - whole.num_kv_shared_layers]
        numbers = {kind: number for number, kind in enumerate(kinds) if kind in text.layer_types}
        self.reads = [target.num_layers, *numbers.values()]
        layers = [target.decoder.layers[number] for number in numbers.values()]
        attentions = [layer.self_attn for layer in layers]
        counts = [whole.num_attention_heads // attention.num_key_value_groups for attention in attentions]
        self._sizes = {k: (n, attention.head_dim) for k, n, attention in zip(numbers, counts, attentions, strict=True)}
        self._hidden, self._state = text.hidden_size, whole.hidden_size
        self._kv_width = max(sum(2 * n * width for n, width in self._sizes.values()), self._hidden)
        config = LlamaConfig(  # a session's cache holds keys and values of each kind, and positions
            vocab_size=vocab, hidden_size=self._hidden, num_hidden_layers=len(counts) + 1,
            num_attention_heads=text.num_attention_heads, num_key_value_heads=max(counts),
            head_dim=max(attention.head_dim for attention in attentions),
        )  # fmt: skip
        set_attention(config, "sdpa")
        embedding, width = Embedding(target.model.get_input_embeddings(), as_stored=False), self._state + self._kv_width
        super().__init__(config, embedding, width + 1, vocab, [AttentionKind("full_attention")])
        self.layers = nn.ModuleList(gemma.Gemma4TextDecoderLayer(text, i) for i in range(text.num_hidden_layers))
        self.norm = gemma.Gemma4RMSNorm(self._hidden, eps=text.rms_norm_eps)
        self.pre_projection = nn.Linear(2 * self._state, self._hidden, bias=False)
        self.post_projection = nn.Linear(self._hidden, self._state, bias=False)
        clusters, outer = fields.get("use_ordered_embeddings"), {**fields, "get_text_config": lambda: text}
        self.masked_embedding = Clusters(SimpleNamespace(**outer)) if clusters else None
        self.lm_head = nn.Embedding(vocab, self._hidden) if clusters else nn.Linear(self._hidden, vocab, bias=False)
        with torch.device("cpu"):
            self.rotary_emb = gemma.Gemma4TextRotaryEmbedding(text)
        self._kinds, self._window = list(text.layer_types), text.sliding_window
        self._kv_layers, self._rotary = tuple(layers), (target.decoder.rotary_emb,)  # in tuples: no submodules

    def features(self, states: Tensor) -> Tensor:
        """Features of the target's last hidden states and those that `kv_layers` read, `[tokens, 1 + kinds, width]`."""
        last, *read = states.unbind(1)
        parts = [last]
        for layer, hidden in zip(self._kv_layers, read, strict=True):
            attention, norm = layer.self_attn, layer.input_layernorm
            normed, size = norm(hidden.to(norm.weight.dtype)), (-1, attention.head_dim)
            keys = attention.k_proj(normed).unflatten(-1, size)
            values = keys if attention.v_proj is None else attention.v_proj(normed).unflatten(-1, size)
            parts += [side.flatten(1).to(last) for side in (attention.k_norm(keys), attention.v_norm(values))]
        return F.pad(torch.cat(parts, dim=-1), (0, self.width - sum(part.shape[-1] for part in parts)))

    def write(
        self, embeds: Tensor, features: Tensor, masks: Mapping[str, Tensor], positions: Tensor, cache: Any
    ) -> Tensor:
        """The next feature: what replaces the target's hidden state, the last layer's output, the guess's number."""
        state, states, guess = torch.split(features, [self._state, self._kv_width, 1], dim=-1)
        guessed = guess[..., 0].round().long()
        at, shared = positions - guessed, self._keys_and_values(states, positions, cache)
        kind_masks = self._masks(masks["full_attention"], positions, guessed, cache)
        hidden, common = self.pre_projection(torch.cat([embeds, state], -1)), {"shared_kv_states": shared}
        angles = {name: self.rotary_emb(hidden, at, name) for name in shared}
        for layer, name in zip(self.layers, self._kinds, strict=True):
            turned = {"position_embeddings": angles[name], "position_ids": at}
            hidden = layer(hidden, attention_mask=kind_masks[name], **common, **turned)
        hidden = self.norm(hidden)
        return torch.cat(
            [self.post_projection(hidden), F.pad(hidden, (0, self._kv_width - self._hidden)), guess + 1], -1
        )

    def guess(self, written: Tensor) -> Tensor:
        """Logits `[..., vocab]`; with clusters, lowest outside the likeliest ones."""
        hidden, head = written[..., self._state : self._state + self._hidden], self.lm_head
        return head(hidden) if self.masked_embedding is None else self.masked_embedding(hidden, head.weight)

    def _keys_and_values(self, states: Tensor, positions: Tensor, cache: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """Keys and values by kind, `[rows, heads, end, width]`; a node adds the keys and values of the token before it.

        `states` `[rows, nodes, width]`, `positions` `[rows, nodes]`.
        """
        shared: dict[str, tuple[Tensor, Tensor]] = {}
        widths = [2 * count * width for count, width in self._sizes.values()]
        parts = torch.split(states[..., : sum(widths)], widths, dim=-1)
        for number, ((name, size), part) in enumerate(zip(self._sizes.items(), parts, strict=True)):
            keys, values = part.view(*part.shape[:-1], 2, *size).permute(2, 0, 3, 1, 4)
            keys = gemma.apply_rotary_pos_emb(keys, *self._rotary[0](keys, (positions - 1).clamp(min=0), name))
            shared[name] = (keys, values) if cache is None else cache.update(keys, values, number)
        return shared

    def _masks(self, mask: Tensor, positions: Tensor, guessed: Tensor, cache: Any) -> dict[str, Tensor]:
        """The masks by kind, in which no guess is visible, from `mask` `[rows, 1, nodes, end]`.

        `positions` and `guessed`, the numbers among the guesses: `[rows, nodes]`.
        """
        keys = torch.where(guessed > 0, torch.iinfo(torch.long).max, positions)[:, None, :, None]
        keys = keys if cache is None else cache.update(keys, keys, len(self._sizes))[0]
        at, keys, lowest = (positions - guessed)[:, None, :, None], keys.transpose(2, 3), torch.finfo(mask.dtype).min
        full = mask.masked_fill(keys > at, lowest)
        return {"full_attention": full, "sliding_attention": full.masked_fill(keys < at - self._window, lowest)}
