"""Drafts that know the right answer, and tell all, half, or none of it."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import normalize

Guess = Callable[[list[int], int], list[int]]
KINDS = ("perfect", "half", "wrong", "random")


def oracle(kind: str, answers: Sequence[Sequence[int]], vocab: int) -> Guess:
    """A draft that finds its text among `answers` (whole rows of ids) and continues it faithfully, or spoils it."""
    rows = [list(map(int, answer)) for answer in answers]

    def guess(tokens: list[int], k: int) -> list[int]:
        if kind == "random":
            return random.Random(len(tokens)).choices(range(vocab), k=k)
        truth = next((row[len(tokens) :][:k] for row in rows if row[: len(tokens)] == tokens), [])
        spoiled = [(t + 1) % vocab for t in truth]
        if kind == "wrong":
            return spoiled
        if kind == "half":
            keep = len(tokens) % 4
            return truth[:keep] + spoiled[keep:]
        return truth

    return guess


def contrastive(read: Callable[[list[int]], Any], alpha: float, k: int, count: int) -> list[int]:
    """A contrastive search by the paper's rule, without a cache; `read` is a pass over a prompt and what is new."""
    new: list[int] = []
    for _ in range(count):
        out = read(new)
        context, (probs, tokens) = normalize(out.hidden_states[-1][0], dim=-1), out.logits[0, -1].softmax(-1).topk(k)
        ends = [normalize(read([*new, token]).hidden_states[-1][0, -1], dim=-1) for token in tokens.tolist()]
        worth = (1 - alpha) * probs - alpha * (context @ torch.stack(ends).T).amax(0)
        new.append(int(tokens[worth.argmax()]))
    return new


def sessions_of_drafts(engine: Any) -> list[Any]:
    """The sessions of an engine's drafts, some of which run another one's proposer."""
    found = []
    for opened in engine.drafts.open.values():
        proposer = opened.proposer
        while hasattr(proposer, "_inner"):
            proposer = proposer._inner
        found += [proposer._session] if hasattr(proposer, "_session") else []
    return found


def rows_in_drafts(engine: Any) -> int:
    """How many rows the caches of an engine's drafts hold."""
    return sum(len(session.rows) for session in sessions_of_drafts(engine))


@contextmanager
def shapes(model: Any) -> Iterator[list[tuple[int, int]]]:
    """The shapes of the ids of all forwards of `model`."""
    found: list[tuple[int, int]] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, given: found.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    try:
        yield found
    finally:
        hook.remove()
