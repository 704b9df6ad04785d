"""The logits processors of one row, as one callable, and as numbers for compiled chains.

`specdec/kernels/filters.h` applies the numbers: their effect after a text and after each guess that follows it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor
from transformers.generation import logits_process as stock
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from specdec.core.drafts import Filter
from specdec.decoding.processors import table
from specdec.decoding.processors.builtin import MinLength, MinNewTokens, Suppress, SuppressAtBegin, Timestamps
from specdec.decoding.processors.table import ProcessorSetup
from specdec.decoding.processors.warpers import Top
from specdec.errors import OptionError
from specdec.options.generate import Options

Text = list[int]


@dataclass(frozen=True)
class Processors:
    """Logits processors in order: `(ids [n, length] or None, logits [n, vocab]) -> [n, vocab]` in float32."""

    items: tuple[Any, ...] = ()

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return f"Processors({', '.join(type(item).__name__ for item in self.items)})"

    def __call__(self, ids: Tensor | None, logits: Tensor) -> Tensor:
        """`logits` `[n, vocab]` after all processors; `ids` `[n, length]` may be None unless `reads_ids`."""
        scores = logits.float()
        if not self.pure and scores.data_ptr() == logits.data_ptr():
            scores = scores.clone()  # a user's processor may write in place
        for item in self.items:
            result = item(ids, scores)
            if not isinstance(result, Tensor) or result.shape != scores.shape:
                got = f"shape {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
                raise OptionError(
                    f"`logits_processor` {getattr(item, '__name__', type(item).__name__)} must return scores of shape "
                    f"{list(scores.shape)}, the shape of its input, got {got}: correct its return value"
                )
            scores = result
        return scores

    @cached_property
    def reads_ids(self) -> bool:
        """Whether any processor reads the ids."""
        return any(type(item) not in table.WITHOUT_IDS for item in self.items)

    @cached_property
    def pure(self) -> bool:
        """Whether all are functions of ids and logits, which may also be called for text that is never emitted."""
        return all(map(_is_pure, self.items))

    def in_numbers(self, text: list[int]) -> list[Filter] | None:
        """All filters after a text; None if a processor has no numeric form, as no subclass has."""
        numbers: list[Filter] = []
        for item in self.items:
            kind = _KINDS.get(type(item))
            filters = None if kind is None else kind(item, text)
            if filters is None:
                return None
            numbers += filters
        return numbers

    @cached_property
    def drafting(self) -> Processors:
        """The processors for draft logits: the pure ones, never a user's code."""
        return Processors(tuple(filter(_is_pure, self.items)))


def build_processors(options: Options, *, extra: Sequence[Any] = (), **fields: Any) -> Processors:
    """The processors of one row, without guidance; `fields`: the other fields of `ProcessorSetup`.

    `extra`: the user's processors. Each replaces the processor of its kind that the options make, or else comes after
    those processors, before the warpers. Raises `OptionError` for a value that its processor rejects, and for a
    processor that needs more than ids and logits.
    """
    setup = ProcessorSetup(options=options, **fields)
    if setup.encoder_ids is not None and bool((setup.encoder_ids < 0).any()):
        setup = replace(setup, encoder_ids=None)
    _check(options, extra)
    items = _merge(table.build_entries(table.PROCESSORS, setup), extra)
    if options.samples:
        items += table.build_entries(table.WARPERS, setup)
    return Processors(tuple(items + table.build_entries(table.LAST, setup)))


def _is_pure(item: Any) -> bool:
    """Whether a processor is known to be a function of ids and logits, or its class itself has `pure = True`."""
    return type(item) in table.PURE or vars(type(item)).get("pure") is True


def _merge(items: list[Any], extra: Sequence[Any]) -> list[Any]:
    """`items`; a user's processor replaces the item of its kind, and the other ones of `extra` follow."""
    by_kind = {type(item): item for item in reversed(extra)}
    merged = [by_kind.get(getattr(item, "stands_for", type(item)), item) for item in items]
    for item in extra:
        if not any(item is other for other in merged):
            merged.append(item)
    return merged


def _check(options: Options, extra: Sequence[Any]) -> None:
    """Raises for a user's processor that cannot be called with ids and logits, or would apply guidance twice."""
    for item in extra:
        try:
            with suppress(ValueError):  # a builtin may have no signature
                inspect.signature(item).bind(None, None)
        except TypeError as error:
            way_out = f"write it with these two, and bind others first ({error})"
            raise OptionError.of("logits_processor", "callables of (ids, logits)", item, way_out) from None
        if options.guidance_scale not in (None, 1) and type(item) is UnbatchedClassifierFreeGuidanceLogitsProcessor:
            raise OptionError("`guidance_scale` and a guidance processor in `logits_processor` contradict: pass one")


def _suppression(item: Suppress, text: Text) -> list[Filter]:
    first, end = item.acts_on(len(text))
    return [Filter("suppress", (first, end, *(token for token in item.tokens if token >= 0)))] if end > 0 else []


def _repetition(item: stock.RepetitionPenaltyLogitsProcessor, text: Text) -> list[Filter] | None:
    if item.prompt_ignore_length is not None:
        return None
    return [Filter("repetition", (item.penalty, *sorted(set(text))))]


def _timestamps(item: Timestamps, text: Text) -> list[Filter] | None:
    if item.begin > len(text):
        return None
    output = text[item.begin :]
    initial = -1 if item.most_initial is None else item.most_initial
    rules = item.first, item.end, initial, item.by_probability, item.newest(output)
    return [Filter("timestamps", (*rules, *output[-2:]))]


_KINDS: dict[type, Callable[[Any, Text], list[Filter] | None]] = {
    Suppress: _suppression,
    SuppressAtBegin: _suppression,
    MinLength: _suppression,
    MinNewTokens: _suppression,
    stock.RepetitionPenaltyLogitsProcessor: _repetition,
    stock.TemperatureLogitsWarper: lambda item, text: [Filter("temperature", (item.temperature,))],
    Top: lambda item, text: [Filter("top", (item.k, item.p, item.min_tokens_to_keep))],
    Timestamps: _timestamps,
}
