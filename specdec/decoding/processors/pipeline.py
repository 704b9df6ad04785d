"""The logits processors of one row, as one callable, and as numbers for compiled chains.

`specdec/kernels/filters.h` applies the numbers: their effect after a text and after each guess that follows it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as stock
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from specdec.core.drafts import Choice, Filter
from specdec.decoding.processors import table
from specdec.decoding.processors.penalties import HammingDiversityLogitsProcessor
from specdec.decoding.processors.suppress import MinLength, MinNewTokens, Suppress, SuppressAtBegin, Timestamps
from specdec.decoding.processors.table import PrefixFn, ProcessorSetup
from specdec.decoding.processors.warpers import TopK, TopKTopP, TopP
from specdec.errors import OptionError

Text = list[int]


@dataclass(frozen=True)
class Processors:
    """Logits processors in order: `(ids [n, length] or None, logits [n, vocab]) -> [n, vocab]` in float32.

    `device`: where their tensors are; logits from another device, such as a draft's, are copied there.
    """

    items: tuple[Any, ...] = ()
    device: torch.device | str | None = None

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return f"Processors({', '.join(type(item).__name__ for item in self.items)})"

    def __call__(
        self, ids: Tensor | None, logits: Tensor, *, texts: Sequence[list[int]] | None = None, **groups: Any
    ) -> Tensor:
        """`logits` `[n, vocab]` after all processors; `ids` `[n, length]` may be None unless `reads_ids`.

        `texts`: the ids as lists, if the caller has them, so that `Timestamps` need not read them from a device.
        `groups`: further arguments of `HammingDiversityLogitsProcessor`.
        """
        if not self.items:
            return logits.float()
        scores = logits.to(device=self.device, dtype=torch.float32)
        if not self.pure and scores.data_ptr() == logits.data_ptr():
            scores = scores.clone()  # a user's processor may write in place
        for item in self.items:
            extra: dict[str, Any] = {}
            if isinstance(item, HammingDiversityLogitsProcessor):
                extra = groups
            elif isinstance(item, Timestamps):
                extra = {"texts": texts}
            made = item(ids, scores, **extra)
            if not isinstance(made, Tensor) or made.shape != scores.shape:
                raise _not_scores(item, scores, made)
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

    def in_numbers(self, text: list[int]) -> Choice | None:
        """All filters after a text; None if a processor has no numeric form."""
        found = [in_numbers(item, text) for item in self.items]
        if any(filters is None for filters in found):
            return None
        return Choice([one for filters in found for one in filters or ()])

    @cached_property
    def drafting(self) -> Processors:
        """Those that are applied to draft logits: the pure ones, never a user's code."""
        return Processors(tuple(filter(_is_pure, self.items)), self.device)


def build_processors(
    options: Any,
    *,
    prompt_length: int,
    padding: int = 0,
    eos_ids: Sequence[int] = (),
    encoder_ids: Tensor | None = None,
    extra: Sequence[Any] = (),
    prefix_allowed_tokens_fn: PrefixFn | None = None,
    row: int = 0,
    device: torch.device | str = "cpu",
    vocab_size: int = 0,
) -> Processors:
    """The processors of one row from `options`, an object with `GenerationConfig`'s attribute names.

    `prompt_length` includes `padding` tokens on the left, which later ids lack: lengths mean the same as in
    transformers for the padded row. `encoder_ids` `[1, n]`: the encoder's input (or a decoder-only model's prompt).
    `extra`: the user's processors; one of a kind that the options make replaces it, others follow, before the warpers.
    `row`: the batch index for `prefix_allowed_tokens_fn`. `vocab_size`: the width that a watermark divides. Guidance is
    not made here.

    Raises `OptionError` for a value that its processor rejects, and for a processor that needs more than ids and
    logits.
    """
    setup = ProcessorSetup(
        options,
        prompt_length,
        padding,
        eos_ids,
        encoder_ids if encoder_ids is not None and not bool((encoder_ids < 0).any()) else None,
        prefix_allowed_tokens_fn,
        row,
        device,
        vocab_size,
    )
    items = _build(table.PROCESSORS, setup)
    if extra:
        _check(options, extra)
        items = _merge(items, extra)
    if getattr(options, "do_sample", None):
        items += _build(table.WARPERS, setup)
    last = (*table.WATERMARK, *table.NORMALIZE)
    return Processors(tuple(items + _build(last, setup)), device)


def _build(entries: Sequence[table.Entry], setup: ProcessorSetup) -> list[Any]:
    """The processors of the options of `setup`; raises `OptionError`, with the option's name, for a bad value."""
    made = []
    for name, kind, arguments in entries:
        value = getattr(setup, name) if name == "prefix_allowed_tokens_fn" else getattr(setup.options, name, None)
        if value is None:
            continue
        try:
            given = arguments(setup, value)
            processor = None if given is None else kind(*given)
        except OptionError:
            raise
        except (TypeError, ValueError) as error:
            raise OptionError(f"`{name}`={value!r} was refused: {error}") from error
        if processor is not None:
            made.append(processor)
    return made


def _is_pure(item: Any) -> bool:
    """Whether it is known to be a function of ids and logits, or its own class has `pure = True`."""
    return type(item) in table.PURE or vars(type(item)).get("pure") is True


def _not_scores(processor: Any, scores: Tensor, made: Any) -> OptionError:
    """The error for a processor that does not return what it got."""
    got = f"shape {list(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
    name = getattr(processor, "__name__", type(processor).__name__)
    return OptionError(
        f"`logits_processor` {name} must return scores of shape {list(scores.shape)}, the shape of its input, got "
        f"{got}: correct its return value"
    )


def _merge(made: list[Any], extra: Sequence[Any]) -> list[Any]:
    """`made`, with the user's processors in place of those of their kind, and the rest of `extra` after them."""
    merged = []
    for item in made:
        kind = getattr(item, "stands_for", type(item))
        merged.append(next((own for own in extra if type(own) is kind), item))
    for own in extra:
        if not any(own is item for item in merged):
            merged.append(own)
    return merged


def _check(options: Any, extra: Sequence[Any]) -> None:
    """Raises for a user's processor that cannot be called with ids and logits, or would apply guidance twice."""
    for own in extra:
        if not callable(own):
            raise OptionError.of("logits_processor", "callables of (ids, logits)", own)
        needed = [
            parameter.name
            for parameter in inspect.signature(own).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        if len(needed) > 2:
            raise OptionError.of("logits_processor", "callables of (ids, logits)", own, f"bind {needed[2:]} first")
        guides = getattr(options, "guidance_scale", None) not in (None, 1)
        if guides and type(own) is UnbatchedClassifierFreeGuidanceLogitsProcessor:
            raise OptionError("`guidance_scale` and a guidance processor in `logits_processor` contradict: pass one")


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
