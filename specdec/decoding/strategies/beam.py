"""Beam search: the likeliest few texts at once, token by token (semantics of transformers 5).

A step takes the best continuations of all live beams together, keeps those that end as hypotheses, and goes on with
the best of the others. A draft only decides how many steps one target pass allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from specdec.core.budget import Budget
from specdec.core.drafts import Branch, Level, SequenceView
from specdec.core.strategies import Advance, View
from specdec.core.tree import Step
from specdec.decoding import noise
from specdec.decoding.strategies.base import StrategySetup
from specdec.decoding.strategies.beam_scoring import (
    FAR,
    Beams,
    Candidates,
    Scoring,
    best_totals,
    branches,
    extend_rows,
    totals,
)
from specdec.errors import OptionError
from specdec.options.generate import Options


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BeamSearch(Scoring):
    """Beam search, and with a `seed` beam sample: continuations are then drawn without replacement.

    `early_stopping`: False stops when the best live beam at its present length cannot beat the worst hypothesis,
    "never" looks at the longest length instead, True stops once there are `num_beams` hypotheses, "exhaustive" goes on
    to the end. The draw of a candidate is addressed by (seed, step, beam, token), so it is the same with any draft.
    """

    seed: int | None = None
    name: ClassVar[str] = "beamsearch"

    @classmethod
    def serves(cls, options: Options) -> bool:
        return options.num_beams > 1

    @classmethod
    def of(cls, setup: StrategySetup) -> BeamSearch:
        return cls(seed=setup.seed if setup.options.samples else None, **cls.common(setup))

    def advance(self, seq: SequenceView, state: Beams, views: Sequence[View], steps: Sequence[Step]) -> Advance:
        ids = self.texts(seq, state.ids)
        scores = self.processors(ids, self.log_probs(views, self.num_beams))
        candidates = self._choose(state, scores)
        texts = None if ids is None else extend_rows(ids, candidates.parents, candidates.tokens)
        ends = self.stop.each(candidates.tokens, seq.prompt_length + state.length + 1, texts, None)
        after, places = self._after(state, candidates, ends)
        if texts is not None:
            after = replace(after, ids=texts[places])
        logits = self.logits(views, len(views)) if self.keep_logits else None
        step = Step(candidates.tokens[places[0]], logits, scores.clone() if self.keep_scores else None)
        leaves = [candidates.parents[i] if state.length else 0 for i in places]
        return Advance(after, leaves, [candidates.tokens[i] for i in places], step, after.finish)

    def expand(self, seq: SequenceView, ends: Sequence[Branch], logits: Tensor, budget: Budget) -> Level:
        """The draft's beams: by default twice as many as the target's, without ended texts."""
        ahead = self.ahead(budget)
        scores = self.draft_scores(seq, ends, logits)
        sums = [end.score for end in ends]
        if self.seed is None:
            candidates = best_totals(totals(scores, sums), ahead)
        else:
            length = len(seq.tokens) + len(ends[0].tokens) - seq.prompt_length
            count = self.candidates(self.num_beams)
            candidates = draw_candidates(scores, sums, count, noise.key(self.seed, noise.BEAMS, length))
        return branches(candidates, ends)[:ahead]

    def _choose(self, state: Beams, scores: Tensor) -> Candidates:
        """The next continuations, from processed log-probabilities `[beams, vocab]`."""
        sums, count = state.pools[0].sums, self.candidates(self.num_beams)
        if self.seed is None:
            return best_totals(totals(scores, sums), count)
        candidates = draw_candidates(scores, sums, count, noise.key(self.seed, noise.BEAMS, state.length))
        if not candidates.tokens:
            raise OptionError(noise.NONE_LEFT)
        return candidates

    def _after(self, state: Beams, candidates: Candidates, ends: list[str | None]) -> tuple[Beams, list[int]]:
        """The next state, and the candidates that are its live beams."""
        [pool], beams, length = state.pools, self.num_beams, state.length + 1
        sums = [
            float(np.float32(score) + np.float32(FAR if end else 0))
            for score, end in zip(candidates.scores, ends, strict=True)
        ]
        places = sorted(range(len(sums)), key=lambda i: -sums[i])[:beams]
        live = tuple(pool.extend(candidates, i)._replace(score=sums[i]) for i in places)
        hypotheses = list(state.finished)
        for i, end in enumerate(ends[:beams]):
            if end is not None:
                beam = pool.extend(candidates, i)
                hypotheses.append(beam._replace(score=self._penalize(beam.score, length), reason=end))
        hypotheses = sorted(hypotheses, key=lambda h: -h.score)[:beams]
        full = len(hypotheses) == beams
        is_judged = full and self.early_stopping != "exhaustive"
        best = self._penalize(live[0].score, self.horizon(length))
        done = is_judged and not best > hypotheses[-1].score
        over = done or (full and self.early_stopping is True) or None not in ends
        finish = hypotheses[0].reason if over else None
        return Beams((replace(pool, live=live, hypotheses=tuple(hypotheses[::-1]), done=done),), finish), places

    @np.errstate(divide="ignore", over="ignore")  # extreme penalties, as in transformers
    def _penalize(self, score: float, length: int) -> float:
        return float(np.float32(score) / np.float32(length**self.length_penalty))


def draw_candidates(scores: Tensor, sums: Sequence[float], count: int, address: int) -> Candidates:
    """`count` draws without replacement from `softmax(scores + sums)`, first to last (Gumbel-top-k)."""
    total = totals(scores, sums)
    ids = torch.arange(total.shape[1])[torch.isfinite(total).any(0)]  # noise only for what processors left
    total = total[:, ids]
    noisy = total + torch.stack([noise.gumbel(noise.fold(address, beam), ids) for beam in range(len(total))])
    noisy = noisy.masked_fill(~torch.isfinite(total), -torch.inf).flatten()
    places = noisy.topk(min(count, len(noisy))).indices
    candidates = Candidates.read(total.flatten()[places], places // len(ids), ids[places % len(ids)])
    return candidates.part(range(sum(map(math.isfinite, candidates.scores))))
