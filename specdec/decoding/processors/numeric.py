"""Processors in numbers, for compiled chains: their effect after a text and after each guess that follows it.

`specdec/kernels/filters.h` applies them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.generation import logits_process as stock

from specdec.core.drafts import Filter
from specdec.decoding.processors.suppress import MinLength, MinNewTokens, Suppress, SuppressAtBegin
from specdec.decoding.processors.warpers import TopK, TopKTopP, TopP
from specdec.decoding.processors.whisper_timestamps import Timestamps

Text = list[int]


def in_numbers(item: Any, text: Text) -> list[Filter] | None:
    """A processor's filters after a text; None where it has no numeric form, as every subclass."""
    kind = _KINDS.get(type(item))
    return None if kind is None else kind(item, text)


def _suppressed(item: Suppress, text: Text) -> list[Filter]:
    first, end = item.acts_on(len(text))
    return [Filter("suppress", (first, end, *(token for token in item.tokens if token >= 0)))] if end > 0 else []


def _timestamps(item: Timestamps, text: Text) -> list[Filter] | None:
    if item.begin > len(text):
        return None
    generated = text[item.begin :]
    initial = -1 if item.most_initial is None else item.most_initial
    how = item.first, item.end, initial, item.by_probability, item.newest(generated)
    return [Filter("timestamps", (*how, *generated[-2:]))]


_KINDS: dict[type, Callable[[Any, Text], list[Filter] | None]] = {
    Suppress: _suppressed,
    SuppressAtBegin: _suppressed,
    MinLength: _suppressed,
    MinNewTokens: _suppressed,
    stock.TemperatureLogitsWarper: lambda item, text: [Filter("temperature", (item.temperature,))],
    TopK: lambda item, text: [Filter("top", (item.k, 1.0, 1))],
    TopP: lambda item, text: [Filter("top", (0, item.p, item.min_tokens_to_keep))],
    TopKTopP: lambda item, text: [Filter("top", (item.top_k.k, item.top_p.p, item.top_p.min_tokens_to_keep))],
    Timestamps: _timestamps,
}
