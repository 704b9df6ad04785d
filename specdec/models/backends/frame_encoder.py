"""Whisper's encoder as few calls: frames lie one after the other, as linear layers and attention read them.

It computes what transformers' modules do. Convolutions are linear layers over neighbouring frames; queries, keys and
values come from one layer, and attention reads their heads where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.models.whisper.modeling_whisper import WhisperAttention, WhisperEncoder, WhisperEncoderLayer

from specdec import kernels
from specdec.models.backends.fused_layers import join_layers
from specdec.models.hf.model_state import runs_other_code


class FrameEncoder:
    """The encoder of a model; `copies` are models over the same layers."""

    def __init__(self, model: Any, copies: Sequence[Any]) -> None:
        self._encoder, self._decoder = model.get_encoder(), model.get_decoder()
        encoder = self._encoder
        [place] = [name for name, module in model.named_modules() if module is encoder]
        self._convolutions = [_Convolution(encoder.conv1), _Convolution(encoder.conv2)]
        self._layers = []
        for number, layer in enumerate(encoder.layers):
            names = [f"{place}.layers.{number}.self_attn.{side}_proj" for side in "qkv"]
            sides = [model.get_submodule(name) for name in names]
            is_packed = all(isinstance(side, kernels.PackedLinear) for side in sides)
            union = join_layers(sides, [model, *copies], names) if is_packed else None
            activation = _gelu if type(layer.activation_fn) is type(ACT2FN["gelu"]) else layer.activation_fn
            self._layers.append((layer, sides if union is None else [union], activation))

    @classmethod
    def of(cls, model: Any, copies: Sequence[Any]) -> FrameEncoder | None:
        """The encoder of a model; None for an encoder of another kind, or one in which a caller's code runs."""
        if not model.config.is_encoder_decoder or type(encoder := model.get_encoder()) is not WhisperEncoder:
            return None
        kinds = [(type(layer), type(layer.self_attn)) for layer in encoder.layers]
        kinds += [(type(encoder.conv1), type(encoder.conv2))]
        if not {*kinds} <= {(WhisperEncoderLayer, WhisperAttention), (nn.Conv1d, nn.Conv1d)}:
            return None
        attentions = [layer.encoder_attn for layer in model.get_decoder().layers]
        return None if any(map(runs_other_code, [encoder, *attentions])) else cls(model, copies)

    def reads(self, features: Tensor) -> bool:
        """Whether features `[rows, mels, frames]` have the encoder's size; if not, transformers says what is wrong."""
        positions, mels = len(self._encoder.embed_positions.weight), self._encoder.conv1.in_channels
        return features.shape[1:] == (mels, positions * self._encoder.conv2.stride[0])

    def __call__(self, features: Tensor) -> Tensor:
        """The output `[1, positions, width]` for one input `[1, mels, frames]`; all positions see one another."""
        x = features.transpose(1, 2)
        for convolve in self._convolutions:
            x = _gelu(convolve(x))
        x = x + self._encoder.embed_positions.weight
        for layer, sides, activation in self._layers:
            x = x + _attended(layer.self_attn, sides, layer.self_attn_layer_norm(x))
            x = x + layer.fc2(activation(layer.fc1(layer.final_layer_norm(x))))
        hidden: Tensor = self._encoder.layer_norm(x)
        return hidden

    def project(self, hidden: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values `[rows, heads, positions, head width]` of the encoder's output, for each decoder layer.

        In memory the entries of one key are `positions` numbers from each other, as attention reads them fastest.
        """
        modules = [layer.encoder_attn for layer in self._decoder.layers]
        heads = [hidden.shape[0], hidden.shape[1], -1, modules[0].head_dim]

        def transposed(keys: Tensor) -> Tensor:
            return keys.view(heads).permute(0, 2, 3, 1).contiguous().transpose(2, 3)

        return [(transposed(m.k_proj(hidden)), m.v_proj(hidden).view(heads).transpose(1, 2)) for m in modules]


class _Convolution:
    """A convolution over frames `[1, frames, channels]` as a linear layer over neighbouring frames."""

    def __init__(self, layer: Any) -> None:
        [self._size], [self._stride], [self._padding] = layer.kernel_size, layer.stride, layer.padding
        self._linear = kernels.pack(layer.weight.detach().transpose(1, 2).flatten(1), layer.bias)

    def __call__(self, x: Tensor) -> Tensor:
        padded = functional.pad(x, (0, 0, self._padding, self._padding))
        output: Tensor = self._linear(padded.unfold(1, self._size, self._stride).transpose(2, 3).flatten(2))
        return output


def _attended(module: Any, layers: Sequence[Any], x: Tensor) -> Tensor:
    """What an attention module adds to `x` `[1, positions, width]`; `layers` give queries, keys and values."""
    sides = torch.cat([layer(x) for layer in layers], -1) if len(layers) > 1 else layers[0](x)
    heads = sides.view(1, x.shape[1], 3, module.num_heads, module.head_dim).permute(2, 0, 3, 1, 4)
    output: Tensor = module.out_proj(kernels.attend_frames(*heads, module.scaling).flatten(2))
    return output


def _gelu(x: Tensor) -> Tensor:
    """GELU; for bfloat16 by the kernel, which is as exact as bfloat16 in a fraction of torch's time."""
    return kernels.gelu(x) if x.dtype == torch.bfloat16 else functional.gelu(x)
