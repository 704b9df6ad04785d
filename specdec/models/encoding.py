"""Encoder output: computed once, shared by rows and by a draft with the same encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_outputs import BaseModelOutput


@dataclass
class EncoderOutput(BaseModelOutput):  # type: ignore[misc]
    """An encoder's output for any decoder, with all fields that some decoders ask for.

    Moonshine, UDOP and others read `attention_mask`, SwitchTransformers and NLLB-MoE pass on `router_logits`.
    """

    attention_mask: Tensor | None = None
    router_logits: Any = None


@dataclass(frozen=True, slots=True)
class Encoding:
    """Encoder output `hidden` `[rows, frames, width]`; `mask` `[rows, frames]` of valid frames (None: all).

    `input_mask` `[rows, length]`: the mask of the encoder's inputs, which a model takes beside the output; an encoder
    of sound has fewer frames than inputs. `kind`: the class that the encoder returns. `fields`: the other tensors in
    it, with one entry per row, which decoders may read. `hidden_states` and `attentions` of each layer are kept until
    rows are selected or joined.
    """

    hidden: Tensor
    mask: Tensor | None = None
    input_mask: Tensor | None = None
    kind: type = EncoderOutput
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    @classmethod
    def of(cls, output: Mapping[str, Any], input_mask: Any, mask: Tensor | None) -> Encoding:
        """What an encoder returned for inputs with `input_mask`; `mask` of its frames."""
        hidden: Tensor = output["last_hidden_state"]
        if hidden.dim() > 3:  # a map of a picture, whose pooled form the decoder reads
            hidden = output["pooler_output"]
        fields = {
            name: value
            for name, value in output.items()
            if name != "last_hidden_state" and isinstance(value, Tensor) and value.shape[:1] == hidden.shape[:1]
        }
        source_mask = input_mask.to(hidden.device) if isinstance(input_mask, Tensor) else None
        layers = output.get("hidden_states"), output.get("attentions")
        return cls(hidden, None if mask is None else mask.to(hidden.device), source_mask, type(output), fields, *layers)

    def __len__(self) -> int:
        return self.hidden.shape[0]

    @property
    def output(self) -> Any:
        """What the model takes as `encoder_outputs`: a copy, to which MoonshineStreaming adds positions in place."""
        return self.kind(last_hidden_state=self.hidden.clone(), **self.fields)

    def select(self, rows: Sequence[int]) -> Encoding:
        """These rows in this order; a row may be repeated."""
        index = torch.tensor(list(rows), dtype=torch.long)

        def selected(tensor: Tensor | None) -> Any:
            return None if tensor is None else tensor.index_select(0, index.to(tensor.device))

        fields = {name: selected(value) for name, value in self.fields.items()}
        return Encoding(selected(self.hidden), selected(self.mask), selected(self.input_mask), self.kind, fields)

    @classmethod
    def joined(cls, parts: Sequence[Encoding]) -> Encoding:
        """The rows of all `parts`, which are of one kind, padded with masked frames."""
        frames = max(part.hidden.shape[1] for part in parts)
        hidden = _joined([part.hidden for part in parts])
        fields = {name: _joined([part.fields[name] for part in parts]) for name in parts[0].fields}
        masks, source_masks = [part.mask for part in parts], [part.input_mask for part in parts]
        if all(mask is None for mask in masks) and all(part.hidden.shape[1] == frames for part in parts):
            return cls(hidden, None, None if source_masks[0] is None else _joined(source_masks), parts[0].kind, fields)
        whole = [
            torch.ones_like(part.hidden[..., 0], dtype=torch.long) if mask is None else mask
            for part, mask in zip(parts, masks, strict=True)
        ]
        source_masks = [mask if source is None else source for source, mask in zip(source_masks, whole, strict=True)]
        return cls(hidden, _joined(whole), _joined(source_masks), parts[0].kind, fields)


def _joined(tensors: Sequence[Any]) -> Tensor:
    """The rows of all tensors `[rows, length, …]`, padded with 0 to the longest."""
    if len({tensor.shape[1:] for tensor in tensors}) == 1:
        return torch.cat(list(tensors))
    return pad_sequence([row for tensor in tensors for row in tensor], batch_first=True)
