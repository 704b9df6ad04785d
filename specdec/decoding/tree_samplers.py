"""From a draft's logits to trees of guesses: the likeliest children by joint probability, or drawn ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.drafts import Branch, Plan
from specdec.decoding import device_reads, noise

WIDER = 2
"""Of the nodes proposed at a depth, every second one is continued (arXiv 2406.16858 reranks likewise)."""
_CANDIDATES = 512
_ACCEPTED = 0.7


def likeliest_children(scores: Tensor, ends: Sequence[Branch], plan: Plan) -> list[tuple[int, Branch]]:
    """The children of `ends` with the largest joint probability, from log-probabilities `scores` `[ends, vocab]`."""
    total = scores + torch.tensor([end.score for end in ends], device=scores.device)[:, None]
    count = WIDER * (plan.branches or 1)
    top, places = total.flatten().topk(min(count, total.numel()))
    vocab = scores.shape[1]
    found = []
    for score, place in zip(*device_reads.read(top, places), strict=True):
        if not math.isfinite(score):
            break
        i, token = divmod(int(place), vocab)
        path = [*ends[i].chances, min(math.exp(score - ends[i].score), 1.0)]
        if plan.keep(path):
            found.append((i, Branch([*ends[i].tokens, token], score, path[-1], path)))
    return found


def noisy(scores: Tensor, address: int) -> Tensor:
    """`scores` `[ends, vocab]` plus the noise of the target's draw at `address`, as log-probabilities.

    Only each row's `_CANDIDATES` likeliest tokens are considered; a draft may approximate.
    """
    kept, ids = scores.topk(min(_CANDIDATES, scores.shape[1]))
    loud = kept + noise.gumbel(address, ids).to(kept.dtype)
    return torch.full_like(scores, -torch.inf).scatter_(1, ids, torch.log_softmax(loud, dim=-1))


def drawn_children(scores: Tensor, ends: Sequence[Branch], plan: Plan, address: int) -> list[tuple[int, Branch]]:
    """Children drawn without replacement (arXiv 2402.12374), from log-probabilities `[ends, vocab]`.

    How many each end gets is decided before any is drawn, by the odds of its path and of an n-th child: dropping a
    child because of its token would change the distribution of the text. Tokens drawn above may decide it: given these,
    children of a node change neither the chance that the text goes through it nor what follows.
    """
    found = []
    for i, (end, share) in enumerate(zip(ends, _shares(ends, plan), strict=True)):
        drawn = _drawn(scores[i], end, share, address)
        found += [(i, _child(end, order, token, q)) for order, (token, q) in enumerate(drawn)]
    return sorted(found, key=lambda child: -child[1].score)


def _drawn(scores: Tensor, end: Branch, share: int, address: int) -> list[tuple[int, Tensor]]:
    """Up to `share` tokens after `end`, each with the q `[vocab]` that it was drawn from, from `scores` `[vocab]`."""
    left, pairs, local = scores, list[tuple[Tensor, Tensor]](), device_reads.is_local(scores)
    for order in range(share):
        key = noise.key(address, len(end.tokens), *end.tokens, order)
        if local and not math.isfinite(float(left.max())):
            break
        token = torch.tensor([noise.draw(left, key)]) if local else noise.draws(left[None], [key]).to(left.device)
        pairs.append((token, torch.softmax(left, dim=-1)))
        left = left.scatter(0, token.clamp(min=0), -torch.inf)
    # One read for all; below 0: nothing was left to draw.
    tokens = torch.cat([token for token, _ in pairs]).tolist() if pairs else []
    count = next((i for i, token in enumerate(tokens) if token < 0), len(tokens))
    return [(token, q) for token, (_, q) in zip(tokens[:count], pairs, strict=False)]


def _child(end: Branch, order: int, token: int, q: Tensor) -> Branch:
    """The n-th child of `end`."""
    chance = _order_chance(order)
    return Branch([*end.tokens, token], end.score + math.log(chance), chance, [*end.chances, chance], q)


def _order_chance(order: int) -> float:
    """The chance of the n-th child before it is drawn: it is accepted, and the earlier ones are not."""
    return _ACCEPTED * (1.0 - _ACCEPTED) ** order


def _shares(ends: Sequence[Branch], plan: Plan) -> list[int]:
    """How many children every end gets, by the best odds."""
    most = plan.branches or 1
    odds = [
        (end.score + math.log(_order_chance(order)), i, order) for i, end in enumerate(ends) for order in range(most)
    ]
    shares = [0] * len(ends)
    for _, i, order in sorted(odds, key=lambda odd: -odd[0])[:most]:
        shares[i] += plan.keep([*ends[i].chances, _order_chance(order)])
    return shares
