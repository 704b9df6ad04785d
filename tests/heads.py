"""Tiny random heads in the `speculators` format, and what they say, recomputed in the plainest way."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.core.tree import Tree
from tests.matrix import endless
from tests.tiny import HEADS, tiny

Proposals = list[tuple[list[int], Tree]]
IDS = [[5, 9, 12, 5, 9, 33, 21], [7, 8, 7], [1]]
RUN = endless(14)
THREE = {"num_hidden_layers": 3}
SIZES: dict[str, Any] = {**HEADS, "vocab_size": 64, "rms_norm_eps": 1e-6}
READS = [0, 1, 2]


def target(seed: int = 0) -> Any:
    """A target for the checkpoints below."""
    return tiny("llama", seed=seed, **THREE)


def states_of(model: Any, tokens: Sequence[int], layers: Sequence[int] = READS) -> Tensor:
    """The target's hidden states of a text `[tokens, layers, width]`."""
    with torch.no_grad():
        states = model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False).hidden_states
    return torch.stack([states[layer][0] for layer in layers], dim=1)


def changed(folder: Path, **fields: Any) -> Path:
    """The checkpoint with other fields in its config."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return folder


def reweighed(folder: Path, **weights: Tensor | None) -> Path:
    """The checkpoint with other weights, without those that are None."""
    stored = {**load_file(folder / "model.safetensors"), **{n.replace("__", "."): t for n, t in weights.items()}}
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, folder / "model.safetensors")
    return folder


def candidates_of(kind: Any, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], list[int]]:
    """What transformers' candidate generators of this kind guess from now on, by text."""
    found: dict[tuple[int, ...], list[int]] = {}
    candidates = kind.get_candidates

    def noted(self: Any, input_ids: Any, *args: Any, **more: Any) -> Any:
        ids, logits = candidates(self, input_ids, *args, **more)
        if logits is not None:
            found[tuple(input_ids[0].tolist())] = ids[0, input_ids.shape[1] :].tolist()
        return ids, logits

    monkeypatch.setattr(kind, "get_candidates", noted)
    return found


def eagle_folder(folder: Path, *, seed: int = 0, kind: str = "llama", **given: Any) -> Path:
    """An EAGLE-3 checkpoint for a tiny target of three layers; `given` are fields of its config or its layers'."""
    layers = {"model_type": kind, **SIZES, "num_hidden_layers": 1}
    layers |= {name: given.pop(name) for name in [*given] if name in {*layers, "layer_types", "sliding_window"}}
    layers["use_sliding_window"] = "sliding_window" in layers
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": 64,
        "eagle_aux_hidden_state_layer_ids": READS,
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": None},
        },
        **given,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config, torch.Generator().manual_seed(seed)), folder / "model.safetensors")
    return folder


def _weights(config: dict[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    c = config["transformer_layer_config"]
    hidden, inner, heads, kept, width = (
        c[n] for n in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    size = config["draft_vocab_size"]
    reads = len(config["eagle_aux_hidden_state_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, reads * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (size, hidden),
        "embed_tokens.weight": (c["vocab_size"], hidden),
    }
    for i in range(c["num_hidden_layers"]):
        name, read = f"layers.{i}.", 2 * hidden if i == 0 else hidden
        shapes |= {
            f"{name}self_attn.q_proj.weight": (heads * width, read),
            f"{name}self_attn.k_proj.weight": (kept * width, read),
            f"{name}self_attn.v_proj.weight": (kept * width, read),
            f"{name}self_attn.o_proj.weight": (hidden, heads * width), f"{name}mlp.gate_proj.weight": (inner, hidden),
            f"{name}mlp.up_proj.weight": (inner, hidden), f"{name}mlp.down_proj.weight": (hidden, inner),
            f"{name}input_layernorm.weight": (hidden,), f"{name}post_attention_layernorm.weight": (hidden,),
        }  # fmt: skip
        if c["model_type"] == "qwen3":
            shapes |= {f"{name}self_attn.{part}_norm.weight": (width,) for part in "qk"}
    shapes["layers.0.hidden_norm.weight"] = (hidden,)
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (reads * hidden,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(reads)}
    weights = {
        name: torch.randn(shape, generator=generator) * (0.25 if len(shape) > 1 else 0.3) + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    if size < 64:
        ids = torch.randperm(64, generator=generator)[:size].sort().values
        weights["d2t"] = ids - torch.arange(size)
        weights["t2d"] = torch.zeros(64, dtype=torch.bool).index_fill_(0, ids, True)
    return weights


def native(folder: Path, made: Path, **fields: Any) -> Path:
    """The checkpoint that `eagle_folder` made in EAGLE-3's own form, in which SafeAILab and SpecForge publish heads.

    It shares the target's embeddings, and names the layers whose outputs it reads.
    """
    config, weights = json.loads((made / "config.json").read_text()), load_file(made / "model.safetensors")
    read = [layer - 1 for layer in config["eagle_aux_hidden_state_layer_ids"]]
    inner = {name: value for name, value in config["transformer_layer_config"].items() if name != "use_sliding_window"}
    given = {
        "architectures": ["LlamaForCausalLMEagle3"], **inner, "draft_vocab_size": config["draft_vocab_size"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": read, "use_aux_hidden_state": True},
        "torch_dtype": "float32", "tie_word_embeddings": False, **fields,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({name: value for name, value in given.items() if value is not None}))
    del weights["embed_tokens.weight"]
    named = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in weights.items()}
    save_file(named, folder / "model.safetensors")
    return folder


def z_lab(folder: Path, made: Path, **fields: Any) -> Path:
    """The checkpoint that `dflash_folder` made in DFlash's own form, as z-lab publishes heads."""
    config = json.loads((made / "config.json").read_text())
    inner = config["transformer_layer_config"]
    given = {
        "architectures": ["DFlashDraftModel"],
        **inner,
        "block_size": config["block_size"],
        "num_target_layers": 3,
        "dflash_config": {
            "mask_token_id": config["mask_token_id"],
            "target_layer_ids": [layer - 1 for layer in config["aux_hidden_state_layer_ids"]],
        },
        **fields,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(given))
    save_file(load_file(made / "model.safetensors"), folder / "model.safetensors")
    return folder


class Eagle:
    """The formulas of EAGLE-3, one text at a time, without a cache."""

    def __init__(self, folder: Path, theta: float = 10000.0) -> None:
        self.config, self.theta = json.loads((folder / "config.json").read_text()), theta
        self.layers = self.config["transformer_layer_config"]
        self.weights = load_file(folder / "model.safetensors")

    def chain(self, tokens: list[int], states: Tensor, count: int) -> tuple[list[int], list[Tensor]]:
        """The likeliest `count` guesses after `tokens`, and their logits; `states` `[tokens - 1, layers, width]`."""
        text, guesses, logits = list(tokens[1:]), [], []
        features = self.features(states)
        for _ in range(count):
            written = self.written(text, features)
            logits.append(self.logits(written[-1]))
            guesses.append(int(logits[-1].argmax()))
            text.append(guesses[-1])
            features = torch.cat([features, written[-1:]])
        return guesses, logits

    def features(self, states: Tensor) -> Tensor:
        """What is made of the target's hidden states."""
        if self.config.get("fc_norm"):
            parts = [self._norm(states[:, i], f"fc_norm.{i}") for i in range(states.shape[1])]
            states = torch.stack(parts, dim=1)
        together = states.reshape(len(states), -1)
        if self.config.get("norm_before_fc"):
            together = self._norm(together, "input_norm")
        return together @ self.weights["fc.weight"].T

    def written(self, tokens: list[int], features: Tensor) -> Tensor:
        """What the layers make of a text whose token i stands beside feature i."""
        w = self.weights
        embeds = self._norm(w["embed_tokens.weight"][tokens], "layers.0.input_layernorm")
        normed = self._norm(features, "layers.0.hidden_norm")
        hidden = normed if self.config.get("norm_before_residual") else features
        hidden = hidden + self._attention(torch.cat([embeds, normed], dim=1), 0)
        hidden = hidden + self._mlp(hidden, 0)
        for layer in range(1, self.layers["num_hidden_layers"]):
            hidden = hidden + self._attention(self._norm(hidden, f"layers.{layer}.input_layernorm"), layer)
            hidden = hidden + self._mlp(hidden, layer)
        return self._norm(hidden, "norm") if self.config.get("norm_output") else hidden

    def logits(self, written: Tensor) -> Tensor:
        """Of the whole vocabulary; -inf for tokens that the head does not know."""
        out = written if self.config.get("norm_output") else self._norm(written, "norm")
        logits = self.weights["lm_head.weight"] @ out
        if "d2t" not in self.weights:
            return logits
        whole = torch.full((64,), float("-inf"))
        for own, offset in enumerate(self.weights["d2t"].tolist()):
            whole[own + offset] = logits[own]
        return whole

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * self.weights[f"{name}.weight"]

    def _mlp(self, x: Tensor, layer: int) -> Tensor:
        name, x = f"layers.{layer}.mlp.", self._norm(x, f"layers.{layer}.post_attention_layernorm")
        gate, up, down = (self.weights[f"{name}{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def _attention(self, x: Tensor, layer: int) -> Tensor:
        n, width = len(x), self.layers["head_dim"]
        q, k, v = (
            (x @ self.weights[f"layers.{layer}.self_attn.{part}_proj.weight"].T).view(n, -1, width) for part in "qkv"
        )
        if self.layers["model_type"] == "qwen3":
            q, k = (self._norm(one, f"layers.{layer}.self_attn.{part}_norm") for one, part in ((q, "q"), (k, "k")))
        q, k = self._turned(q), self._turned(k)
        distance = torch.arange(n)[:, None] - torch.arange(n)
        seen = distance >= 0
        if (self.layers.get("layer_types") or [""] * (layer + 1))[layer] == "sliding_attention":
            seen &= distance < self.layers["sliding_window"]
        return self._seen(q, k, v, seen) @ self.weights[f"layers.{layer}.self_attn.o_proj.weight"].T

    def _seen(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        out = []
        for head in range(q.shape[1]):
            kept = head * k.shape[1] // q.shape[1]
            scores = (q[:, head] @ k[:, kept].T / q.shape[-1] ** 0.5).masked_fill(~seen, float("-inf"))
            out.append(scores.softmax(-1) @ v[:, kept])
        return torch.cat(out, dim=1)

    def _turned(self, x: Tensor) -> Tensor:
        """Rotated by positions that begin at 1."""
        half = x.shape[-1] // 2
        angles = torch.arange(1, len(x) + 1)[:, None] / self.theta ** (torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def dflash_folder(folder: Path, target: Any, *, seed: int = 0, **given: Any) -> Path:
    """A DFlash checkpoint in the `speculators` format, whose vocabulary is the target's."""
    layers = {"model_type": "qwen3", **SIZES}
    layers |= {name: given.pop(name) for name in [*given] if name in {"layer_types", "sliding_window"}}
    config = {
        "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "draft_vocab_size": 64,
        "block_size": 5, "mask_token_id": 63, "aux_hidden_state_layer_ids": READS,
        "transformer_layer_config": {**layers, "use_sliding_window": "sliding_window" in layers}, **given,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    reads = config["aux_hidden_state_layer_ids"]
    eagle = {"draft_vocab_size": 64, "eagle_aux_hidden_state_layer_ids": reads, "transformer_layer_config": layers}
    weights = _weights(eagle, torch.Generator().manual_seed(seed))
    for name in ("q", "k", "v"):  # these read no embedding beside
        key = f"layers.0.self_attn.{name}_proj.weight"
        weights[key] = weights[key][:, :32].contiguous()
    weights["hidden_norm.weight"] = weights.pop("layers.0.hidden_norm.weight")
    del weights["embed_tokens.weight"], weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    return folder


class DFlash(Eagle):
    """The formulas of DFlash, one text at a time, without a cache; embeddings and head are the target's.

    Windows are `anchored` at a block's first token, or at each token, which they count.
    """

    def __init__(self, folder: Path, target: Any, *, anchored: bool = True) -> None:
        super().__init__(folder)
        self.target, self.anchored = target, anchored

    def block(self, tokens: list[int], states: Tensor, count: int) -> list[int]:
        """The likeliest `count` guesses after `tokens`; `states` `[tokens - 1, layers, width]`."""
        size, anchor = self.config["block_size"], self.config.get("sample_from_anchor", False)
        context = self._norm(states.reshape(len(states), -1) @ self.weights["fc.weight"].T, "hidden_norm")
        ids = [tokens[-1], *[self.config["mask_token_id"]] * (size - 1)]
        hidden = self.target.get_input_embeddings().weight[ids]
        for layer in range(self.layers["num_hidden_layers"]):
            normed = self._norm(hidden, f"layers.{layer}.input_layernorm")
            hidden = hidden + self._block_attention(normed, context, layer)
            hidden = hidden + self._mlp(hidden, layer)
        logits = self._norm(hidden, "norm") @ self.target.lm_head.weight.T
        return [int(one.argmax()) for one in logits[0 if anchor else 1 :]][:count]

    def _block_attention(self, x: Tensor, context: Tensor, layer: int) -> Tensor:
        name, width = f"layers.{layer}.self_attn.", self.layers["head_dim"]
        query, key_, value = (self.weights[f"{name}{part}_proj.weight"].T for part in "qkv")
        told = torch.cat([context, x])
        q, k, v = (rows.view(len(rows), -1, width) for rows in (x @ query, told @ key_, told @ value))
        q, k = self._norm(q, f"{name}q_norm"), self._norm(k, f"{name}k_norm")
        k, n = self._turned(k), len(context)
        q = self._turned(torch.cat([q.new_zeros(n, *q.shape[1:]), q]))[n:]
        at, key = torch.arange(n, n + len(x))[:, None], torch.arange(n + len(x))
        seen = torch.ones(len(x), n + len(x), dtype=torch.bool)
        if (self.layers.get("layer_types") or [""] * (layer + 1))[layer] == "sliding_attention":
            begin = n - self.layers["sliding_window"] if self.anchored else at - self.layers["sliding_window"] + 1
            seen = (key >= begin) & ((key < n) | (key <= at))
            if self.config.get("sliding_window_non_causal"):
                seen = (key >= n - self.layers["sliding_window"]).expand(len(x), -1)
        return self._seen(q, k, v, seen) @ self.weights[f"{name}o_proj.weight"].T


def check_blocks(proposals: Proposals, model: Any, reference: DFlash, layers: Sequence[int] = READS) -> None:
    """Many proposals, which are what the formulas say."""
    assert len(proposals) >= 20
    for text, tree in proposals:
        assert tree.tokens == reference.block(text, states_of(model, text[:-1], layers), len(tree))
