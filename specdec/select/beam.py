"""Beam search: the likeliest few texts at once, token by token (semantics of transformers 5).

A step takes the best continuations of all live beams together, sets those that end apart as hypotheses, and goes on
with the best of the others. A draft only decides how many steps one target pass is enough for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.select import noise
from specdec.select.base import Processing, guide
from specdec.select.rules import GreedyRule, fit
from specdec.select.stopping import Stopping
from specdec.types import Branch, Move, Row, Seen, Step

EarlyStopping = bool | Literal["never", "exhaustive"]
LOOK = 2
_FAR = np.float32(-1e9)


class Hypothesis(NamedTuple):
    """A text that ended: its new tokens, its score after the length penalty, the beam of every step, and why."""

    tokens: tuple[int, ...]
    score: float
    origins: tuple[int, ...]
    reason: str


class Beam(NamedTuple):
    """A live text: its new tokens, the sum of their processed log-probabilities, the beam that each continued."""

    tokens: tuple[int, ...] = ()
    score: float = 0.0
    origins: tuple[int, ...] = ()


@dataclass(frozen=True)
class Beams:
    """Where a search stands: live beams and finished hypotheses, both best first.

    `open` is False once no live beam is expected to beat the worst hypothesis. `ids` `[beams, length]` are kept where
    processors or criteria read them.
    """

    live: tuple[Beam, ...] = (Beam(),)
    finished: tuple[Hypothesis, ...] = ()
    open: bool = True
    finish: str | None = None
    ids: Tensor | None = None

    @property
    def length(self) -> int:
        """How many tokens every live beam has generated."""
        return len(self.live[0].tokens)

    @property
    def leaf_scores(self) -> list[float]:
        """The live beams' scores."""
        return [beam.score for beam in self.live]


class Candidates(NamedTuple):
    """Continuations of live beams, in the order in which they were chosen: score, beam, token."""

    scores: list[float]
    parents: list[int]
    tokens: list[int]


@dataclass(frozen=True, kw_only=True)
class BeamSearch:
    """Beam search, and with a `seed` beam sample: continuations are then drawn without replacement.

    A hypothesis is scored by its sum of log-probabilities over (generated tokens, end included) ** `length_penalty`.
    `early_stopping`: False stops when the best live beam at its present length cannot beat the worst hypothesis,
    "never" looks at the longest length instead, True stops once there are `num_beams` hypotheses, "exhaustive" goes on
    to the end. The draw of a candidate is addressed by (seed, step, beam, token), so it is the same with any draft.
    """

    processors: Processing
    stop: Stopping
    num_beams: int
    max_new_tokens: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    seed: int | None = None
    width: int | None = None
    guidance_scale: float | None = None
    keep_scores: bool = False
    keep_logits: bool = False

    @property
    def rule(self) -> GreedyRule:
        """What a draft that only knows sequences guesses after the best beam."""
        return GreedyRule(self.processors.drafting, self.width)

    @property
    def candidates(self) -> int:
        """So many continuations are looked at, that beams go on even if the best all end."""
        return max(2, 1 + len(self.stop.eos_ids)) * self.num_beams

    def begin(self) -> Beams:
        """The state before the first token."""
        return Beams()

    def advance(self, row: Row, state: Beams, seen: Sequence[Seen]) -> Move:
        """One step from the target's logits at all live beams."""
        ids = self._ids(row, state)
        scores = self._scores(ids, seen)
        found = self._choose(state, scores, seen)
        extended = None if ids is None else _extended(ids, found)
        ends = self.stop.each(found.tokens, row.prompt_length + state.length + 1, extended, None)
        after, chosen = self._after(state, found, ends)
        if extended is not None:
            after = replace(after, ids=extended[chosen])
        step = Step(
            found.tokens[chosen[0]],
            -1,
            torch.stack([s.logits for s in seen]).to(torch.float32, copy=True) if self.keep_logits else None,
            scores.clone() if self.keep_scores and scores is not None else None,
        )
        return Move(after, [found.parents[i] for i in chosen], [found.tokens[i] for i in chosen], step)

    def spread(self, row: Row, ends: Sequence[Branch], logits: Tensor) -> list[tuple[int, Branch]]:
        """The draft's own beams: twice as many as the target's, of texts that go on."""
        drafting = self.processors.drafting
        scores = torch.log_softmax(fit(logits, self.width).float(), dim=-1)
        if len(drafting):
            scores = drafting(_texts(row, ends) if drafting.reads_ids else None, scores)
        scores[:, list(self.stop.eos_ids)] = -torch.inf
        running = [end.score for end in ends]
        if self.seed is None:
            found = best_of(scores, running, LOOK * self.num_beams)
        else:
            length = len(row.tokens) + len(ends[0].tokens) - row.prompt_length
            found = drawn(scores, running, self.candidates, noise.key(self.seed, noise.BEAMS, length))
        branches = [
            (parent, Branch([*ends[parent].tokens, token], score, math.exp(score - running[parent])))
            for score, parent, token in zip(*found, strict=True)
            if math.isfinite(score)
        ]
        return sorted(branches, key=lambda branch: -branch[1].score)[: LOOK * self.num_beams]

    def _ids(self, row: Row, state: Beams) -> Tensor | None:
        if not (self.stop.reads_ids or (len(self.processors) and self.processors.reads_ids)):
            return None
        return state.ids if state.ids is not None else row.prefix()[:, : row.prompt_length].clone()

    def _scores(self, ids: Tensor | None, seen: Sequence[Seen]) -> Tensor | None:
        """Processed log-probabilities `[beams, vocab]`; None where the logits themselves will do."""
        guided = seen[0].unconditional is not None and self.guidance_scale is not None
        if not (len(self.processors) or guided or self.keep_scores or self.seed is not None):
            return None
        logits = torch.stack([s.logits for s in seen]).float()
        if guided:
            unconditional = torch.stack([s.unconditional for s in seen if s.unconditional is not None])
            scores = guide(logits, unconditional, self.guidance_scale or 1.0)
        else:
            scores = torch.log_softmax(logits, dim=-1)
        return self.processors(ids, scores) if len(self.processors) else scores

    def _choose(self, state: Beams, scores: Tensor | None, seen: Sequence[Seen]) -> Candidates:
        running = state.leaf_scores
        if scores is None:
            return best(torch.stack([s.logits for s in seen]).float(), running, self.candidates)
        if self.seed is None:
            return best_of(scores, running, self.candidates)
        return drawn(scores, running, self.candidates, noise.key(self.seed, noise.BEAMS, state.length))

    def _after(self, state: Beams, found: Candidates, ends: list[str | None]) -> tuple[Beams, list[int]]:
        """The next state, and which candidates are its live beams."""
        beams, length = self.num_beams, state.length + 1
        running = [
            float(np.float32(score) + (_FAR if end else np.float32(0)))
            for score, end in zip(found.scores, ends, strict=True)
        ]
        chosen = sorted(range(len(running)), key=lambda i: -running[i])[:beams]
        live = tuple(self._extend(state.live, found, i, running[i]) for i in chosen)
        finished = state.finished
        full = len(finished) == beams
        if state.open and not (full and self.early_stopping is True):
            ended = [self._hypothesis(state, found, i, end) for i, end in enumerate(ends[:beams]) if end is not None]
            finished = tuple(sorted([*finished, *ended], key=lambda h: -h.score)[:beams])
        full = len(finished) == beams
        open_ = state.open and (not full or self._may_improve(live[0].score, finished[-1].score, length))
        over = not open_ or (full and self.early_stopping is True) or None not in ends
        finish = (finished[0].reason if finished else "length") if over else None
        return replace(state, live=live, finished=finished, open=open_, finish=finish), chosen

    def _may_improve(self, best: float, worst: float, length: int) -> bool:
        if self.early_stopping == "exhaustive":
            return True
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.max_new_tokens
        return self._penalised(best, length) > worst

    def _penalised(self, score: float, length: int) -> float:
        return float(np.float32(score) / np.float32(length**self.length_penalty))

    def _extend(self, live: Sequence[Beam], found: Candidates, i: int, score: float) -> Beam:
        parent = live[found.parents[i]]
        return Beam((*parent.tokens, found.tokens[i]), score, (*parent.origins, found.parents[i]))

    def _hypothesis(self, state: Beams, found: Candidates, i: int, reason: str) -> Hypothesis:
        beam = self._extend(state.live, found, i, found.scores[i])
        return Hypothesis(beam.tokens, self._penalised(beam.score, len(beam.tokens)), beam.origins, reason)


def best(logits: Tensor, running: Sequence[float], count: int) -> Candidates:
    """The `count` best continuations by `log_softmax(logits) + running`, `logits` `[beams, vocab]` float32.

    Only the best of every beam are normalised, from one logsumexp each.
    """
    values, ids = logits.topk(min(count, logits.shape[-1]), dim=-1)
    values = values - logits.logsumexp(-1, keepdim=True) + torch.tensor(running, device=logits.device)[:, None]
    top, places = values.flatten().topk(min(count, values.numel()))
    per_beam = values.shape[1]
    return Candidates(top.tolist(), (places // per_beam).tolist(), ids.flatten()[places].tolist())


def best_of(scores: Tensor, running: Sequence[float], count: int) -> Candidates:
    """The `count` best by `scores + running`, `scores` `[beams, vocab]` float32."""
    total = (scores + torch.tensor(running, device=scores.device)[:, None]).flatten()
    top, places = total.topk(min(count, total.numel()))
    vocab = scores.shape[1]
    return Candidates(top.tolist(), (places // vocab).tolist(), (places % vocab).tolist())


def drawn(scores: Tensor, running: Sequence[float], count: int, address: int) -> Candidates:
    """`count` draws without replacement from `softmax(scores + running)`, in the order drawn (Gumbel-top-k)."""
    total = scores + torch.tensor(running, device=scores.device)[:, None]
    beams, tokens = torch.isfinite(total).nonzero(as_tuple=True)
    finite = total[beams, tokens]
    noisy = finite.double()
    for beam in range(len(running)):
        own = beams == beam
        noisy[own] += noise.gumbel(noise.fold(address, beam), tokens[own])
    places = noisy.topk(min(count, len(noisy))).indices
    return Candidates(finite[places].tolist(), beams[places].tolist(), tokens[places].tolist())


def _texts(row: Row, ends: Sequence[Branch]) -> Tensor:
    """The texts of all `ends` `[ends, length]`."""
    tails = torch.tensor([end.tokens for end in ends], dtype=torch.long)
    text = row.prefix().expand(len(ends), -1)
    return torch.cat((text, tails.to(text.device)), dim=1)


def _extended(ids: Tensor, found: Candidates) -> Tensor:
    """The texts of all candidates `[candidates, length + 1]`."""
    return torch.cat((ids[found.parents], torch.tensor(found.tokens, device=ids.device)[:, None]), dim=1)
