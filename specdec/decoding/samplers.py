"""Samplers of drafts: from draft logits to a guess that tends to agree with the target's strategy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from specdec.core.budget import Budget
from specdec.core.drafts import Branch, Choice, Level, SequenceView
from specdec.decoding import noise
from specdec.decoding.processors import Processors

WIDER = 2
"""Of the nodes proposed at a depth, every second one is continued (arXiv 2406.16858 reranks likewise)."""
_CANDIDATES = 512
_FAVOURED = 64  # likeliest tokens among which the noise favours siblings; as in passes.cpp
_ACCEPTED = 0.7


def num_generated(seq: SequenceView) -> int:
    """How many tokens the sequence has generated so far."""
    return len(seq.tokens) - seq.prompt_length


def process(processors: Processors, seq: SequenceView, extra: Sequence[int], logits: Tensor) -> Tensor:
    """Processed `logits` `[vocab]`, float32, after the sequence's text and `extra`; the input stays as it is."""
    if not processors.items:
        return logits.float()
    return processors(seq.prefix(extra) if processors.reads_ids else None, logits[None])[0]


def texts_at(seq: SequenceView, ends: Sequence[Branch]) -> Tensor:
    """The ids `[ends, length]` of the sequence's text and each of these paths, which have one length."""
    tails = torch.tensor([end.tokens for end in ends], dtype=torch.long)
    return torch.cat((seq.prefix().expand(len(ends), -1), tails), dim=1)


def fit(logits: Tensor, vocab_size: int) -> Tensor:
    """A draft's `logits` `[..., vocab]`, cropped or padded with -inf to the target's vocabulary."""
    size = logits.shape[-1]
    if size >= vocab_size:
        return logits if size == vocab_size else logits[..., :vocab_size]
    return torch.nn.functional.pad(logits, (0, vocab_size - size), value=float("-inf"))


def first_best(values: Tensor) -> int:
    """The index of the largest of `values` `[vocab]`, the first of equals; numpy takes a tenth of torch's time."""
    return int(values.detach().float().numpy().argmax())


def pick_token(scores: Tensor, address: int | None, *, confident: bool = True) -> tuple[int, float]:
    """A token of `scores` `[vocab]` float32, and its probability: the draw at `address`, or the likeliest (the first).

    The probability is 1 unless `confident`, and NaN where the largest score is not finite.
    """
    values, token = scores.detach().numpy(), first_best(scores)
    highest = values[token]
    if not math.isfinite(highest):
        return token, math.nan
    if address is not None:
        token = noise.draw(scores, address)
    return token, float(np.exp(values[token] - highest) / np.exp(values - highest).sum()) if confident else 1.0


def likeliest_children(scores: Tensor, ends: Sequence[Branch], budget: Budget) -> Level:
    """The children of `ends` with the largest joint probability, from log-probabilities `scores` `[ends, vocab]`."""
    total = scores + torch.tensor([end.score for end in ends])[:, None]
    count = WIDER * (budget.branches or 1)
    top, places = total.flatten().topk(min(count, total.numel()))
    vocab = scores.shape[1]
    children = []
    for score, place in zip(top.tolist(), places.tolist(), strict=True):
        if not math.isfinite(score):
            break
        i, token = divmod(place, vocab)
        path = [*ends[i].chances, min(math.exp(score - ends[i].score), 1.0)]
        if budget.keep(path):
            children.append((i, Branch([*ends[i].tokens, token], score, path[-1], path)))
    return children


def add_noise(scores: Tensor, address: int) -> Tensor:
    """`scores` `[ends, vocab]` plus the noise of the target's draw at `address`, as log-probabilities.

    Only each row's `_CANDIDATES` likeliest tokens are considered; a draft may approximate.
    """
    top, ids = scores.topk(min(_CANDIDATES, scores.shape[1]))
    sums = top + noise.gumbel(address, ids).to(top.dtype)
    return torch.full_like(scores, -torch.inf).scatter_(1, ids, torch.log_softmax(sums, dim=-1))


def draw_children(scores: Tensor, ends: Sequence[Branch], budget: Budget, address: int) -> Level:
    """Children drawn without replacement (arXiv 2402.12374), from log-probabilities `[ends, vocab]`.

    The number of children of each end is decided before any child is drawn, by the odds of the end's path and of an
    n-th child: dropping a child because of its token would change the distribution of the text. The tokens of the path
    may decide the number: a node's children change neither the chance that the text reaches the node nor what follows.
    """
    children = []
    for i, (end, share) in enumerate(zip(ends, _shares(ends, budget), strict=True)):
        for order, (token, q) in enumerate(_draw_tokens(scores[i], end, share, address)):
            chance = _order_chance(order)
            child = Branch([*end.tokens, token], end.score + math.log(chance), chance, [*end.chances, chance], q)
            children.append((i, child))
    return sorted(children, key=lambda child: -child[1].score)


def _draw_tokens(scores: Tensor, end: Branch, share: int, address: int) -> list[tuple[int, Tensor]]:
    """Up to `share` tokens after `end`, each with the q `[vocab]` that it was drawn from, from `scores` `[vocab]`."""
    remaining, draws = scores, list[tuple[int, Tensor]]()
    for order in range(share):
        if not math.isfinite(float(remaining.max())):
            break
        token = noise.draw(remaining, noise.key(address, len(end.tokens), *end.tokens, order))
        draws.append((token, torch.softmax(remaining, dim=-1)))
        remaining = remaining.scatter(0, torch.tensor([token]), -torch.inf)
    return draws


def _order_chance(order: int) -> float:
    """The chance of the n-th child before it is drawn: it is accepted, and the earlier ones are not."""
    return _ACCEPTED * (1.0 - _ACCEPTED) ** order


def _shares(ends: Sequence[Branch], budget: Budget) -> list[int]:
    """How many children every end gets, by the best odds."""
    most = budget.branches or 1
    odds = [
        (end.score + math.log(_order_chance(order)), i, order) for i, end in enumerate(ends) for order in range(most)
    ]
    shares = [0] * len(ends)
    for _, i, order in sorted(odds, key=lambda odd: -odd[0])[:most]:
        shares[i] += budget.keep([*ends[i].chances, _order_chance(order)])
    return shares


@dataclass(frozen=True)
class GreedySampler:
    """Guesses the likeliest token. With a `stream` of noise, it draws."""

    processors: Processors
    needs_q: ClassVar[bool] = False
    branches: int = field(default=1, kw_only=True)

    def stream(self, seq: SequenceView) -> tuple[int | None, int]:
        """Guess i is drawn with the noise of the key `fold(address, first + i)`; address None: no noise."""
        return None, 0

    def choice(self, seq: SequenceView) -> Choice | None:
        """`pick` in numbers, after the sequence's text; None if a subclass overrides it, or a processor has none."""
        filters = self.processors.in_numbers(seq.tokens) if type(self).pick is GreedySampler.pick else None
        return None if filters is None else Choice(filters, *self.stream(seq))

    def pick(
        self, seq: SequenceView, guesses: list[int], logits: Tensor, *, confident: bool = True, siblings: bool = False
    ) -> tuple[int, float, Tensor | None]:
        scores = process(self.processors, seq, guesses, logits)
        address, first = self.stream(seq)
        key = None if address is None else noise.fold(address, first + len(guesses))
        token, prob = pick_token(scores, key, confident=confident)
        if math.isnan(prob):
            return token, prob, None
        if siblings:
            return token, prob, self.shares(scores, key, token, prob)
        return token, prob, torch.softmax(scores, dim=-1) if self.needs_q else None

    def shares(self, scores: Tensor, key: int | None, guess: int, chance: float) -> Tensor:
        """The chance of each token `[vocab]` beside the `guess` of this `chance`, from processed `scores` `[vocab]`."""
        return scores.softmax(-1)

    def expand(self, seq: SequenceView, ends: Sequence[Branch], logits: Tensor, budget: Budget) -> Level:
        return likeliest_children(torch.log_softmax(self._process(seq, ends, logits), dim=-1), ends, budget)

    def _process(self, seq: SequenceView, ends: Sequence[Branch], logits: Tensor) -> Tensor:
        """Processed draft `logits` `[ends, vocab]`, float32."""
        texts = texts_at(seq, ends) if self.processors.reads_ids else None
        return self.processors(texts, logits)


@dataclass(frozen=True)
class CoupledSampler(GreedySampler):
    """Guesses with the noise that the target will use: `argmax(log q + G)` (arXiv 2408.07978)."""

    seed: int = 0

    def stream(self, seq: SequenceView) -> tuple[int, int]:
        return noise.key(self.seed, noise.COUPLED), num_generated(seq)

    def shares(self, scores: Tensor, key: int | None, guess: int, chance: float) -> Tensor:
        """The tokens that the noise favours share what the guess leaves of the probability."""
        assert key is not None
        top, ids = scores.topk(min(_FAVOURED, len(scores)))
        ids = ids[top.isfinite() & (ids != guess)]
        shares = (1 - chance) * (scores[ids] + noise.gumbel(key, ids)).softmax(-1)
        return torch.zeros_like(scores).scatter_(0, ids, shares.to(scores.dtype))

    def expand(self, seq: SequenceView, ends: Sequence[Branch], logits: Tensor, budget: Budget) -> Level:
        address = noise.key(self.seed, noise.COUPLED, num_generated(seq) + len(ends[0].tokens))
        return likeliest_children(add_noise(self._process(seq, ends, logits), address), ends, budget)


@dataclass(frozen=True)
class DrawnSampler(GreedySampler):
    """Draws from q with random numbers that nothing else uses, and returns q."""

    seed: int = 0
    needs_q: ClassVar[bool] = True

    def stream(self, seq: SequenceView) -> tuple[int, int]:
        return noise.key(self.seed, noise.DRAFT, num_generated(seq)), 0

    def expand(self, seq: SequenceView, ends: Sequence[Branch], logits: Tensor, budget: Budget) -> Level:
        address, _ = self.stream(seq)
        return draw_children(self._process(seq, ends, logits), ends, budget, address)
