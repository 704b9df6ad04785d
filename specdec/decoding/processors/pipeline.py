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
from specdec.decoding.processors.own import MinLength, MinNewTokens, Suppress, SuppressAtBegin, Timestamps
from specdec.decoding.processors.table import ProcessorSetup
from specdec.decoding.processors.warpers import Top
from specdec.errors import OptionError

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
        if not self.items:
            return logits.float()
        scores = logits.float()
        if not self.pure and scores.data_ptr() == logits.data_ptr():
            scores = scores.clone()  # a user's processor may write in place
        for item in self.items:
            made = item(ids, scores)
            if not isinstance(made, Tensor) or made.shape != scores.shape:
                got = f"shape {list(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
                raise OptionError(
                    f"`logits_processor` {getattr(item, '__name__', type(item).__name__)} must return scores of shape "
                    f"{list(scores.shape)}, the shape of its input, got {got}: correct its return value"
                )
            scores = made
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
        """All filters after a text; None if a processor has no numeric form; no subclass has one."""
        found: list[Filter] = []
        for item in self.items:
            kind = _KINDS.get(type(item))
            filters = None if kind is None else kind(item, text)
            if filters is None:
                return None
            found += filters
        return found

    @cached_property
    def drafting(self) -> Processors:
        """Those that are applied to draft logits: the pure ones, never a user's code."""
        return Processors(tuple(filter(_is_pure, self.items)))


def build_processors(options: Any, *, extra: Sequence[Any] = (), **given: Any) -> Processors:
    """The processors of one row, of which `given` are the other fields of `ProcessorSetup`; guidance is not made here.

    `extra`: the user's processors; one of a kind that the options make replaces it, others follow, before the warpers.
    Raises `OptionError` for a value that its processor rejects, and for a processor that needs more than ids and
    logits.
    """
    setup = ProcessorSetup(options=options, **given)
    if setup.encoder_ids is not None and bool((setup.encoder_ids < 0).any()):
        setup = replace(setup, encoder_ids=None)
    _check(options, extra)
    items = _merge(table.build_listed(table.PROCESSORS, setup), extra)
    if getattr(options, "do_sample", None):
        items += table.build_listed(table.WARPERS, setup)
    return Processors(tuple(items + table.build_listed(table.LAST, setup)))


def _is_pure(item: Any) -> bool:
    """Whether it is known to be a function of ids and logits, or its own class has `pure = True`."""
    return type(item) in table.PURE or vars(type(item)).get("pure") is True


def _merge(made: list[Any], extra: Sequence[Any]) -> list[Any]:
    """`made`, with the user's processors in place of those of their kind, and the rest of `extra` after them."""
    kinds = [getattr(item, "stands_for", type(item)) for item in made]
    merged = [next((own for own in extra if type(own) is kind), item) for kind, item in zip(kinds, made, strict=True)]
    for own in extra:
        if not any(own is item for item in merged):
            merged.append(own)
    return merged


def _check(options: Any, extra: Sequence[Any]) -> None:
    """Raises for a user's processor that cannot be called with ids and logits, or would apply guidance twice."""
    for own in extra:
        if not callable(own):
            raise OptionError.of("logits_processor", "callables of (ids, logits)", own)
        parameters: Any = ()
        with suppress(ValueError):  # of a builtin that has no signature
            parameters = inspect.signature(own).parameters.values()
        needed = [
            parameter.name
            for parameter in parameters
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        if len(needed) > 2:
            raise OptionError.of("logits_processor", "callables of (ids, logits)", own, f"bind {needed[2:]} first")
        guides = getattr(options, "guidance_scale", None) not in (None, 1)
        if guides and type(own) is UnbatchedClassifierFreeGuidanceLogitsProcessor:
            raise OptionError("`guidance_scale` and a guidance processor in `logits_processor` contradict: pass one")


def _suppressed(item: Suppress, text: Text) -> list[Filter]:
    first, end = item.acts_on(len(text))
    return [Filter("suppress", (first, end, *(token for token in item.tokens if token >= 0)))] if end > 0 else []


def _repetition(item: stock.RepetitionPenaltyLogitsProcessor, text: Text) -> list[Filter] | None:
    if item.prompt_ignore_length is not None:
        return None
    return [Filter("repetition", (item.penalty, *sorted(set(text))))]


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
    stock.RepetitionPenaltyLogitsProcessor: _repetition,
    stock.TemperatureLogitsWarper: lambda item, text: [Filter("temperature", (item.temperature,))],
    Top: lambda item, text: [Filter("top", (item.k, item.p, item.min_tokens_to_keep))],
    Timestamps: _timestamps,
}
