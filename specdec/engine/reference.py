"""Speculative decoding in its plainest form: the loop of `Engine` for one text, without caches, trees and threads.

Tests compare the engine with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import zip_longest

from torch import Tensor

from specdec.core.drafts import Drafter


def greedy(logits: Tensor, tokens: list[int]) -> int:
    """The likeliest token after `tokens`."""
    return int(logits.argmax())


def generate(
    target: Callable[[list[int]], Tensor],
    draft: Drafter | None,
    tokens: list[int],
    length: int,
    *,
    choose: Callable[[Tensor, list[int]], int] = greedy,
    ends: Collection[int] = (),
) -> list[int]:
    """`tokens` continued until there are `length` of them, or one of `ends` is written.

    `target(tokens)` returns logits `[tokens, vocab]` in one pass; `choose(logits, tokens)` takes the token that follows
    `tokens`, from logits `[vocab]` and the text alone, so that no draft can change it.
    """
    tokens, k = list(tokens), 5
    while len(tokens) < length:
        room = length - len(tokens) - 1  # the target adds one token itself
        proposal = draft.propose(list(tokens), min(k, room))[:room] if draft is not None and room else []
        logits = target(tokens + proposal)[len(tokens) - 1 :]
        new = accept(logits, proposal, tokens, choose, ends)
        k = k + 2 if len(new) > len(proposal) else max(k - 1, 1)
        tokens += new
        if new[-1] in ends:
            break
    return tokens


def accept(
    logits: Tensor,
    proposal: list[int],
    tokens: list[int],
    choose: Callable[[Tensor, list[int]], int],
    ends: Collection[int],
) -> list[int]:
    """What `choose` takes from `logits` `[nodes, vocab]`: tokens that the proposal guessed, and one more."""
    new: list[int] = []
    for row, guess in zip_longest(logits, proposal):
        new.append(choose(row, tokens + new))
        if new[-1] != guess or new[-1] in ends:
            break
    return new
