"""Logits processors in place of transformers' or beside them: suppressed tokens, Whisper's rules for timestamps,
penalties, and processors of one row of a batch.

transformers' processors search the whole vocabulary for suppressed tokens in every step; these look them up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.generation import logits_process as stock

from specdec.errors import OptionError

PrefixFn = Callable[[int, Tensor], list[int]]
_NEVER = -torch.inf


class Suppress:
    """Suppresses `tokens` after texts of at least `first` and fewer than `end` ids; the vocabulary may lack some."""

    stands_for: ClassVar[type] = stock.SuppressTokensLogitsProcessor

    def __init__(self, tokens: Iterable[int] | Tensor, first: int = 0, end: float = math.inf) -> None:
        self.tokens = sorted({int(token) for token in tokens})
        self._first, self._end = first, end
        self._ids_by_vocab: dict[int, Tensor] = {}  # by the size of the vocabulary

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tokens})"

    def acts_on(self, length: int) -> tuple[float, float]:
        """The range of tokens after a text of `length` where it suppresses: first, and one past the last, from 0."""
        return max(self._first - length, 0), self._end - length

    def __call__(self, ids: Tensor | None, logits: Tensor) -> Tensor:
        """`logits` `[n, vocab]` with the tokens at -inf; the same tensor where it does not suppress."""
        first, end = self.acts_on(0 if ids is None else ids.shape[-1])
        if not first <= 0 < end:
            return logits
        vocab = logits.shape[-1]
        if vocab not in self._ids_by_vocab:
            ids_in_vocab = [token for token in self.tokens if 0 <= token < vocab]
            self._ids_by_vocab[vocab] = torch.tensor(ids_in_vocab, dtype=torch.long)
        return logits.index_fill(-1, self._ids_by_vocab[vocab], -torch.inf)


class RecentNgrams(stock.NoRepeatNGramLogitsProcessor):  # type: ignore[misc]
    """Forbids to repeat an n-gram of the last `window` tokens, as UnlimitedOcr's `generate` does."""

    def __init__(self, size: int, window: int) -> None:
        super().__init__(size)
        self._window = window

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """`logits` `[n, vocab]` after `ids` `[n, length]`, -inf for tokens that would repeat an n-gram."""
        scores: Tensor = super().__call__(ids[:, -self._window :], logits)
        return scores


class SuppressAtBegin(Suppress):
    """Suppresses `tokens` right after the first `begin` tokens of a text."""

    stands_for = stock.SuppressTokensAtBeginLogitsProcessor

    def __init__(self, tokens: Iterable[int] | Tensor, begin: int) -> None:
        super().__init__(tokens, begin, begin + 1)


class MinLength(Suppress):
    """Suppresses `tokens` while a text is shorter than `least` tokens."""

    stands_for = stock.MinLengthLogitsProcessor

    def __init__(self, least: int, tokens: Iterable[int] | Tensor) -> None:
        super().__init__(tokens, end=least)


class MinNewTokens(MinLength):
    """`MinLength` whose `least` counts the prompt and the new tokens."""

    stands_for = stock.MinNewTokensLengthLogitsProcessor


class Timestamps:
    """Timestamps come in pairs, never decrease, and are forced where their sum is likelier than any other token.

    `first`: the token of 0.00 seconds, followed by all later timestamps; the token before it is never written. The
    rules hold after the first `begin` tokens. `end`: ends a text. `most_initial`: the largest index of the first
    timestamp. Without `by_probability`, timestamps are never forced.

    Source: `ApplyTimestampRules` of Whisper (arXiv 2212.04356), as in transformers' `WhisperTimeStampLogitsProcessor`.
    """

    def __init__(
        self, first: int, begin: int, end: int, *, most_initial: int | None = None, by_probability: bool = True
    ) -> None:
        self.first, self.begin, self.end = first, begin, end
        self.most_initial, self.by_probability = most_initial, by_probability

    def __repr__(self) -> str:
        return f"Timestamps({self.first})"

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Filtered copy of `logits` `[n, vocab]` after `ids` `[n, length]`."""
        texts, scores = ids.tolist(), logits.clone()
        text, stamps = scores[:, : self.first], scores[:, self.first :]  # views
        if 0 < self.first <= scores.shape[-1]:
            scores[:, self.first - 1] = _NEVER
        for row, tokens in enumerate(texts):
            self._keep_order(tokens[self.begin :], text[row], stamps[row])
        if len(texts[0]) == self.begin:
            text.fill_(_NEVER)
            if self.most_initial is not None:
                stamps[:, self.most_initial + 1 :] = _NEVER
        if self.by_probability:
            log_probs = torch.log_softmax(scores.float(), dim=-1)
            together = log_probs[:, self.first :].logsumexp(-1)
            if (are_forced := together > log_probs[:, : self.first].amax(-1)).any():
                text[are_forced] = _NEVER
        return scores

    def newest(self, output: list[int]) -> int:
        """The last timestamp of `output`, or -1."""
        return next((token for token in reversed(output) if token >= self.first), -1)

    def _keep_order(self, output: list[int], text: Tensor, stamps: Tensor) -> None:
        """Sets to -inf in `text` `[first]` and `stamps` `[others]` what may not follow `output`."""
        newest = self.newest(output)
        if newest < 0:
            return
        if output[-1] < self.first:
            stamps[: newest - self.first + 1] = _NEVER  # text takes some time
        elif len(output) < 2 or output[-2] >= self.first:  # a first one stands for a pair
            stamps.fill_(_NEVER)
        else:  # the second of a pair may be the same
            stamps[: newest - self.first] = _NEVER
            text[: self.end] = _NEVER


class OutputPenalty:
    """Lowers the logit of every generated token by `presence`, and by `frequency` for each of its occurrences.

    The prompt's `length` tokens do not count. These are the penalties of OpenAI's interface.
    """

    def __init__(self, length: int, presence: float, frequency: float) -> None:
        self.length, self.presence, self.frequency = length, presence, frequency

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """`logits` `[n, vocab]`, lowered for what `ids` `[n, length]` have after the prompt."""
        output = ids[:, self.length :]
        if not output.shape[1]:
            return logits
        counts = torch.zeros_like(logits).scatter_add_(1, output, logits.new_ones(output.shape))
        return logits - self.frequency * counts - self.presence * (counts > 0)


class RowPrefix:
    """`prefix_allowed_tokens_fn` for one row, with its index in the batch."""

    stands_for = stock.PrefixConstrainedLogitsProcessor

    def __init__(self, function: PrefixFn, row: int) -> None:
        self.function = function
        self.row = row

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """`logits` with only the ids allowed after `ids` `[n, length]`; the n hypotheses belong to one row."""
        width = logits.shape[1]
        processor = stock.PrefixConstrainedLogitsProcessor(lambda _, text: self._ids(text, width), len(ids))
        return processor(ids, logits)

    def _ids(self, text: Tensor, width: int) -> Any:
        """The ids below `width` allowed after `text` `[length]`; raises OptionError for others, none, or no list."""
        answer = self.function(self.row, text)
        try:
            ids = torch.as_tensor(answer)
            valid = len(answer) and not ids.is_floating_point() and bool(((ids >= 0) & (ids < width)).all())
        except (TypeError, ValueError, RuntimeError):
            valid = False
        if not valid:
            way_out = "return [eos_token_id] where the text is complete, all ids where anything may follow"
            expected = f"a function to a list of at least one id (here for row {self.row}, after {len(text)} ids)"
            raise OptionError.of("prefix_allowed_tokens_fn", f"{expected} below {width}", answer, way_out)
        return answer


class EncoderPenalty(stock.EncoderRepetitionPenaltyLogitsProcessor):  # type: ignore[misc]
    """transformers' penalty for repeating encoder ids, with one copy of them for any number of the row's texts.

    Ids beyond `vocab_size` have no penalty, since the decoder cannot write them.
    """

    stands_for = stock.EncoderRepetitionPenaltyLogitsProcessor

    def __init__(self, penalty: float, ids: Tensor, vocab_size: float = math.inf) -> None:
        super().__init__(penalty, ids[ids < vocab_size][None])

    def __call__(self, ids: Tensor | None, logits: Tensor) -> Tensor:
        """`logits` `[n, vocab]` with the penalty; `ids` do not matter."""
        return torch.cat([super(EncoderPenalty, self).__call__(ids, text[None]) for text in logits])


class EncoderNgrams(stock.EncoderNoRepeatNGramLogitsProcessor):  # type: ignore[misc]
    """transformers' ban of the encoder's n-grams, except those with an end beyond `vocab_size`, which never follow."""

    stands_for = stock.EncoderNoRepeatNGramLogitsProcessor

    def __init__(self, size: int, ids: Tensor, vocab_size: float = math.inf) -> None:
        super().__init__(size, ids)
        for ngrams in self.generated_ngrams:
            ngrams.update({begin: [token for token in ends if token < vocab_size] for begin, ends in ngrams.items()})
