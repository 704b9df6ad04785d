"""Group beam search: groups of beams that keep away from what earlier groups say (Diverse Beam Search, 1610.02424).

Semantics of transformers 4.49. The beams of all groups are leaves of one search, so one target pass serves them all;
the groups of a step choose one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from specdec.config import Options
from specdec.select.base import RowSetup
from specdec.select.pool import Pool, PoolSearch, ranked
from specdec.select.scoring import Beam, Hypothesis, best_of, branches, extended
from specdec.types import Branch, NodeOutput, Plan, Row, SearchStep, Step


@dataclass(frozen=True)
class Groups:
    """Where a search stands: its groups in order.

    `ids` `[beams of open groups, length]` are kept where processors or criteria read them.
    """

    pools: tuple[Pool, ...]
    finish: str | None = None
    ids: Tensor | None = None

    @property
    def live(self) -> tuple[Beam, ...]:
        """The live beams of all groups; of one that is done, the last."""
        return tuple(beam for pool in self.pools for beam in pool.live)

    @property
    def finished(self) -> tuple[Hypothesis, ...]:
        """The hypotheses of all groups, best first."""
        return ranked(found for pool in self.pools for found in pool.ended)

    @property
    def length(self) -> int:
        """How many tokens every live beam has generated."""
        return max(pool.length for pool in self.pools)

    @property
    def leaf_scores(self) -> list[float]:
        """The scores of the open groups' beams; before the first token they have one leaf in common."""
        return [score for pool in self.pools if not pool.done for score in pool.running] if self.length else [0.0]


class _Turn(NamedTuple):
    """What one group made of a step: itself afterwards, its beams as tokens after former ones, its scores."""

    pool: Pool
    parents: list[int]
    tokens: list[int]
    scores: Tensor


@dataclass(frozen=True, kw_only=True)
class GroupSearch(PoolSearch):
    """`groups` beam searches of `num_beams / groups` beams, each of which pays for tokens that earlier ones chose.

    The penalty is a processor (`specdec.HammingDiversityLogitsProcessor`) that is told what was chosen in this step.
    `pad_id` follows a finished text.
    """

    groups: int
    diversity_penalty: float
    pad_id: int = 0
    name: ClassVar[str] = "groupsearch"

    @classmethod
    def serves(cls, options: Options) -> bool:
        """Where the beams are divided."""
        return options.groups > 1

    @classmethod
    def of(cls, setup: RowSetup) -> GroupSearch:
        """The search of one row."""
        penalty = setup.options.diversity_penalty or 0.0
        parts = {"pad_id": setup.pad_id, "end_id": setup.end_id, **cls.parts(setup)}
        return cls(groups=setup.options.groups, diversity_penalty=penalty, **parts)

    @property
    def size(self) -> int:
        """Beams of one group."""
        return self.num_beams // self.groups

    def begin(self) -> Groups:
        """The state before the first token."""
        return Groups(tuple(Pool.of(self.size, group * self.size) for group in range(self.groups)))

    def advance(self, row: Row, state: Groups, outputs: Sequence[NodeOutput]) -> SearchStep:
        """One step of every open group, from the target's logits at their beams."""
        open_ = [pool for pool in state.pools if not pool.done]
        ids, own = self.texts(row, state.ids), self.log_probs(outputs, len(open_) * self.size)
        turns = list(self._turns(state.pools, ids, own))
        parents = [i * self.size + parent for i, turn in enumerate(turns) for parent in turn.parents]
        tokens = [token for turn in turns for token in turn.tokens]
        texts = None if ids is None else extended(ids, parents, tokens)
        ends = self.stop.each(tokens, row.prompt_length + state.length + 1, texts, None)
        kept = [i for i in range(len(tokens)) if not turns[i // self.size].pool.done]
        after = self._after(state, [turn.pool for turn in turns], ends, None if texts is None else texts[kept])
        step = Step(
            tokens[0],
            -1,
            self._placed(open_, self.logits(outputs, len(own))) if self.keep_logits else None,
            self._placed(open_, torch.cat([turn.scores for turn in turns])) if self.keep_scores else None,
        )
        if state.length == 0:
            return SearchStep(after, [0] * len(kept), [tokens[i] for i in kept], step)
        return SearchStep(after, [parents[i] for i in kept], [tokens[i] for i in kept], step, self._shown(state.pools))

    def expand(self, row: Row, ends: Sequence[Branch], logits: Tensor, plan: Plan) -> list[tuple[int, Branch]]:
        """Every group's own beams by the draft's scores, by default twice the target's, of texts that go on.

        A branch's `groups` holds the groups that it serves.
        """
        own = self.draft_scores(row, ends, logits)
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

    def _turns(self, pools: Sequence[Pool], ids: Tensor | None, own: Tensor) -> Iterator[_Turn]:
        """The open groups' steps in order; `ids` and `own` log-probabilities are those of all their beams."""
        size, at = self.size, 0
        chosen: list[int] = []
        for group, pool in enumerate(pools):
            if pool.done:
                # As in transformers, what follows a finished text counts as chosen too.
                chosen += [self.pad_id] * size
                continue
            mine = slice(at, at + size)
            scores = self._processed(None if ids is None else ids[mine], own[mine], chosen, group)
            found = best_of(scores, pool.running, self.candidates(size))
            going, pool = self.walk(pool, found)
            pool = self.step(pool, [pool.extend(found, i) for i in going], found.scores[0])
            tokens = [found.tokens[i] for i in going]
            yield _Turn(pool, [found.parents[i] for i in going], tokens, scores)
            chosen, at = chosen + tokens, at + size

    def _processed(self, ids: Tensor | None, scores: Tensor, chosen: Sequence[int], group: int) -> Tensor:
        if not len(self.processors):
            return scores
        known = torch.tensor([*chosen, *[0] * (self.num_beams - len(chosen))], device=scores.device)
        return self.processors(ids, scores, current_tokens=known, beam_group_idx=group)

    def _after(self, state: Groups, stepped: list[Pool], ends: list[str | None], ids: Tensor | None) -> Groups:
        """The next state, from the open groups after their step and why each of their beams would end here."""
        reasons = [end for end in ends if end is not None]
        if len(reasons) == len(ends):
            stepped = [
                pool if pool.done else self.closed(pool, zip(pool.live, reasons[i * self.size :], strict=False))
                for i, pool in enumerate(stepped)
            ]
        fresh = iter(stepped)
        pools = tuple(pool if pool.done else next(fresh) for pool in state.pools)
        after = replace(state, pools=pools, ids=ids)
        over = len(reasons) == len(ends) or all(pool.done for pool in pools)
        return replace(after, finish=after.finished[0].reason) if over else after

    def _placed(self, open_: Sequence[Pool], values: Tensor) -> Tensor:
        """`values` `[open beams, vocab]` as rows of all beams; a finished group is certain of its padding."""
        whole = values.new_full((self.num_beams, values.shape[1]), -torch.inf)
        whole[:, self.pad_id : self.pad_id + 1] = 0.0
        whole[[pool.offset + i for pool in open_ for i in range(self.size)]] = values
        return whole

    def _shown(self, pools: Sequence[Pool]) -> list[int]:
        """For every beam the leaf that it is, -1 in groups that are done."""
        leaves = count()
        return [-1 if pool.done else next(leaves) for pool in pools for _ in pool.live]

    def _served(self, end: Branch, i: int, ends: int) -> Collection[int]:
        """The groups of a draft's end; of the target's own leaves it is told by their order."""
        if end.groups is not None:
            return end.groups
        return range(self.groups) if ends == 1 else (i // self.size,)
