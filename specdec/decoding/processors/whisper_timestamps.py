"""Whisper's rules for timestamps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_NEVER = -torch.inf


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

    def __call__(self, ids: Tensor | None, logits: Tensor, texts: Sequence[list[int]] | None = None) -> Tensor:
        """Filtered copy of `logits` `[n, vocab]` after `ids` `[n, length]`, or after the same `texts` as lists."""
        if texts is None:
            assert ids is not None
            texts = ids.tolist()
        scores = logits.clone()
        text, stamps = scores[:, : self.first], scores[:, self.first :]  # views
        text[:, -1] = _NEVER
        for row, tokens in enumerate(texts):
            self._keep_order(tokens[self.begin :], text[row], stamps[row])
        if len(texts[0]) == self.begin:
            text.fill_(_NEVER)
            if self.most_initial is not None:
                stamps[:, self.most_initial + 1 :] = _NEVER
        if self.by_probability:
            log_probs = torch.log_softmax(scores.float(), dim=-1)
            together = log_probs[:, self.first :].logsumexp(-1)
            text.masked_fill_((together > log_probs[:, : self.first].amax(-1))[:, None], _NEVER)
        return scores

    def newest(self, generated: list[int]) -> int:
        """The last timestamp of `generated`, or -1."""
        return next((token for token in reversed(generated) if token >= self.first), -1)

    def _keep_order(self, generated: list[int], text: Tensor, stamps: Tensor) -> None:
        """Sets to -inf in `text` `[first]` and `stamps` `[others]` what may not follow `generated`."""
        newest = self.newest(generated)
        if newest < 0:
            return
        if generated[-1] < self.first:
            stamps[: newest - self.first + 1] = _NEVER  # text takes some time
        elif len(generated) < 2 or generated[-2] >= self.first:  # a first one stands for a pair
            stamps.fill_(_NEVER)
        else:  # the second of a pair may be the same
            stamps[: newest - self.first] = _NEVER
            text[: self.end] = _NEVER
