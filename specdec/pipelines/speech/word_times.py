"""Times of words, from the cross-attention of a Whisper decoder's alignment heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutput


@torch.no_grad()
def attention_maps(model: Any, hidden: Tensor, ids: Tensor, heads: Sequence[Sequence[int]]) -> Tensor:
    """Cross-attention `[heads, tokens, positions]` of `(layer, head)` pairs in a pass over `ids` `[1, tokens]`.

    `hidden`: the encoder's output. Hooks compute it, since not every attention implementation returns attentions.
    """
    layers = model.get_decoder().layers
    found: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            found[layer] = _attention(module, args[0] if args else given["hidden_states"], hidden)

        return hook

    hooks = [
        layers[layer].encoder_attn.register_forward_pre_hook(keep(layer), with_kwargs=True)
        for layer in {layer for layer, _ in heads}
    ]
    try:
        model(encoder_outputs=BaseModelOutput(last_hidden_state=hidden), decoder_input_ids=ids, use_cache=False)
    finally:
        for handle in hooks:
            handle.remove()
    return torch.stack([found[layer][head] for layer, head in heads])


def _attention(module: nn.Module, states: Tensor, hidden: Tensor) -> Tensor:
    """The weights `[heads, tokens, positions]` with which `states` `[1, tokens, width]` attend to `hidden`."""
    attend: Any = module
    query = (attend.q_proj(states) * attend.scaling).view(-1, attend.num_heads, attend.head_dim).transpose(0, 1)
    key = attend.k_proj(hidden).view(-1, attend.num_heads, attend.head_dim).transpose(0, 1)
    return (query @ key.transpose(1, 2)).softmax(-1)


def token_times(maps: Tensor, width: int) -> np.ndarray[Any, Any]:
    """The position of each token, from attention `[heads, tokens, positions]` smoothed over `width` positions."""
    if maps.shape[1] == 0:
        return np.empty(0)
    maps = maps.float()
    maps = (maps - maps.mean(-2, keepdim=True)) / maps.std(-2, keepdim=True, unbiased=False)
    if maps.shape[-1] > (side := width // 2):  # the median of each value and its neighbours, mirrored at the ends
        beside = functional.pad(maps, (side, side, 0, 0), mode="reflect").unfold(-1, width, 1)
        maps = beside.sort(-1).values[..., side]
    tokens, positions = _warped(-maps.mean(0).double().cpu().numpy())
    first = np.diff(tokens, prepend=-1).astype(bool)
    return positions[first]


def _warped(costs: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The cheapest monotonic path through `costs` `[tokens, positions]` (dynamic time warping), as pairs of indices.

    Computed diagonal by diagonal; of equal paths the step along the positions is taken, as in Whisper.
    """
    rows, columns = costs.shape
    total = np.full((rows + 1, columns + 1), np.inf, dtype=np.float32)
    total[0, 0] = 0
    came = np.zeros((rows + 1, columns + 1), dtype=np.int8)
    came[0], came[:, 0] = 2, 1
    for diagonal in range(2, rows + columns + 1):
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        both, up, left = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        way = np.where((both < up) & (both < left), 0, np.where((up < both) & (up < left), 1, 2))
        total[i, j] = costs[i - 1, j - 1] + np.choose(way, (both, up, left))
        came[i, j] = way
    path, i, j = [], rows, columns
    while i > 0 or j > 0:
        path.append((i - 1, j - 1))
        way = came[i, j]
        i, j = i - (way != 2), j - (way != 1)
    steps = np.array(path[::-1])
    return steps[:, 0], steps[:, 1]
