"""Group beam search: groups of beams that avoid what earlier groups chose (Diverse Beam Search, arXiv 1610.02424).

Semantics of transformers 4.49. The beams of all groups are leaves of one search, so one target pass serves them all;
the groups of a step choose one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdec.core.drafts import Branch, Plan, SequenceView
from specdec.decoding.strategies.base import StrategySetup
from specdec.decoding.strategies.beam_scoring import Pool, best_of, branches
from specdec.decoding.strategies.legacy_beams import PoolSearch, Turn
from specdec.options.generate import Options


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GroupSearch(PoolSearch):
    """`groups` beam searches of `num_beams / groups` beams, each of which pays for tokens that earlier ones chose.

    The penalty is a processor (`specdec.HammingDiversityLogitsProcessor`), which gets the tokens chosen in this step.
    """

    diversity_penalty: float
    name: ClassVar[str] = "groupsearch"

    @classmethod
    def serves(cls, options: Options) -> bool:
        return options.num_beam_groups > 1

    @classmethod
    def of(cls, setup: StrategySetup) -> GroupSearch:
        penalty = setup.options.diversity_penalty or 0.0
        return cls(diversity_penalty=penalty, pad_id=setup.pad_id, end_id=setup.end_id, **cls.parts(setup))

    def expand(self, seq: SequenceView, ends: Sequence[Branch], logits: Tensor, plan: Plan) -> list[tuple[int, Branch]]:
        """Every group's beams by the draft's scores, by default twice the target's, without ended texts.

        A branch's `groups` holds the groups that it serves.
        """
        own = self.draft_scores(seq, ends, logits)
        found: dict[tuple[int, int], tuple[int, Branch]] = {}
        chosen: list[int] = []
        for group in range(self.groups):
            mine = [i for i, end in enumerate(ends) if group in self._served(end, i, len(ends))]
            if not mine:
                continue
            scores = own[mine]
            for token in chosen:
                scores[:, token] -= self.diversity_penalty
            best = best_of(scores, [ends[i].score for i in mine], max(self.ahead(plan) // self.groups, 1))
            chosen += best.tokens[: self.size]
            for i, branch in branches(best, [ends[i] for i in mine]):
                place = (mine[i], branch.tokens[-1])
                known = found[place][1] if place in found else branch
                better = max(known, branch, key=lambda b: b.score)
                found[place] = (mine[i], better._replace(groups=frozenset((*(known.groups or ()), group))))
        return sorted(found.values(), key=lambda branch: -branch[1].score)

    def turns(self, pools: Sequence[Pool], ids: Tensor | None, own: Tensor) -> Iterator[Turn]:
        """The open groups' steps, each with penalties for the choices of earlier groups."""
        at, chosen = 0, list[int]()
        for group, pool in enumerate(pools):
            if pool.done:
                # As in transformers, the padding of finished texts counts as chosen too.
                chosen += [self.pad_id] * self.size
                continue
            mine = slice(at, at + self.size)
            known = torch.tensor([*chosen, *[0] * (self.num_beams - len(chosen))], device=own.device)
            mine_ids = None if ids is None else ids[mine]
            scores = self.processors(mine_ids, own[mine], current_tokens=known, beam_group_idx=group)
            found = best_of(scores, pool.running, self.candidates(self.size))
            going, pool = self.walk(pool, found)
            best = found.part(going)
            yield Turn(self.step(pool, best, found.scores[0]), best, scores)
            chosen, at = chosen + best.tokens, at + self.size

    def _served(self, end: Branch, i: int, ends: int) -> Collection[int]:
        """The groups that a draft's end serves; the target's leaves are in the order of their groups."""
        if end.groups is not None:
            return end.groups
        return range(self.groups) if ends == 1 else (i // self.size,)
