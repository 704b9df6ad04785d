"""Log-probabilities of a prompt's own tokens: the prompt is decoded again, with all other tokens masked out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.tree import Step, common_length
from specdec.generator.generator import SpecGenerator
from specdec.server.cancellation import Cancel

_CHUNK = 64  # the most tokens that one pass scores


def scored(generator: SpecGenerator, ids: Sequence[int], top: int, salt: str | None, cancel: Cancel) -> list[Step]:
    """The steps from the first of `ids` to the last, each with the target's `top` most likely tokens.

    The prompt is its own draft, so a pass scores many tokens. Raises CancelledError.
    """
    if len(ids) < 2:
        return []
    job = generator.submit(
        [[ids[0]]],
        max_new_tokens=len(ids) - 1,
        do_sample=False,
        eos_token_id=[],
        logits_processor=[Only(ids)],
        assistant_model="ngram",
        prediction=list(ids),
        schedule="constant",
        num_assistant_tokens=_CHUNK,
        top_logprobs=top,
        cache_salt=salt,
    )
    cancel.add_done_callback(lambda _: job.cancel())
    return [step for deltas in job.follow(stream=True) for delta in deltas for step in delta.steps]


class Only:
    """A logits processor that allows only the text `ids`."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = list(ids)

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """`logits` `[rows, vocab]` after `ids` `[rows, length]`: -inf but for the text's next token."""
        masked = torch.full_like(logits, -torch.inf)
        masked[:, self._ids[ids.shape[1]]] = 0.0
        return masked

    def allowed(self, text: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of `tokens` continue the text."""
        return common_length(self._ids[len(text) :], tokens)

    def __repr__(self) -> str:
        return f"Only({len(self._ids)} tokens)"
