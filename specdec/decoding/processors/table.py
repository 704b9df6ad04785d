"""Which option makes which processor, in transformers' order (`GenerationMixin._get_logits_processor`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as stock

from specdec.decoding.processors.builtin import (
    EncoderNgrams,
    EncoderPenalty,
    MinLength,
    MinNewTokens,
    OutputPenalty,
    PrefixFn,
    RecentNgrams,
    RowPrefix,
    Suppress,
    SuppressAtBegin,
    Timestamps,
)
from specdec.decoding.processors.warpers import Top
from specdec.errors import OptionError
from specdec.options.generate import Options

_COLDEST = 1e-30  # a logit divided by less may be infinite


@dataclass(frozen=True, kw_only=True)
class ProcessorSetup:
    """What a row's processors depend on.

    `prompt_length` includes `padding` tokens on the left, which the row's ids lack: lengths mean the same as in
    transformers for the padded row. `encoder_ids` `[1, n]`: the encoder's input (or a decoder-only model's prompt).
    `row`: the batch index for `prefix_allowed_tokens_fn`. `vocab_size`: the number of logits, which an
    encoder's ids may exceed. `watermark_size`: the number of tokens that a watermark divides.
    """

    options: Options
    prompt_length: int
    padding: int = 0
    encoder_ids: Tensor | None = None
    prefix_allowed_tokens_fn: PrefixFn | None = None
    row: int = 0
    vocab_size: float = math.inf
    watermark_size: int = 0

    @property
    def unpadded_length(self) -> int:
        """The prompt's length in tokens, without padding."""
        return self.prompt_length - self.padding

    @property
    def eos(self) -> Tensor | None:
        """The end-of-sequence ids `[n]`, or None, as transformers prepares them."""
        return torch.tensor(self.options.eos_ids) if self.options.eos_ids else None

    @property
    def window(self) -> int | None:
        """In how many of the last tokens an n-gram must not be repeated; None: in all."""
        return self.options.no_repeat_ngram_window_size

    @property
    def least(self) -> int:
        """How many tokens a warper must keep: with beams, at least one that ends no text."""
        return max(len(self.options.eos_ids), 1) + 1 if self.options.num_beams > 1 else 1


def _exponential_decay(r: ProcessorSetup, penalty: Any) -> Arguments:
    if r.eos is None:
        raise OptionError("`exponential_decay_length_penalty` needs an `eos_token_id` to act on, and there is none")
    return penalty, r.eos, r.unpadded_length


def _begin_suppress(r: ProcessorSetup, tokens: Any) -> Arguments:
    offset = r.prompt_length <= 1 and r.options.forced_bos_token_id is not None
    return tokens, r.unpadded_length + offset


def _cutoff(r: ProcessorSetup, value: float) -> Arguments:
    return (value, -torch.inf, r.least) if 0.0 < value < 1.0 else None


def _top(r: ProcessorSetup, k: int) -> Arguments:
    """One warper for top-k and top-p; a value without effect is left out."""
    p = 1.0 if r.options.top_p is None else r.options.top_p
    return (k, p, r.least) if k or p < 1.0 else None


Arguments = tuple[Any, ...] | None
Entry = tuple[str, Callable[..., Any], Callable[[ProcessorSetup, Any], Arguments]]
"""An option, what it makes, and its arguments; None where the option's value has no effect."""

PROCESSORS: tuple[Entry, ...] = (
    ("sequence_bias", stock.SequenceBiasLogitsProcessor, lambda r, v: (v,)),
    (
        "encoder_repetition_penalty",
        EncoderPenalty,
        lambda r, v: None if v == 1.0 or r.encoder_ids is None else (v, r.encoder_ids, r.vocab_size),
    ),
    ("repetition_penalty", stock.RepetitionPenaltyLogitsProcessor, lambda r, v: None if v == 1.0 else (v,)),
    ("presence_penalty", OutputPenalty, lambda r, v: (r.unpadded_length, v, 0.0) if v else None),
    ("frequency_penalty", OutputPenalty, lambda r, v: (r.unpadded_length, 0.0, v) if v else None),
    ("no_repeat_ngram_size", stock.NoRepeatNGramLogitsProcessor, lambda r, v: (v,) if v > 0 and not r.window else None),
    ("no_repeat_ngram_size", RecentNgrams, lambda r, v: (v, r.window) if v > 0 and r.window else None),
    (
        "encoder_no_repeat_ngram_size",
        EncoderNgrams,
        lambda r, v: None if v <= 0 or r.encoder_ids is None else (v, r.encoder_ids, r.vocab_size),
    ),
    ("bad_words_ids", stock.NoBadWordsLogitsProcessor, lambda r, v: (v, r.eos)),
    ("min_length", MinLength, lambda r, v: None if v <= 0 or r.eos is None else (max(v - r.padding, 0), r.eos)),
    ("min_new_tokens", MinNewTokens, lambda r, v: None if v <= 0 or r.eos is None else (r.unpadded_length + v, r.eos)),
    ("prefix_allowed_tokens_fn", RowPrefix, lambda r, v: (v, r.row)),
    # It acts after the first token. Padding counts, so it never acts on a padded row.
    ("forced_bos_token_id", stock.ForcedBOSTokenLogitsProcessor, lambda r, v: None if r.padding else (v,)),
    (
        "forced_eos_token_id",
        stock.ForcedEOSTokenLogitsProcessor,
        lambda r, v: None if r.options.max_length is None else (r.options.max_length - r.padding, v),
    ),
    ("remove_invalid_values", stock.InfNanRemoveLogitsProcessor, lambda r, v: () if v is True else None),
    ("exponential_decay_length_penalty", stock.ExponentialDecayLengthPenalty, _exponential_decay),
    ("suppress_tokens", Suppress, lambda r, v: (v,)),
    ("begin_suppress_tokens", SuppressAtBegin, _begin_suppress),
)
"""Before the user's own. Guidance, which comes first, is part of the strategies."""

WARPERS: tuple[Entry, ...] = (
    ("temperature", stock.TemperatureLogitsWarper, lambda r, v: (max(v, _COLDEST),) if v != 1.0 else None),
    ("top_h", stock.TopHLogitsWarper, lambda r, v: (v,)),
    ("top_k", Top, _top),
    ("min_p", stock.MinPLogitsWarper, lambda r, v: (v, -torch.inf, r.least)),
    ("typical_p", stock.TypicalLogitsWarper, lambda r, v: (v, -torch.inf, r.least) if v < 1.0 else None),
    ("epsilon_cutoff", stock.EpsilonLogitsWarper, _cutoff),
    ("eta_cutoff", stock.EtaLogitsWarper, _cutoff),
)
"""After the user's own, and only when sampling."""

LAST: tuple[Entry, ...] = (
    (
        "watermarking_config",
        lambda config, size: config.construct_processor(size, "cpu"),
        lambda r, v: (v, r.watermark_size),
    ),
    ("renormalize_logits", stock.LogitNormalization, lambda r, v: () if v is True else None),
)
"""After the warpers."""

WITHOUT_IDS: frozenset[Any] = frozenset(
    {kind for _, kind, _ in (*WARPERS, *LAST[1:])}
    | {stock.TopKLogitsWarper, stock.TopPLogitsWarper}
    | {stock.InfNanRemoveLogitsProcessor, Suppress, stock.SuppressTokensLogitsProcessor}
)
"""Functions of the logits alone."""

_KINDS = {kind for _, kind, _ in PROCESSORS if kind is not RowPrefix}
PURE: frozenset[Any] = WITHOUT_IDS.union(_KINDS, (getattr(kind, "stands_for", kind) for kind in _KINDS)) | {
    Timestamps,
    stock.WhisperTimeStampLogitsProcessor,
}
"""Functions of ids and logits, which may be called for text that is never emitted; subclasses do not count."""


def build_entries(entries: Sequence[Entry], setup: ProcessorSetup) -> list[Any]:
    """The processors of the options of `setup`; raises `OptionError`, with the option's name, for a bad value."""
    processors = []
    for name, kind, arguments in entries:
        value = getattr(setup if name == "prefix_allowed_tokens_fn" else setup.options, name)
        if value is None:
            continue
        try:
            values = arguments(setup, value)
            processor = None if values is None else kind(*values)
        except OptionError:
            raise
        except (TypeError, ValueError) as error:
            raise OptionError(f"`{name}`={value!r} was refused: {error}") from error
        if processor is not None:
            processors.append(processor)
    return processors
