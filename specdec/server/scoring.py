"""What a prompt's own tokens score: it is decoded again from its first token on, with nothing else let through."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.tree import Step
from specdec.generator.generator import SpecGenerator
from specdec.options.checks import common_length
from specdec.server.cancellation import Cancel

_CHUNK = 64  # tokens of the prompt that one pass scores at most


def scored(generator: SpecGenerator, ids: Sequence[int], top: int, salt: str | None, cancel: Cancel) -> list[Step]:
    """The steps that lead from the first of `ids` to the others, with the target's `top` likeliest tokens of each.

    The prompt is its own prediction, so a pass scores many of its tokens. Raises CancelledError where nobody waits.
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
    cancel.tell(job.cancel)
    return [step for deltas in job.follow(stream=True) for delta in deltas for step in delta.steps]


class Only:
    """A processor that lets through nothing but the tokens of one text, `ids`."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = list(ids)

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """`logits` `[rows, vocab]` after texts `ids` `[rows, length]`, all but that of the next token out of reach."""
        next_one = self._ids[ids.shape[1]]
        left = torch.full_like(logits, -torch.inf)
        left[:, next_one] = 0.0
        return left

    def allowed(self, text: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of `tokens` go on as the text does."""
        return common_length(self._ids[len(text) :], tokens)

    def __repr__(self) -> str:
        return f"Only({len(self._ids)} tokens)"
