"""Gemma 4 assistants: a few layers without keys and values of their own, which attend to the target's.

The keys and values of the target's last layer of each kind follow from the hidden states that it reads, so the head
computes them again and needs no access to the target's cache. All guesses of a round have the position of the last
known token, and see no other guess.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Gemma4TextConfig, LlamaConfig
from transformers.models.gemma4 import modeling_gemma4 as gemma

from specdec.errors import UnsupportedError
from specdec.models.cache.layout import AttentionKind
from specdec.models.hf.private_api import set_attention
from specdec.models.language_model import LanguageModel
from specdec.options.load import Loading
from specdec.proposers.heads.checkpoint import Checkpoint
from specdec.proposers.heads.proposer import HeadDraft
from specdec.proposers.heads.stage import Embedding, Stage

_UNUSED = r"\.self_attn\.[kv]_(proj|norm)\."  # stored, although these layers use the target's
_UNSEEN = torch.iinfo(torch.long).max  # the position of guesses' keys: no node sees them


class AssistantStage(Stage):
    """The layers of an assistant; `kv_layers` are the target's layers whose keys and values it reads, by kind.

    A feature holds a hidden state of the target's width, the token's keys and values by kind, before rotation (in
    features that the stage wrote: its last hidden state), and the token's number among the guesses, 0 for known ones.
    """

    compiles = False  # it reads the keys' positions from its cache

    def __init__(
        self, text: Any, given: Mapping[str, Any], target: LanguageModel, kv_layers: Mapping[str, Any]
    ) -> None:
        heads = target.config.num_attention_heads
        kept = {  # number and width of the key heads
            kind: (heads // layer.self_attn.num_key_value_groups, layer.self_attn.head_dim)
            for kind, layer in kv_layers.items()
        }
        self._hidden, self._state = text.hidden_size, target.config.hidden_size
        self._kv_width = max(sum(2 * heads * width for heads, width in kept.values()), self._hidden)
        # A session's cache holds keys and values of each kind, and positions.
        config = LlamaConfig(
            vocab_size=target.vocab_size,
            hidden_size=self._hidden,
            num_hidden_layers=len(kept) + 1,
            num_attention_heads=text.num_attention_heads,
            num_key_value_heads=max(heads for heads, _ in kept.values()),
            head_dim=max(width for _, width in kept.values()),
        )
        set_attention(config, "sdpa")
        embedding = Embedding(target.model.get_input_embeddings(), as_stored=False)
        width = self._state + self._kv_width + 1
        super().__init__(config, embedding, width, target.vocab_size, (AttentionKind("full_attention"),))
        self.layers = nn.ModuleList(gemma.Gemma4TextDecoderLayer(text, i) for i in range(text.num_hidden_layers))
        self.norm = gemma.Gemma4RMSNorm(self._hidden, eps=text.rms_norm_eps)
        self.pre_projection = nn.Linear(2 * self._state, self._hidden, bias=False)
        self.post_projection = nn.Linear(self._hidden, self._state, bias=False)
        if given.get("use_ordered_embeddings"):
            self.masked_embedding: Clusters | None = Clusters(given, self._hidden, target.vocab_size)
            self.lm_head: nn.Module = nn.Embedding(target.vocab_size, self._hidden)  # of which `Clusters` looks up rows
        else:
            self.masked_embedding = None
            self.lm_head = nn.Linear(self._hidden, target.vocab_size, bias=False)
        with torch.device("cpu"):
            self.rotary_emb = gemma.Gemma4TextRotaryEmbedding(text)
        self._kept, self._names, self._window = kept, list(text.layer_types), text.sliding_window
        # the target's: in containers, as they are no submodules
        self._kv_layers, self._rotary = dict(kv_layers), (target.decoder.rotary_emb,)

    def features(self, states: Tensor) -> Tensor:
        """Features of the target's last hidden states and those that `kv_layers` read, `[tokens, 1 + kinds, width]`."""
        last, *read = states.unbind(1)
        pairs = [_pair(layer, hidden) for layer, hidden in zip(self._kv_layers.values(), read, strict=True)]
        states = torch.cat([side.flatten(1).to(last) for pair in pairs for side in pair], dim=-1)
        return F.pad(torch.cat([last, states], dim=-1), (0, self.width - self._state - states.shape[-1]))

    def write(
        self, embeds: Tensor, features: Tensor, masks: Mapping[str, Tensor], positions: Tensor, cache: Any
    ) -> Tensor:
        """The next feature: what replaces the target's hidden state, the last layer's output, the guess's number."""
        state, states, guess = torch.split(features, [self._state, self._kv_width, 1], dim=-1)
        guessed = guess[..., 0].round().long()
        node_positions = positions - guessed
        kept = self._keys_and_values(states, positions, cache)
        full, near = self._masks(masks["full_attention"], positions, guessed, cache)
        hidden = self.pre_projection(torch.cat([embeds, state], dim=-1))
        angles = {name: self.rotary_emb(hidden, node_positions, name) for name in kept}
        for layer, name in zip(self.layers, self._names, strict=True):
            hidden = layer(
                hidden,
                shared_kv_states=kept,
                position_embeddings=angles[name],
                attention_mask=near if name == "sliding_attention" else full,
                position_ids=node_positions,
            )
        hidden = self.norm(hidden)
        wide = F.pad(hidden, (0, self._kv_width - self._hidden))
        return torch.cat([self.post_projection(hidden), wide, guess + 1], dim=-1)

    def guess(self, written: Tensor) -> Tensor:
        """Logits `[..., vocab]`; with `Clusters`, -inf outside the likeliest ones."""
        hidden = written[..., self._state : self._state + self._hidden]
        return self.lm_head(hidden) if self.masked_embedding is None else self.masked_embedding(hidden, self.lm_head)

    def _keys_and_values(self, states: Tensor, positions: Tensor, cache: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """Keys and values by kind, `[rows, heads, end, width]`; a node adds those of the token before it."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        begin = 0
        for number, (name, (heads, width)) in enumerate(self._kept.items()):
            sides = states[..., begin : begin + 2 * heads * width].view(*states.shape[:-1], 2, heads, width)
            begin += 2 * heads * width
            keys, values = sides.permute(2, 0, 3, 1, 4)
            keys = gemma.apply_rotary_pos_emb(keys, *self._rotary[0](keys, (positions - 1).clamp(min=0), name))
            found[name] = (keys, values) if cache is None else cache.update(keys, values, number)
        return found

    def _masks(self, mask: Tensor, positions: Tensor, guessed: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        """The masks of full and of windowed layers, in which no guess is visible."""
        keys = torch.where(guessed > 0, _UNSEEN, positions)[:, None, :, None]
        if cache is not None:
            keys, _ = cache.update(keys, keys, len(self._kept))
        node_positions, keys = (positions - guessed)[:, None, :, None], keys.transpose(2, 3)
        lowest = torch.finfo(mask.dtype).min
        full = mask.masked_fill(keys > node_positions, lowest)
        return full, full.masked_fill(keys < node_positions - self._window, lowest)


class Clusters(nn.Module):
    """All tokens in clusters of one size; only tokens of the likeliest clusters get logits."""

    token_ordering: Tensor

    def __init__(self, given: Mapping[str, Any], hidden: int, vocab_size: int) -> None:
        super().__init__()
        self.centroids = nn.Linear(hidden, given["num_centroids"], bias=False)
        self.register_buffer("token_ordering", torch.zeros(vocab_size, dtype=torch.long))
        self.likeliest = given["centroid_intermediate_top_k"]

    def forward(self, hidden: Tensor, table: nn.Module) -> Tensor:
        """Logits `[..., vocab]` of `hidden` `[..., width]` by `table`; -inf outside the likeliest clusters."""
        clusters = self.centroids(hidden).topk(self.likeliest, dim=-1).indices
        tokens = self.token_ordering.view(self.centroids.out_features, -1)[clusters].flatten(-2)
        found = (table(tokens) @ hidden[..., None])[..., 0]
        whole = found.new_full((*found.shape[:-1], len(self.token_ordering)), float("-inf"))
        return whole.scatter(-1, tokens, found)


def load_gemma4(checkpoint: Checkpoint, target: LanguageModel, how: Loading) -> HeadDraft:
    """A Gemma 4 assistant.

    Raises OptionError if it was made for another target, UnsupportedError for targets of other families and those that
    are offloaded or sharded, LoadError for a broken checkpoint.
    """
    given, numbers, name = checkpoint.config, _kv_layers(target), checkpoint.argument
    if not numbers:
        raise UnsupportedError(
            f"`{name}` is a Gemma 4 assistant, which reads the keys and values of a Gemma 4 model, and the target is a "
            f"{type(target.model).__name__}: use it with the model that it was made for"
        )
    if target.is_offloaded or target.is_sharded:
        raise UnsupportedError(
            f"`{name}` is a Gemma 4 assistant, which computes with layers of the target, and these are not all here: "
            "leave `offload` and `tp_plan` out, or name another draft"
        )
    text = _text_config(checkpoint)
    checkpoint.check_target(target, width=given["backbone_hidden_size"], vocab_size=text.vocab_size)
    numbers = {kind: number for kind, number in numbers.items() if kind in text.layer_types}
    own = {key.removeprefix("model."): weight for key, weight in checkpoint.weights.items()}
    weights = {key: weight for key, weight in own.items() if not re.search(_UNUSED, key)}
    if "embed_tokens.weight" in weights:
        weights.setdefault("lm_head.weight", weights["embed_tokens.weight"])  # tied
    with torch.device("meta"):
        stage = AssistantStage(text, given, target, {kind: target.decoder.layers[i] for kind, i in numbers.items()})
    replace(checkpoint, weights=weights).fill(stage, checkpoint.dtype(how, target), target.device)
    return HeadDraft([stage], [target.num_layers, *numbers.values()], backend=how.backend)


def _text_config(checkpoint: Checkpoint) -> Any:
    """The config of an assistant's layers, none of which makes its own keys and values."""

    class AllShared(Gemma4TextConfig):  # type: ignore[misc]
        """transformers 5.23 refuses to build layers none of which makes keys and values."""

        @property
        def kv_sharing_modes(self) -> list[str]:
            return ["reuse"] * self.num_hidden_layers

    fields = checkpoint.config.get("text_config")
    if not isinstance(fields, Mapping):
        raise checkpoint.broken("its config has no `text_config`")
    fixed = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": fields["num_hidden_layers"]}
    text = AllShared.from_dict({**fields, **fixed})
    set_attention(text, "sdpa")
    return text


def _kv_layers(target: LanguageModel) -> dict[str, int]:
    """By kind, the number of the target's last layer with keys and values; empty for other families."""
    if not type(target.decoder).__name__.startswith("Gemma4"):
        return {}
    config = target.config
    own = config.num_hidden_layers - config.num_kv_shared_layers
    return {kind: number for number, kind in enumerate(config.layer_types[:own])}


def _pair(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's keys, before rotation, and values `[tokens, heads, width]` for its inputs `hidden`."""
    attention = layer.self_attn
    normed = layer.input_layernorm(hidden.to(layer.input_layernorm.weight.dtype))
    keys = attention.k_proj(normed).unflatten(-1, (-1, attention.head_dim))
    values = keys if attention.v_proj is None else attention.v_proj(normed).unflatten(-1, (-1, attention.head_dim))
    return attention.k_norm(keys), attention.v_norm(values)
