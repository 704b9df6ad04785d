"""Draft rules: how draft logits become a guess that tends to agree with the target's strategy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.logits import host
from specdec.select import noise
from specdec.select.base import Processing, process
from specdec.select.branching import drawn_children, likeliest_children, noisy
from specdec.types import Branch, Plan, Row


def generated(row: Row) -> int:
    """How many tokens the row has generated so far."""
    return len(row.tokens) - row.prompt_length


def fit(logits: Tensor, width: int | None) -> Tensor:
    """`logits` `[vocab]` cropped, or padded with -inf, to the target's `width`: padded vocabularies differ in size."""
    have = logits.shape[-1]
    if width is None or have == width:
        return logits
    if have > width:
        return logits[..., :width]
    return torch.nn.functional.pad(logits, (0, width - have), value=float("-inf"))


def process_all(processors: Processing, row: Row, ends: Sequence[Branch], logits: Tensor) -> Tensor:
    """Processed `logits` `[ends, vocab]` after the row's text and each of `ends`, float32."""
    if not len(processors):
        return logits.float()
    if not processors.reads_ids:
        return processors(None, logits)
    each = [process(processors, row, end.tokens, one) for end, one in zip(ends, logits, strict=True)]
    return torch.stack(each)


def confidence(logits: Tensor, token: int) -> float:
    """The probability of `token` under `softmax(logits)`, `logits` `[vocab]` float32."""
    return float(torch.exp(logits[token] - logits.logsumexp(-1)))


def likeliest(scores: Tensor, *, confident: bool = True) -> tuple[int, float]:
    """The first of the likeliest tokens of `scores` `[vocab]` float32, and its probability, as `DraftRule.pick` says.

    A probability of NaN stands for scores that hold one, or that are infinite.
    """
    if host.is_local(scores):  # numpy's calls cost a tenth of torch's on one row
        values = scores.detach().numpy()
        token = int(values.argmax())
        if not (confident and math.isfinite(values[token])):
            return token, _told(values[token])
        return token, float(1.0 / np.exp(values - values[token]).sum())
    best = scores.max(dim=-1)
    prob = torch.exp(best.values - scores.logsumexp(-1)) if confident else best.values
    [number], [sure] = host.read(best.indices[None], prob[None])
    return int(number), sure if confident else _told(sure)


def drawn(scores: Tensor, address: int, *, confident: bool = True) -> tuple[int, float]:
    """The draw from `scores` `[vocab]` float32 at `address`, and its probability, as `likeliest` tells it."""
    if host.is_local(scores):
        if not math.isfinite(float(scores.detach().numpy().max())):
            return 0, math.nan
        token = noise.draw(scores, address)
        return token, confidence(scores, token) if confident else 1.0
    token_ = noise.draws(scores[None], [address])
    chosen = scores.gather(-1, token_.to(scores.device).clamp(min=0))
    prob = torch.exp(chosen - scores.logsumexp(-1)) if confident else chosen
    [number], [sure], [top] = host.read(token_.to(scores.device), prob, scores.max()[None])
    if not math.isfinite(top):
        return 0, math.nan
    return int(number), sure if confident else 1.0


def _told(value: float) -> float:
    """The probability that is told of a guess where nobody asks for it: NaN where there is none."""
    return 1.0 if math.isfinite(value) else math.nan


@dataclass(frozen=True)
class GreedyRule:
    """Guesses the likeliest token."""

    processors: Processing
    width: int | None = None
    needs_q: bool = False

    def pick(
        self, row: Row, guesses: list[int], logits: Tensor, *, confident: bool = True
    ) -> tuple[int, float, Tensor | None]:
        """The argmax of draft `logits` `[vocab]` after `guesses`, its probability, and no q."""
        scores = process(self.processors, row, guesses, fit(logits, self.width))
        token, prob = likeliest(scores, confident=confident)
        return token, prob, None

    def expand(self, row: Row, ends: Sequence[Branch], logits: Tensor, plan: Plan) -> list[tuple[int, Branch]]:
        """The likeliest continuations of `ends`, from draft `logits` `[ends, vocab]`."""
        scores = torch.log_softmax(process_all(self.processors, row, ends, fit(logits, self.width)), dim=-1)
        return likeliest_children(scores, ends, plan)


@dataclass(frozen=True)
class CoupledRule:
    """Guesses with the very noise the target will use: `argmax(log q + G)` (arXiv 2408.07978)."""

    processors: Processing
    seed: int
    width: int | None = None
    needs_q: bool = False

    def pick(
        self, row: Row, guesses: list[int], logits: Tensor, *, confident: bool = True
    ) -> tuple[int, float, Tensor | None]:
        """The coupled draw from draft `logits` `[vocab]` after `guesses`, its probability, and no q."""
        scores = process(self.processors, row, guesses, fit(logits, self.width))
        address = noise.key(self.seed, noise.COUPLED, generated(row) + len(guesses))
        return *drawn(scores, address, confident=confident), None

    def expand(self, row: Row, ends: Sequence[Branch], logits: Tensor, plan: Plan) -> list[tuple[int, Branch]]:
        """The continuations of `ends` that the target's own noise favours, from draft `logits` `[ends, vocab]`."""
        scores = process_all(self.processors, row, ends, fit(logits, self.width))
        place = generated(row) + len(ends[0].tokens)
        return likeliest_children(noisy(scores, noise.key(self.seed, noise.COUPLED, place)), ends, plan)


@dataclass(frozen=True)
class SampledRule:
    """Draws from q with its own stream, and tells q."""

    processors: Processing
    seed: int
    width: int | None = None
    needs_q: bool = True

    def pick(
        self, row: Row, guesses: list[int], logits: Tensor, *, confident: bool = True
    ) -> tuple[int, float, Tensor | None]:
        """A draw from draft `logits` `[vocab]` after `guesses`, its probability, and q `[width]` float32."""
        scores = process(self.processors, row, guesses, fit(logits, self.width))
        token, prob = drawn(
            scores, noise.key(self.seed, noise.DRAFT, generated(row), len(guesses)), confident=confident
        )
        return token, prob, None if math.isnan(prob) else torch.softmax(scores, dim=-1)

    def expand(self, row: Row, ends: Sequence[Branch], logits: Tensor, plan: Plan) -> list[tuple[int, Branch]]:
        """Draws from q after every one of `ends`, without replacement, from draft `logits` `[ends, vocab]`."""
        scores = process_all(self.processors, row, ends, fit(logits, self.width))
        return drawn_children(scores, ends, plan, noise.key(self.seed, noise.DRAFT, generated(row)))
