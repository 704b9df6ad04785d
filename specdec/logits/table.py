"""Which option makes which processor, in transformers' order (`GenerationMixin._get_logits_processor`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as stock

from specdec.errors import OptionError
from specdec.logits.diversity import HammingDiversityLogitsProcessor
from specdec.logits.warpers import TopK, TopKTopP, TopP

PrefixFn = Callable[[int, Tensor], list[int]]


@dataclass(frozen=True)
class Request:
    """What the builders need to know about one row besides the value of their own option.

    `prompt_length` is the padded one, as transformers counts; `padding` of its tokens are not in the ids of the row.
    """

    options: Any
    prompt_length: int
    padding: int
    prompt_ignore_length: int | None
    eos_ids: Sequence[int]
    encoder_ids: Tensor | None
    prefix_allowed_tokens_fn: PrefixFn | None
    row: int
    device: torch.device | str
    min_tokens_to_keep: int

    @property
    def own_length(self) -> int:
        """Prompt tokens that are in the ids of the row."""
        return self.prompt_length - self.padding

    @property
    def eos(self) -> Tensor | None:
        """The end-of-sequence ids `[n]`, or None without any, as transformers prepares them."""
        return torch.tensor(list(self.eos_ids), device=self.device) if self.eos_ids else None


Builder = Callable[[Request, Any], Any]


class RowPrefix:
    """`prefix_allowed_tokens_fn` for the row alone, which keeps the number it has in the batch."""

    stands_for = stock.PrefixConstrainedLogitsProcessor

    def __init__(self, allowed: PrefixFn, row: int) -> None:
        self.allowed = allowed
        self.row = row

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Allows what the function allows after `ids` `[n, length]`; the n hypotheses belong to one row."""
        constrained = stock.PrefixConstrainedLogitsProcessor(lambda _, text: self._ids(text), len(ids))
        return constrained(ids, logits)

    def _ids(self, text: Tensor) -> Any:
        """What may follow `text` `[length]`; raises OptionError where that is nothing, or no list of ids."""
        found = self.allowed(self.row, text)
        if not hasattr(found, "__len__") or not len(found):
            way_out = "return [eos_token_id] where the text is complete, all ids where anything may follow"
            expected = f"a function to a list of at least one id (here for row {self.row}, after {len(text)} ids)"
            raise OptionError.of("prefix_allowed_tokens_fn", expected, found, way_out)
        return found


class EncoderPenalty(stock.EncoderRepetitionPenaltyLogitsProcessor):  # type: ignore[misc]
    """Penalises repeating what the encoder read, for any number of texts of the row; stock wants one copy for each."""

    stands_for = stock.EncoderRepetitionPenaltyLogitsProcessor

    def __call__(self, ids: Tensor | None, logits: Tensor) -> Tensor:
        """Processed `logits` `[n, vocab]`."""
        return torch.cat([super(EncoderPenalty, self).__call__(ids, text[None]) for text in logits])


def _number(value: Any) -> float:
    """Integers where transformers insists on floats: `temperature=2` is clear enough."""
    return float(value) if isinstance(value, int) else value


def _encoder_penalty(request: Request, penalty: Any) -> Any:
    if penalty == 1.0 or request.encoder_ids is None:
        return None
    return EncoderPenalty(_number(penalty), request.encoder_ids)


def _encoder_ngrams(request: Request, size: Any) -> Any:
    if size <= 0 or request.encoder_ids is None:
        return None
    return stock.EncoderNoRepeatNGramLogitsProcessor(size, request.encoder_ids)


def _diversity(request: Request, penalty: Any) -> Any:
    groups = getattr(request.options, "num_beam_groups", None) or 1
    return HammingDiversityLogitsProcessor(penalty, request.options.num_beams, groups) if groups > 1 else None


def _repetition(request: Request, penalty: Any) -> Any:
    if penalty == 1.0:
        return None
    return stock.RepetitionPenaltyLogitsProcessor(_number(penalty), request.prompt_ignore_length)


def _min_length(request: Request, length: Any) -> Any:
    if length <= 0 or request.eos is None:
        return None
    return stock.MinLengthLogitsProcessor(max(length - request.padding, 0), request.eos, device=request.device)


def _min_new_tokens(request: Request, length: Any) -> Any:
    if length <= 0 or request.eos is None:
        return None
    return stock.MinNewTokensLengthLogitsProcessor(request.own_length, length, request.eos, device=request.device)


def _forced_bos(request: Request, token: Any) -> Any:
    # It acts when one token is known. Padding counts, so a padded row never gets there.
    return None if request.padding else stock.ForcedBOSTokenLogitsProcessor(token)


def _forced_eos(request: Request, token: Any) -> Any:
    if request.options.max_length is None:
        return None
    return stock.ForcedEOSTokenLogitsProcessor(request.options.max_length - request.padding, token, request.device)


def _exponential_decay(request: Request, penalty: Any) -> Any:
    if request.eos is None:
        raise OptionError("`exponential_decay_length_penalty` needs an `eos_token_id` to act on, and there is none")
    return stock.ExponentialDecayLengthPenalty(penalty, request.eos, request.own_length)


def _begin_suppress(request: Request, tokens: Any) -> Any:
    forced = request.prompt_length <= 1 and request.options.forced_bos_token_id is not None
    return stock.SuppressTokensAtBeginLogitsProcessor(tokens, request.own_length + forced, device=request.device)


def _typical(request: Request, mass: Any) -> Any:
    keep = request.min_tokens_to_keep
    return stock.TypicalLogitsWarper(mass, min_tokens_to_keep=keep) if mass < 1.0 else None


def _epsilon(request: Request, value: Any) -> Any:
    keep = request.min_tokens_to_keep
    return stock.EpsilonLogitsWarper(value, min_tokens_to_keep=keep) if 0.0 < value < 1.0 else None


def _eta(request: Request, value: Any) -> Any:
    keep = request.min_tokens_to_keep
    return stock.EtaLogitsWarper(value, min_tokens_to_keep=keep, device=request.device) if 0.0 < value < 1.0 else None


def _top_k_top_p(request: Request, k: Any) -> Any:
    top_p = request.options.top_p
    if k == 0:
        return _top_p(request, top_p) if top_p is not None else None
    if top_p is not None and top_p < 1.0:
        return TopKTopP(k, top_p, min_tokens_to_keep=request.min_tokens_to_keep)
    return TopK(k, min_tokens_to_keep=request.min_tokens_to_keep)


def _top_p(request: Request, p: Any) -> Any:
    return TopP(p, min_tokens_to_keep=request.min_tokens_to_keep) if p < 1.0 else None


def _top_p_alone(request: Request, p: Any) -> Any:
    return _top_p(request, p) if request.options.top_k is None else None  # else `top_k` has built both


PROCESSORS: tuple[tuple[str, Builder], ...] = (
    ("sequence_bias", lambda r, v: stock.SequenceBiasLogitsProcessor(v)),
    ("diversity_penalty", _diversity),
    ("encoder_repetition_penalty", _encoder_penalty),
    ("repetition_penalty", _repetition),
    ("no_repeat_ngram_size", lambda r, v: stock.NoRepeatNGramLogitsProcessor(v) if v > 0 else None),
    ("encoder_no_repeat_ngram_size", _encoder_ngrams),
    ("bad_words_ids", lambda r, v: stock.NoBadWordsLogitsProcessor(v, r.eos)),
    ("min_length", _min_length),
    ("min_new_tokens", _min_new_tokens),
    ("prefix_allowed_tokens_fn", lambda r, v: RowPrefix(v, r.row)),
    ("forced_bos_token_id", _forced_bos),
    ("forced_eos_token_id", _forced_eos),
    ("remove_invalid_values", lambda r, v: stock.InfNanRemoveLogitsProcessor() if v is True else None),
    ("exponential_decay_length_penalty", _exponential_decay),
    ("suppress_tokens", lambda r, v: stock.SuppressTokensLogitsProcessor(v, device=r.device)),
    ("begin_suppress_tokens", _begin_suppress),
)
"""Before the user's own; guidance, the first of all, is a paired row and lives with the strategies."""

WARPERS: tuple[tuple[str, Builder], ...] = (
    ("temperature", lambda r, v: stock.TemperatureLogitsWarper(_number(v)) if v != 1.0 else None),
    ("top_h", lambda r, v: stock.TopHLogitsWarper(v)),
    ("top_k", _top_k_top_p),
    ("top_p", _top_p_alone),
    ("min_p", lambda r, v: stock.MinPLogitsWarper(v, min_tokens_to_keep=r.min_tokens_to_keep)),
    ("typical_p", _typical),
    ("epsilon_cutoff", _epsilon),
    ("eta_cutoff", _eta),
)
"""After the user's own, and only when sampling."""

NORMALIZE: tuple[tuple[str, Builder], ...] = (
    ("renormalize_logits", lambda r, v: stock.LogitNormalization() if v is True else None),
)
"""Always last."""

WITHOUT_IDS: frozenset[Any] = frozenset(
    {
        stock.EpsilonLogitsWarper,
        stock.EtaLogitsWarper,
        stock.InfNanRemoveLogitsProcessor,
        stock.LogitNormalization,
        stock.MinPLogitsWarper,
        stock.SuppressTokensLogitsProcessor,
        stock.TemperatureLogitsWarper,
        stock.TopHLogitsWarper,
        stock.TopKLogitsWarper,
        stock.TopPLogitsWarper,
        stock.TypicalLogitsWarper,
        HammingDiversityLogitsProcessor,
        TopK,
        TopKTopP,
        TopP,
    }
)
"""Functions of the logits alone."""

PURE: frozenset[Any] = WITHOUT_IDS | {
    stock.EncoderNoRepeatNGramLogitsProcessor,
    stock.EncoderRepetitionPenaltyLogitsProcessor,
    EncoderPenalty,
    stock.ExponentialDecayLengthPenalty,
    stock.ForcedBOSTokenLogitsProcessor,
    stock.ForcedEOSTokenLogitsProcessor,
    stock.MinLengthLogitsProcessor,
    stock.MinNewTokensLengthLogitsProcessor,
    stock.NoBadWordsLogitsProcessor,
    stock.NoRepeatNGramLogitsProcessor,
    stock.RepetitionPenaltyLogitsProcessor,
    stock.SequenceBiasLogitsProcessor,
    stock.SuppressTokensAtBeginLogitsProcessor,
    stock.WhisperTimeStampLogitsProcessor,
}
"""Functions of ids and logits: they may be asked about text that never comes true. Subclasses are not trusted."""


def build(entries: Sequence[tuple[str, Builder]], request: Request) -> list[Any]:
    """The processors that the options of `request` ask for; a bad value raises `OptionError` with its option's name."""
    made = []
    for name, builder in entries:
        value = getattr(request, name) if name == "prefix_allowed_tokens_fn" else getattr(request.options, name, None)
        if value is None:
            continue
        try:
            processor = builder(request, value)
        except OptionError:
            raise
        except (TypeError, ValueError) as error:
            raise OptionError(f"`{name}`={value!r} was refused: {error}") from error
        if processor is not None:
            made.append(processor)
    return made
