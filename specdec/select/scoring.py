"""What all searches over beams share: candidates and hypotheses, the beams' log-probabilities, a draft's look ahead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.logits import host
from specdec.select.base import Processing, RowSetup, guide
from specdec.select.rules import GreedyRule, fit
from specdec.select.stopping import Stopping
from specdec.types import Branch, BranchRule, NodeOutput, Plan, Row, Scores

EarlyStopping = bool | Literal["never", "exhaustive"]
FAR = -1e9
"""What makes a beam a spare one: before the first token, all but one are, and after an end its continuation."""

LOOK = 2
"""A draft's level has by default so many times as many branches as the search has beams."""


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


def first_beams(count: int) -> tuple[Beam, ...]:
    """The beams before the first token: one, and spare ones that count where it has too few continuations."""
    return (Beam(), *(Beam(score=FAR) for _ in range(count - 1)))


class Candidates(NamedTuple):
    """Continuations of live beams, in the order in which they were chosen: score, beam, token."""

    scores: list[float]
    parents: list[int]
    tokens: list[int]

    @classmethod
    def read(cls, scores: Tensor, parents: Tensor, tokens: Tensor) -> Candidates:
        """Candidates that were found where the logits are, all `[count]`."""
        values, beams, ids = host.read(scores, parents, tokens)
        return cls(values, host.whole(beams), host.whole(ids))

    def extend(self, live: Sequence[Beam], i: int, offset: int = 0) -> Beam:
        """Candidate `i` as a beam; `offset` is the number of the first live one."""
        parent = live[self.parents[i]]
        return Beam((*parent.tokens, self.tokens[i]), self.scores[i], (*parent.origins, offset + self.parents[i]))


LeafCandidates = tuple[NDArray[np.float32], list[int]]
"""The best tokens after one leaf: their log-probabilities, best first, and their ids."""


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Base of the searches over beams.

    A hypothesis is scored by its sum of log-probabilities over (generated tokens, end included) ** `length_penalty`.
    """

    processors: Processing
    stop: Stopping
    num_beams: int
    max_new_tokens: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    width: int | None = None
    guidance_scale: float | None = None
    keep_scores: bool = False
    keep_logits: bool = False
    name: ClassVar[str]
    is_search: ClassVar[Literal[True]] = True
    needs_hidden: ClassVar[bool] = False
    takes_draft: ClassVar[bool] = True

    @classmethod
    def parts(cls, setup: RowSetup) -> dict[str, Any]:
        """The arguments that all searches over beams have in common."""
        o = setup.options
        return {
            "processors": setup.processors,
            "stop": setup.stop,
            "num_beams": o.beams,
            "max_new_tokens": setup.max_new_tokens,
            "length_penalty": 1.0 if o.length_penalty is None else o.length_penalty,
            "early_stopping": o.early_stopping or False,
            "width": setup.width,
            **setup.common,
        }

    @property
    def rule(self) -> GreedyRule:
        """What a draft that only knows sequences guesses after the best beam."""
        return GreedyRule(self.processors.drafting, self.width)

    @property
    def branching(self) -> BranchRule:
        """A draft with branches runs the search's own steps."""
        search: Any = self
        return search

    def candidates(self, beams: int) -> int:
        """So many continuations are looked at, that `beams` go on even if the best all end."""
        return max(2, 1 + len(self.stop.eos_ids)) * beams

    def ahead(self, plan: Plan) -> int:
        """How many branches a draft looks at."""
        return plan.branches or LOOK * self.num_beams

    def horizon(self, length: int) -> int:
        """The length at which a live beam of `length` tokens is judged."""
        return self.max_new_tokens if self.early_stopping == "never" and self.length_penalty > 0 else length

    def texts(self, row: Row, ids: Tensor | None) -> Tensor | None:
        """The beams' ids `[beams, length]`, where anything reads them; before the first token they are the prompt."""
        if not (self.stop.reads_ids or (len(self.processors) and self.processors.reads_ids)):
            return None
        return ids if ids is not None else row.prefix()[:, : row.prompt_length].expand(self.num_beams, -1).clone()

    def logits(self, outputs: Sequence[NodeOutput], beams: int) -> Tensor:
        """The target's own `[beams, vocab]` float32; before the first token all beams have the prompt's."""
        return torch.stack([output.logits for output in outputs]).float().expand(beams, -1)

    def guides(self, outputs: Sequence[NodeOutput]) -> bool:
        """Whether an unconditional row's logits belong into the scores."""
        return outputs[0].unconditional is not None and self.guidance_scale is not None

    def log_probs(self, outputs: Sequence[NodeOutput], beams: int) -> Tensor:
        """Log-probabilities `[beams, vocab]` before processors, guided."""
        logits = self.logits(outputs, beams)
        if not self.guides(outputs):
            return torch.log_softmax(logits, dim=-1)
        unconditional = torch.stack([output.unconditional for output in outputs if output.unconditional is not None])
        return guide(logits, unconditional, self.guidance_scale or 1.0)

    def leading(self, outputs: Sequence[NodeOutput], count: int) -> list[LeafCandidates] | None:
        """The `count` best tokens of every leaf, read once for all nodes of a target pass.

        None where values are looked at for nothing, and where they depend on the texts that led to the leaves.
        """
        wholes = [output.whole for output in outputs]
        reads = len(self.processors) and self.processors.reads_ids
        if reads or any(whole is None or host.is_local(whole.logits) for whole in wholes):
            return None
        found = [self._read(whole, count) for whole in wholes if whole is not None]
        return [leaves[output.at] for leaves, output in zip(found, outputs, strict=True)]

    def _read(self, whole: Scores, count: int) -> list[LeafCandidates]:
        if "leading" not in whole.cache:
            values, ids = self._leading(whole, min(count, whole.logits.shape[-1]))
            flat, numbers = host.read(values.flatten(), ids.flatten())
            size = values.shape[1]
            whole.cache["leading"] = [
                (np.array(flat[i : i + size], dtype=np.float32), host.whole(numbers[i : i + size]))
                for i in range(0, len(flat), size)
            ]
        leaves: list[LeafCandidates] = whole.cache["leading"]
        return leaves

    def _leading(self, whole: Scores, count: int) -> tuple[Tensor, Tensor]:
        logits = whole.logits.float()
        guides = whole.unconditional is not None and self.guidance_scale is not None
        if not (len(self.processors) or guides):
            values, ids = logits.topk(count, dim=-1)
            return values - logits.logsumexp(-1, keepdim=True), ids
        if whole.unconditional is not None and self.guidance_scale is not None:
            scores = guide(logits, whole.unconditional, self.guidance_scale)
        else:
            scores = torch.log_softmax(logits, dim=-1)
        values, ids = self.processors(None, scores).topk(count, dim=-1)
        return values, ids

    def draft_scores(self, row: Row, ends: Sequence[Branch], logits: Tensor) -> Tensor:
        """A draft's log-probabilities `[ends, vocab]` of texts that go on, after the processors that may see them."""
        drafting = self.processors.drafting
        scores = torch.log_softmax(fit(logits, self.width).float(), dim=-1)
        if len(drafting):
            scores = drafting(_texts(row, ends) if drafting.reads_ids else None, scores)
        scores[:, list(self.stop.eos_ids)] = -torch.inf
        return scores


def best_of_leaves(leaves: Sequence[LeafCandidates], running: Sequence[float], count: int) -> Candidates:
    """The `count` best continuations of beams with these sums so far, the first of equals; one leaf may serve all."""
    own = [leaves[i if len(leaves) > 1 else 0] for i in range(len(running))]
    total = np.stack([values + np.float32(score) for (values, _), score in zip(own, running, strict=True)])
    places = np.argsort(-total, axis=None, kind="stable")[:count].tolist()
    pairs = [divmod(place, total.shape[1]) for place in places]
    tokens = [own[beam][1][rank] for beam, rank in pairs]
    return Candidates([float(total[pair]) for pair in pairs], [beam for beam, _ in pairs], tokens)


def branches(found: Candidates, ends: Sequence[Branch]) -> list[tuple[int, Branch]]:
    """What was found as a draft's next level, best first."""
    finite = [
        (parent, Branch([*ends[parent].tokens, token], score, math.exp(min(score - ends[parent].score, 0.0))))
        for score, parent, token in zip(*found, strict=True)
        if math.isfinite(score)
    ]
    return sorted(finite, key=lambda branch: -branch[1].score)


def best(logits: Tensor, running: Sequence[float], count: int) -> Candidates:
    """The `count` best continuations by `log_softmax(logits) + running`, `logits` `[beams, vocab]` float32.

    Only the best of every beam are normalised, from one logsumexp each.
    """
    values, ids = logits.topk(min(count, logits.shape[-1]), dim=-1)
    values = values - logits.logsumexp(-1, keepdim=True) + torch.tensor(running, device=logits.device)[:, None]
    top, places = values.flatten().topk(min(count, values.numel()))
    per_beam = values.shape[1]
    return Candidates.read(top, places // per_beam, ids.flatten()[places])


def best_of(scores: Tensor, running: Sequence[float], count: int) -> Candidates:
    """The `count` best by `scores + running`, `scores` `[beams, vocab]` float32."""
    return best_totals(totals(scores, running), count)


def totals(scores: Tensor, running: Sequence[float]) -> Tensor:
    """`scores` `[beams, vocab]` float32 with every beam's sum so far."""
    return scores + torch.tensor(running, device=scores.device)[:, None]


def best_totals(total: Tensor, count: int) -> Candidates:
    """The `count` best entries of `total` `[beams, vocab]`."""
    top, places = total.flatten().topk(min(count, total.numel()))
    vocab = total.shape[1]
    return Candidates.read(top, places // vocab, places % vocab)


def extended(ids: Tensor, parents: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """`ids` `[beams, length]` of `parents`, each with one of `tokens` behind `[candidates, length + 1]`."""
    return torch.cat((ids[list(parents)], torch.tensor(tokens, device=ids.device)[:, None]), dim=1)


def _texts(row: Row, ends: Sequence[Branch]) -> Tensor:
    """The texts of all `ends` `[ends, length]`."""
    tails = torch.tensor([end.tokens for end in ends], dtype=torch.long)
    text = row.prefix().expand(len(ends), -1)
    return torch.cat((text, tails.to(text.device)), dim=1)
