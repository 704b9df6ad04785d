"""Which option makes which processor, in transformers' order (`GenerationMixin._get_logits_processor`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as stock

from specdec.decoding.processors.penalties import HammingDiversityLogitsProcessor, OutputPenalty
from specdec.decoding.processors.suppress import MinLength, MinNewTokens, Suppress, SuppressAtBegin, Timestamps
from specdec.decoding.processors.warpers import TopK, TopKTopP, TopP
from specdec.errors import OptionError

PrefixFn = Callable[[int, Tensor], list[int]]
_COLDEST = 1e-30  # a logit divided by less may be infinite


@dataclass(frozen=True)
class ProcessorSetup:
    """One row, as arguments of processors depend on it.

    `prompt_length` includes `padding` tokens, which the row's ids lack, as transformers counts.
    """

    options: Any
    prompt_length: int
    padding: int
    eos_ids: Sequence[int]
    encoder_ids: Tensor | None
    prefix_allowed_tokens_fn: PrefixFn | None
    row: int
    device: torch.device | str
    vocab_size: int = 0

    @property
    def own_length(self) -> int:
        """The prompt's tokens in the row's ids."""
        return self.prompt_length - self.padding

    @property
    def eos(self) -> Tensor | None:
        """The end-of-sequence ids `[n]`, or None, as transformers prepares them."""
        return torch.tensor(list(self.eos_ids), device=self.device) if self.eos_ids else None

    @property
    def least(self) -> int:
        """How many tokens a warper must keep: with beams, at least one that ends no text."""
        return max(len(self.eos_ids), 1) + 1 if (getattr(self.options, "num_beams", None) or 1) > 1 else 1


class RowPrefix:
    """`prefix_allowed_tokens_fn` for one row, with its index in the batch."""

    stands_for = stock.PrefixConstrainedLogitsProcessor

    def __init__(self, allowed: PrefixFn, row: int) -> None:
        self.allowed = allowed
        self.row = row

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """`logits` with only the ids allowed after `ids` `[n, length]`; the n hypotheses belong to one row."""
        width = logits.shape[1]
        constrained = stock.PrefixConstrainedLogitsProcessor(lambda _, text: self._ids(text, width), len(ids))
        return constrained(ids, logits)

    def _ids(self, text: Tensor, width: int) -> Any:
        """The ids below `width` allowed after `text` `[length]`; raises OptionError for others, none, or no list."""
        found = self.allowed(self.row, text)
        if not (hasattr(found, "__len__") and len(found) and _are_ids(found, width)):
            way_out = "return [eos_token_id] where the text is complete, all ids where anything may follow"
            expected = f"a function to a list of at least one id (here for row {self.row}, after {len(text)} ids)"
            raise OptionError.of("prefix_allowed_tokens_fn", f"{expected} below {width}", found, way_out)
        return found


def _are_ids(found: Any, width: int) -> bool:
    """Whether `found` is a list or tensor of ids from 0 to below `width`."""
    try:
        ids = torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError):
        return False
    return not ids.is_floating_point() and bool(((ids >= 0) & (ids < width)).all())


class EncoderPenalty(stock.EncoderRepetitionPenaltyLogitsProcessor):  # type: ignore[misc]
    """transformers' penalty for repeating encoder ids, for any number of texts of the row with one copy of these."""

    stands_for = stock.EncoderRepetitionPenaltyLogitsProcessor

    def __call__(self, ids: Tensor | None, logits: Tensor) -> Tensor:
        """Processed `logits` `[n, vocab]`."""
        return torch.cat([super(EncoderPenalty, self).__call__(ids, text[None]) for text in logits])


def _number(value: Any) -> Any:
    """Integers as floats, which transformers insists on (`temperature=2`)."""
    return float(value) if isinstance(value, int) else value


def _warm(temperature: Any) -> Any:
    """The temperature, or the lowest that leaves logits finite."""
    return max(_number(temperature), _COLDEST) if temperature > 0 else temperature


def _exponential_decay(r: ProcessorSetup, penalty: Any) -> Arguments:
    if r.eos is None:
        raise OptionError("`exponential_decay_length_penalty` needs an `eos_token_id` to act on, and there is none")
    return penalty, r.eos, r.own_length


def _begin_suppress(r: ProcessorSetup, tokens: Any) -> Arguments:
    forced = r.prompt_length <= 1 and r.options.forced_bos_token_id is not None
    return tokens, r.own_length + forced, r.device


def _cutoff(r: ProcessorSetup, value: float) -> Arguments:
    return (value, -torch.inf, r.least) if 0.0 < value < 1.0 else None


def _top_k_top_p(k: int, p: float | None, least: int) -> Any:
    """One warper for both; a value without effect is left out."""
    if k == 0:
        return None if p is None or p >= 1.0 else TopP(p, min_tokens_to_keep=least)
    if p is None or p >= 1.0:
        return TopK(k, min_tokens_to_keep=least)
    return TopKTopP(k, p, min_tokens_to_keep=least)


Arguments = tuple[Any, ...] | None
Entry = tuple[str, Callable[..., Any], Callable[[ProcessorSetup, Any], Arguments]]
"""An option, what it makes, and its arguments; None where the option's value has no effect."""

PROCESSORS: tuple[Entry, ...] = (
    ("sequence_bias", stock.SequenceBiasLogitsProcessor, lambda r, v: (v,)),
    (
        "diversity_penalty",
        HammingDiversityLogitsProcessor,
        lambda r, v: (v, r.options.num_beams, g) if (g := getattr(r.options, "num_beam_groups", 1) or 1) > 1 else None,
    ),
    (
        "encoder_repetition_penalty",
        EncoderPenalty,
        lambda r, v: None if v == 1.0 or r.encoder_ids is None else (_number(v), r.encoder_ids),
    ),
    (
        "repetition_penalty",
        stock.RepetitionPenaltyLogitsProcessor,
        lambda r, v: None if v == 1.0 else (_number(v),),
    ),
    ("presence_penalty", OutputPenalty, lambda r, v: (r.own_length, v, 0.0) if v else None),
    ("frequency_penalty", OutputPenalty, lambda r, v: (r.own_length, 0.0, v) if v else None),
    ("no_repeat_ngram_size", stock.NoRepeatNGramLogitsProcessor, lambda r, v: (v,) if v > 0 else None),
    (
        "encoder_no_repeat_ngram_size",
        stock.EncoderNoRepeatNGramLogitsProcessor,
        lambda r, v: None if v <= 0 or r.encoder_ids is None else (v, r.encoder_ids),
    ),
    ("bad_words_ids", stock.NoBadWordsLogitsProcessor, lambda r, v: (v, r.eos)),
    (
        "min_length",
        MinLength,
        lambda r, v: None if v <= 0 or r.eos is None else (max(v - r.padding, 0), r.eos, r.device),
    ),
    (
        "min_new_tokens",
        MinNewTokens,
        lambda r, v: None if v <= 0 or r.eos is None else (r.own_length, v, r.eos, r.device),
    ),
    ("prefix_allowed_tokens_fn", RowPrefix, lambda r, v: (v, r.row)),
    # It acts after the first token. Padding counts, so it never acts on a padded row.
    ("forced_bos_token_id", stock.ForcedBOSTokenLogitsProcessor, lambda r, v: None if r.padding else (v,)),
    (
        "forced_eos_token_id",
        stock.ForcedEOSTokenLogitsProcessor,
        lambda r, v: None if r.options.max_length is None else (r.options.max_length - r.padding, v, r.device),
    ),
    ("remove_invalid_values", stock.InfNanRemoveLogitsProcessor, lambda r, v: () if v is True else None),
    ("exponential_decay_length_penalty", stock.ExponentialDecayLengthPenalty, _exponential_decay),
    ("suppress_tokens", Suppress, lambda r, v: (v, r.device)),
    ("begin_suppress_tokens", SuppressAtBegin, _begin_suppress),
)
"""Before the user's own. Guidance, which comes first, is part of the strategies."""

WARPERS: tuple[Entry, ...] = (
    ("temperature", stock.TemperatureLogitsWarper, lambda r, v: (_warm(v),) if v != 1.0 else None),
    ("top_h", stock.TopHLogitsWarper, lambda r, v: (v,)),
    ("top_k", _top_k_top_p, lambda r, v: (v, r.options.top_p, r.least)),
    ("top_p", _top_k_top_p, lambda r, v: None if r.options.top_k is not None else (0, v, r.least)),  # see `top_k`
    ("min_p", stock.MinPLogitsWarper, lambda r, v: (v, -torch.inf, r.least)),
    ("typical_p", stock.TypicalLogitsWarper, lambda r, v: (v, -torch.inf, r.least) if v < 1.0 else None),
    ("epsilon_cutoff", stock.EpsilonLogitsWarper, _cutoff),
    ("eta_cutoff", stock.EtaLogitsWarper, lambda r, v: (*c, r.device) if (c := _cutoff(r, v)) else None),
)
"""After the user's own, and only when sampling."""

WATERMARK: tuple[Entry, ...] = (
    (
        "watermarking_config",
        lambda config, width, device: config.construct_processor(width, device),
        lambda r, v: (v, r.vocab_size, r.device),
    ),
)
"""After the warpers."""

NORMALIZE: tuple[Entry, ...] = (
    ("renormalize_logits", stock.LogitNormalization, lambda r, v: () if v is True else None),
)
"""Always last."""

WITHOUT_IDS: frozenset[Any] = frozenset(
    {kind for _, kind, _ in (*WARPERS, *NORMALIZE)}
    | {TopK, TopP, TopKTopP, stock.TopKLogitsWarper, stock.TopPLogitsWarper}
    | {HammingDiversityLogitsProcessor, stock.InfNanRemoveLogitsProcessor}
    | {Suppress, stock.SuppressTokensLogitsProcessor}
)
"""Functions of the logits alone."""

PURE: frozenset[Any] = (
    WITHOUT_IDS
    | {one for _, kind, _ in PROCESSORS if kind is not RowPrefix for one in (kind, getattr(kind, "stands_for", kind))}
    | {Timestamps, stock.WhisperTimeStampLogitsProcessor}
)
"""Functions of ids and logits, which may be called for text that is never emitted; subclasses do not count."""
