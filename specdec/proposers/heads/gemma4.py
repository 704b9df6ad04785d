"""Gemma 4 assistants: a few layers without keys and values of their own, which attend to those of the target.

What the target's last layers of each kind keep of a token follows from the hidden states that these layers read, so the
head makes it anew and needs nothing of the target's cache. All guesses of a round stand where the last known token
does, and see no other guess.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
from specdec.proposers.heads.checkpoint import Checkpoint, unallocated
from specdec.proposers.heads.stage import Embedding, Head, Stage

_UNREAD = r"\.self_attn\.[kv]_(proj|norm)\."  # layers without keys and values may be stored with them
_NOBODY = torch.iinfo(torch.long).max  # where the keys of guesses lie: no node sees as far


class AssistantStage(Stage):
    """The layers of an assistant. `makers` are the target's layers whose keys and values it reads, by kind.

    A feature holds a hidden state of the target's width, keys and values of the token by kind before they are turned
    (of what the stage wrote: its own last hidden state), and as which guess a token is fed, 0 for known ones.
    """

    compiles = False  # it looks the keys' places up in its cache

    def __init__(self, text: Any, given: Mapping[str, Any], target: LanguageModel, makers: Mapping[str, Any]) -> None:
        kept = {kind: _sizes(layer, target.config.num_attention_heads) for kind, layer in makers.items()}
        self._hidden, self._state = text.hidden_size, target.config.hidden_size
        self._told = max(sum(2 * heads * width for heads, width in kept.values()), self._hidden)
        # What sessions keep: a pair of each kind, and the places.
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
        width = self._state + self._told + 1
        super().__init__(config, embedding, width, target.vocab_size, (AttentionKind("full_attention"),))
        self.layers = nn.ModuleList(gemma.Gemma4TextDecoderLayer(text, i) for i in range(text.num_hidden_layers))
        self.norm = gemma.Gemma4RMSNorm(self._hidden, eps=text.rms_norm_eps)
        self.pre_projection = nn.Linear(2 * self._state, self._hidden, bias=False)
        self.post_projection = nn.Linear(self._hidden, self._state, bias=False)
        if given.get("use_ordered_embeddings"):
            self.masked_embedding: Clusters | None = Clusters(given, self._hidden, target.vocab_size)
            self.lm_head = nn.Embedding(target.vocab_size, self._hidden)  # of which some rows are looked up
        else:
            self.masked_embedding = None
            self.lm_head = nn.Linear(self._hidden, target.vocab_size, bias=False)
        with torch.device("cpu"):
            self.rotary_emb = gemma.Gemma4TextRotaryEmbedding(text)
        self._kept, self._names, self._window = kept, list(text.layer_types), text.sliding_window
        self._makers, self._turning = dict(makers), (target.decoder.rotary_emb,)  # of the target, no modules of its own

    def features(self, states: Tensor) -> Tensor:
        """Of the target's last hidden states, and those that its layers `makers` read, `[tokens, 1 + kinds, width]`."""
        last, *read = states.unbind(1)
        pairs = [_pair(layer, hidden) for layer, hidden in zip(self._makers.values(), read, strict=True)]
        told = torch.cat([side.flatten(1).to(last) for pair in pairs for side in pair], dim=-1)
        return F.pad(torch.cat([last, told], dim=-1), (0, self.width - self._state - told.shape[-1]))

    def write(
        self, embeds: Tensor, features: Tensor, masks: Mapping[str, Tensor], positions: Tensor, cache: Any
    ) -> Tensor:
        """What goes on in place of the target's hidden state, the last layer's output, and the next guess's number."""
        state, told, guess = torch.split(features, [self._state, self._told, 1], dim=-1)
        guessed = guess[..., 0].round().long()
        places = positions - guessed
        kept = self._keys_and_values(told, positions, cache)
        full, near = self._masks(masks["full_attention"], positions, guessed, cache)
        hidden = self.pre_projection(torch.cat([embeds, state], dim=-1))
        angles = {name: self.rotary_emb(hidden, places, name) for name in kept}
        for layer, name in zip(self.layers, self._names, strict=True):
            hidden = layer(
                hidden,
                shared_kv_states=kept,
                position_embeddings=angles[name],
                attention_mask=near if name == "sliding_attention" else full,
                position_ids=places,
            )
        hidden = self.norm(hidden)
        wide = F.pad(hidden, (0, self._told - self._hidden))
        return torch.cat([self.post_projection(hidden), wide, guess + 1], dim=-1)

    def guess(self, written: Tensor) -> Tensor:
        """Logits `[..., vocab]`; where a checkpoint orders tokens in clusters, only of those of the likeliest ones."""
        hidden = written[..., self._state : self._state + self._hidden]
        if self.masked_embedding is not None:
            return self.masked_embedding(hidden, self.lm_head)
        logits: Tensor = self.lm_head(hidden)
        return logits

    def cut(self, rows: Tensor) -> None:
        """Clusters stay whole."""
        if self.masked_embedding is None:
            super().cut(rows)
        else:
            self.masked_embedding.rows = rows

    def _keys_and_values(self, told: Tensor, positions: Tensor, cache: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """By kind those of all that is known, `[rows, heads, end, width]`; a node brings those of the token before."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        begin = 0
        for number, (name, (heads, width)) in enumerate(self._kept.items()):
            sides = told[..., begin : begin + 2 * heads * width].view(*told.shape[:-1], 2, heads, width)
            begin += 2 * heads * width
            keys, values = sides.permute(2, 0, 3, 1, 4)
            keys = _turned(keys, *self._turning[0](keys, (positions - 1).clamp(min=0), name))
            found[name] = (keys, values) if cache is None else cache.update(keys, values, number)
        return found

    def _masks(self, mask: Tensor, positions: Tensor, guessed: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        """What nodes see of all that is known, and of what lies no further back than the window."""
        keys = torch.where(guessed > 0, _NOBODY, positions)[:, None, :, None]
        if cache is not None:
            keys, _ = cache.update(keys, keys, len(self._kept))
        places, keys = (positions - guessed)[:, None, :, None], keys.transpose(2, 3)
        lowest = torch.finfo(mask.dtype).min
        full = mask.masked_fill(keys > places, lowest)
        return full, full.masked_fill(keys < places - self._window, lowest)


class Clusters(nn.Module):
    """An order of all tokens in clusters of one size, of which only the likeliest ones are looked at."""

    token_ordering: Tensor

    def __init__(self, given: Mapping[str, Any], hidden: int, vocab_size: int) -> None:
        super().__init__()
        self.centroids = nn.Linear(hidden, given["num_centroids"], bias=False)
        self.register_buffer("token_ordering", torch.zeros(vocab_size, dtype=torch.long))
        self.likeliest = given["centroid_intermediate_top_k"]
        self.rows: Tensor | slice = slice(None)

    def forward(self, hidden: Tensor, table: nn.Module) -> Tensor:
        """Logits `[..., rows]` of `hidden` `[..., width]`, by rows of a `table`; all others are -inf."""
        clusters = self.centroids(hidden).topk(self.likeliest, dim=-1).indices
        tokens = self.token_ordering.view(self.centroids.out_features, -1)[clusters].flatten(-2)
        found = (table(tokens) @ hidden[..., None])[..., 0]
        whole = found.new_full((*found.shape[:-1], len(self.token_ordering)), float("-inf"))
        return whole.scatter(-1, tokens, found)[..., self.rows]


def load_gemma4(checkpoint: Checkpoint, target: LanguageModel, how: Loading) -> Head:
    """A Gemma 4 assistant for this target.

    Raises OptionError for one that was made for another target, UnsupportedError for targets of other families and
    those whose weights are elsewhere, LoadError for a broken checkpoint.
    """
    given, numbers, name = checkpoint.config, _makers(target), checkpoint.argument
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
    weights = {key: weight for key, weight in own.items() if not re.search(_UNREAD, key)}
    if "embed_tokens.weight" in weights:
        weights.setdefault("lm_head.weight", weights["embed_tokens.weight"])  # they are tied
    with unallocated():
        stage = AssistantStage(text, given, target, {kind: target.decoder.layers[i] for kind, i in numbers.items()})
    renamed = checkpoint.with_weights(weights)
    renamed.check_used({*stage.state_dict(), "embed_tokens.weight"})
    renamed.fill(stage, checkpoint.dtype(how, target), target.device)
    return Head([stage], [target.num_layers, *numbers.values()], backend=how.backend)


def _text_config(checkpoint: Checkpoint) -> Any:
    """The config of an assistant's layers, all of which have others make their keys and values."""

    class AllShared(Gemma4TextConfig):  # type: ignore[misc]
        """transformers 5.23 refuses to build layers of which none makes keys and values."""

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


def _makers(target: LanguageModel) -> dict[str, int]:
    """The numbers of the target's last layers of each kind that have keys and values; none of other families."""
    if not type(target.decoder).__name__.startswith("Gemma4"):
        return {}
    config = target.config
    own = config.num_hidden_layers - config.num_kv_shared_layers
    return {kind: number for number, kind in enumerate(config.layer_types[:own])}


def _sizes(layer: Any, heads: int) -> tuple[int, int]:
    """Of a layer whose attention has so many `heads`: how many those of keys are, and how wide."""
    return heads // layer.self_attn.num_key_value_groups, layer.self_attn.head_dim


def _pair(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Keys, not yet turned, and values `[tokens, heads, width]` that a layer makes of what it reads."""
    attention = layer.self_attn
    normed = layer.input_layernorm(hidden.to(layer.input_layernorm.weight.dtype))
    keys = attention.k_proj(normed).unflatten(-1, (-1, attention.head_dim))
    values = keys if attention.v_proj is None else attention.v_proj(normed).unflatten(-1, (-1, attention.head_dim))
    return attention.k_norm(keys), attention.v_norm(values)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` `[rows, heads, nodes, width]` rotated by angles `[rows, nodes, width]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
