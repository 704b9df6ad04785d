"""Draft rules: how draft logits become a guess that tends to agree with the target's strategy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
    each = [process(processors, row, end.tokens, one) for end, one in zip(ends, logits, strict=True)]
    return torch.stack(each)


def confidence(logits: Tensor, token: int) -> float:
    """The probability of `token` under `softmax(logits)`, `logits` `[vocab]` float32."""
    return float(torch.exp(logits[token] - logits.logsumexp(-1)))


def likeliest(scores: Tensor) -> tuple[int, float]:
    """The first of the likeliest tokens of `scores` `[vocab]` float32, and its probability; NaN where they hold one."""
    if scores.device.type == "cpu":  # numpy's calls cost a tenth of torch's on one row
        values = scores.numpy()
        token = int(values.argmax())
        return token, float(1.0 / np.exp(values - values[token]).sum())
    best = scores.max(dim=-1)
    # One transfer for both numbers; float64 holds any token id exactly.
    prob = torch.exp(best.values - scores.logsumexp(-1))
    token, prob = torch.stack((best.indices.double(), prob.double())).tolist()
    return int(token), prob


NOTHING = (0, math.nan, None)
"""The guess of a draft whose logits hold a NaN, as after an overflow: there is none."""


@dataclass(frozen=True)
class GreedyRule:
    """Guesses the likeliest token."""

    processors: Processing
    width: int | None = None
    needs_q: bool = False

    def pick(self, row: Row, guesses: list[int], logits: Tensor) -> tuple[int, float, Tensor | None]:
        """The argmax of draft `logits` `[vocab]` after `guesses`, its probability, and no q."""
        scores = process(self.processors, row, guesses, fit(logits, self.width))
        token, prob = likeliest(scores)
        return token, prob, None

    def spread(self, row: Row, ends: Sequence[Branch], logits: Tensor, plan: Plan) -> list[tuple[int, Branch]]:
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

    def pick(self, row: Row, guesses: list[int], logits: Tensor) -> tuple[int, float, Tensor | None]:
        """The coupled draw from draft `logits` `[vocab]` after `guesses`, its probability, and no q."""
        scores = process(self.processors, row, guesses, fit(logits, self.width))
        if not math.isfinite(float(scores.max())):
            return NOTHING
        token = noise.draw(scores, noise.key(self.seed, noise.COUPLED, generated(row) + len(guesses)))
        return token, confidence(scores, token), None

    def spread(self, row: Row, ends: Sequence[Branch], logits: Tensor, plan: Plan) -> list[tuple[int, Branch]]:
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

    def pick(self, row: Row, guesses: list[int], logits: Tensor) -> tuple[int, float, Tensor | None]:
        """A draw from draft `logits` `[vocab]` after `guesses`, its probability, and q `[width]` float32."""
        scores = process(self.processors, row, guesses, fit(logits, self.width))
        if not math.isfinite(float(scores.max())):
            return NOTHING
        token = noise.draw(scores, noise.key(self.seed, noise.DRAFT, generated(row), len(guesses)))
        q = torch.softmax(scores, dim=-1)
        return token, float(q[token]), q

    def spread(self, row: Row, ends: Sequence[Branch], logits: Tensor, plan: Plan) -> list[tuple[int, Branch]]:
        """Draws from q after every one of `ends`, without replacement, from draft `logits` `[ends, vocab]`."""
        scores = process_all(self.processors, row, ends, fit(logits, self.width))
        return drawn_children(scores, ends, plan, noise.key(self.seed, noise.DRAFT, generated(row)))


@dataclass(frozen=True)
class PerRow:
    """Every row's own rule, of either kind, found by the row's key; a search looks ahead by itself."""

    rules: Mapping[int, Any]

    @property
    def needs_q(self) -> bool:
        """Whether any row's strategy looks at q."""
        return any(rule.needs_q for rule in self.rules.values())

    def pick(self, row: Row, guesses: list[int], logits: Tensor) -> tuple[int, float, Tensor | None]:
        """What the rule of `row` picks."""
        picked: tuple[int, float, Tensor | None] = self.rules[row.key].pick(row, guesses, logits)
        return picked

    def spread(self, row: Row, ends: Sequence[Branch], logits: Tensor, plan: Plan) -> list[tuple[int, Branch]]:
        """What the rule of `row` would look at next."""
        found: list[tuple[int, Branch]] = self.rules[row.key].spread(row, ends, logits, plan)
        return found
