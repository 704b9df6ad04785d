"""What all searches over beams share: candidates, hypotheses, log-probabilities, and the branches of a draft."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from specdec.core.budget import Budget
from specdec.core.drafts import Branch, Level, SequenceView
from specdec.core.strategies import View
from specdec.decoding.samplers import GreedySampler, texts_at
from specdec.decoding.strategies.base import StrategyBase, StrategySetup
from specdec.decoding.strategies.constraints import ConstraintProgress

EarlyStopping = bool | Literal["never", "exhaustive"]
FAR = -1e9
"""The score of a spare beam: all but one before the first token, and the continuation of a text that ended."""

LOOK = 2
"""By default, a level of a draft's tree has this many times as many branches as the search has beams."""


class Beam(NamedTuple):
    """A text: new tokens, sum of their processed log-probabilities, the beam that each continued.

    A text that ended, a hypothesis, has its score after the length penalty, and a finish `reason`.
    """

    tokens: tuple[int, ...] = ()
    score: float = 0.0
    origins: tuple[int, ...] = ()
    reason: str = ""

    def end(self, reason: str) -> Beam:
        """The text, ended for this reason."""
        return self._replace(reason=reason)


class Candidates(NamedTuple):
    """Continuations of live beams, in the order of choice: score, beam, token."""

    scores: list[float]
    parents: list[int]
    tokens: list[int]

    @classmethod
    def read(cls, scores: Tensor, parents: Tensor, tokens: Tensor) -> Candidates:
        """Candidates from tensors `[count]`."""
        return cls(scores.tolist(), parents.tolist(), tokens.tolist())

    def part(self, places: Sequence[int]) -> Candidates:
        """The candidates at `places`, in this order."""
        scores, parents, tokens = self
        return Candidates([scores[i] for i in places], [parents[i] for i in places], [tokens[i] for i in places])


@dataclass(frozen=True)
class BeamPool:
    """Beams that compete with one another, best first, and the hypotheses of texts that ended.

    `offset`: the number of the pool's first beam in the search. A pool that is `done` no longer takes part. `progress`:
    each beam's progress with its constraints.
    """

    live: tuple[Beam, ...]
    hypotheses: tuple[Beam, ...] = ()
    done: bool = False
    offset: int = 0
    progress: tuple[ConstraintProgress, ...] = ()

    @classmethod
    def of(cls, size: int, offset: int = 0, progress: ConstraintProgress | None = None) -> BeamPool:
        """A pool before its first token: one beam, and spare ones in case that it has too few continuations."""
        spare = Beam(score=FAR)
        return cls(
            (Beam(), *[spare] * (size - 1)), offset=offset, progress=() if progress is None else (progress,) * size
        )

    @property
    def sums(self) -> list[float]:
        return [beam.score for beam in self.live]

    def extend(self, candidates: Candidates, i: int) -> Beam:
        at = candidates.parents[i]
        parent = self.live[at]
        return Beam((*parent.tokens, candidates.tokens[i]), candidates.scores[i], (*parent.origins, self.offset + at))


@dataclass(frozen=True)
class Beams:
    """The state of a search: its pools in order, and `ids` `[beams of open pools, length]` if anything reads them."""

    pools: tuple[BeamPool, ...]
    finish: str | None = None
    ids: Tensor | None = None

    @property
    def live(self) -> tuple[Beam, ...]:
        """The live beams of all pools; a pool that is done keeps its last beams."""
        return tuple(beam for pool in self.pools for beam in pool.live)

    @property
    def finished(self) -> tuple[Beam, ...]:
        """The hypotheses of all pools, best first; of equal ones the later first."""
        return tuple(sorted((text for pool in self.pools for text in pool.hypotheses), key=lambda h: h.score)[::-1])

    @property
    def length(self) -> int:
        """How many tokens every live beam has generated."""
        return max(len(beam.tokens) for beam in self.live)

    @property
    def leaf_scores(self) -> list[float]:
        """The scores of the open pools' beams; before the first token they share one leaf."""
        return [score for pool in self.pools if not pool.done for score in pool.sums] if self.length else [0.0]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Scoring(StrategyBase):
    """Base of the searches over beams.

    A hypothesis's score: its sum of log-probabilities / (number of new tokens, end included) ** `length_penalty`.
    """

    num_beams: int
    max_new_tokens: int
    groups: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    is_search: ClassVar[bool] = True

    @classmethod
    def common(cls, setup: StrategySetup) -> dict[str, Any]:
        o = setup.options
        return {
            "num_beams": o.num_beams,
            "groups": o.num_beam_groups,
            "max_new_tokens": (setup.stop.max_length or 0) - (len(setup.prompt) - setup.padding),
            "length_penalty": 1.0 if o.length_penalty is None else o.length_penalty,
            "early_stopping": o.early_stopping or False,
            **setup.common,
        }

    @property
    def size(self) -> int:
        """The number of beams of a pool."""
        return self.num_beams // self.groups

    def begin(self) -> Beams:
        return Beams(tuple(BeamPool.of(self.size, group * self.size) for group in range(self.groups)))

    @property
    def sampler(self) -> SearchSampler:
        return SearchSampler(self.processors.drafting, branches=LOOK * self.num_beams, search=self)

    def expand(self, seq: SequenceView, ends: Sequence[Branch], logits: Tensor, budget: Budget) -> Level:
        """The search's step on a draft's logits (`Sampler.expand`)."""
        raise NotImplementedError

    def candidates(self, beams: int) -> int:
        """How many continuations to consider, so that `beams` go on even if the best ones end."""
        return max(2, 1 + len(self.stop.eos_ids)) * beams

    def ahead(self, budget: Budget) -> int:
        """How many branches a draft considers."""
        return budget.branches or self.sampler.branches

    def horizon(self, length: int) -> int:
        """The length at which a live beam of `length` tokens is judged."""
        return self.max_new_tokens if self.early_stopping == "never" and self.length_penalty > 0 else length

    def texts(self, seq: SequenceView, ids: Tensor | None) -> Tensor | None:
        """The beams' ids `[beams, length]` if anything reads them; before the first token, the prompt's."""
        if not (self.stop.reads_ids or self.processors.reads_ids):
            return None
        return ids if ids is not None else seq.prefix()[:, : seq.prompt_length].expand(self.num_beams, -1).clone()

    def logits(self, views: Sequence[View], beams: int) -> Tensor:
        """The target's logits `[beams, vocab]` float32; before the first token all beams share the prompt's."""
        return torch.stack([view.logits for view in views]).float().expand(beams, -1)

    def log_probs(self, views: Sequence[View], beams: int) -> Tensor:
        """Log-probabilities `[beams, vocab]` before processors, guided."""
        logits = self.logits(views, beams)
        unconditional = [view.unconditional for view in views if view.unconditional is not None]
        if not unconditional:
            return torch.log_softmax(logits, dim=-1)
        return self.guide(logits, torch.stack(unconditional))

    def draft_scores(self, seq: SequenceView, ends: Sequence[Branch], logits: Tensor) -> Tensor:
        """A draft's log-probabilities `[ends, vocab]` after pure processors; tokens that end a text are -inf."""
        drafting = self.processors.drafting
        scores = torch.log_softmax(logits.float(), dim=-1)
        if len(drafting):
            scores = drafting(texts_at(seq, ends) if drafting.reads_ids else None, scores)
        scores[:, list(self.stop.eos_ids)] = -torch.inf
        return scores


@dataclass(frozen=True)
class SearchSampler(GreedySampler):
    """Guesses branches by the `search`'s own steps, and one path after its best branch by the likeliest tokens."""

    search: Scoring = field(kw_only=True)

    def expand(self, seq: SequenceView, ends: Sequence[Branch], logits: Tensor, budget: Budget) -> Level:
        return self.search.expand(seq, ends, logits, budget)


def branches(candidates: Candidates, ends: Sequence[Branch]) -> Level:
    """Candidates as a draft's next level, best first."""
    finite = [
        (parent, Branch([*ends[parent].tokens, token], score, math.exp(min(score - ends[parent].score, 0.0))))
        for score, parent, token in zip(*candidates, strict=True)
        if math.isfinite(score)
    ]
    return sorted(finite, key=lambda branch: -branch[1].score)


def totals(scores: Tensor, sums: Sequence[float]) -> Tensor:
    """`scores` `[beams, vocab]` float32 plus every beam's sum so far."""
    return scores + torch.tensor(sums)[:, None]


def best_totals(total: Tensor, count: int) -> Candidates:
    """The `count` best entries of `total` `[beams, vocab]`."""
    top, places = total.flatten().topk(min(count, total.numel()))
    vocab = total.shape[1]
    return Candidates.read(top, places // vocab, places % vocab)


def extend_rows(ids: Tensor, parents: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """`[candidates, length + 1]`: the rows `parents` of `ids` `[beams, length]`, each followed by one of `tokens`."""
    return torch.cat((ids[list(parents)], torch.tensor(tokens)[:, None]), dim=1)
