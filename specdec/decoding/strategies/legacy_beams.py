"""Group and constrained beam search, with the bookkeeping of transformers 4.49's beam scorers.

This bookkeeping differs from transformers 5: candidates that end make room, a search is judged by its best candidate
even where that one ends, and of equal hypotheses the later wins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import count, groupby
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from specdec.core.budget import Budget
from specdec.core.drafts import Branch, Level, SequenceView
from specdec.core.strategies import Advance, View
from specdec.core.tree import Step
from specdec.decoding.strategies.base import StrategySetup
from specdec.decoding.strategies.beam_scoring import (
    Beam,
    BeamPool,
    Beams,
    Candidates,
    Scoring,
    best_totals,
    branches,
    extend_rows,
    totals,
)
from specdec.decoding.strategies.constraints import ConstraintProgress, read_constraints
from specdec.options.generate import Options

_STEP = 100
"""The weight of one step of the constraints against a beam's log-probability."""


class Turn(NamedTuple):
    """One pool's step: the pool after it, its beams as continuations of earlier ones, its scores."""

    pool: BeamPool
    candidates: Candidates
    scores: Tensor


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PoolSearch(Scoring):
    """Base of the searches that are scored as in transformers 4.49.

    `end_id` ends every text, whatever its end token, as in transformers. `pad_id` follows the texts of a pool that is
    done.
    """

    end_id: int = 0
    pad_id: int = 0

    def turns(self, pools: Sequence[BeamPool], ids: Tensor | None, log_probs: Tensor) -> Iterator[Turn]:
        """The open pools' steps, from their beams' `ids` `[beams, length]` and `log_probs` `[beams, vocab]`."""
        raise NotImplementedError

    def advance(self, seq: SequenceView, state: Beams, views: Sequence[View], steps: Sequence[Step]) -> Advance:
        open_ = [pool for pool in state.pools if not pool.done]
        ids, log_probs = self.texts(seq, state.ids), self.log_probs(views, len(open_) * self.size)
        turns = list(self.turns(state.pools, ids, log_probs))
        parents = [i * self.size + parent for i, turn in enumerate(turns) for parent in turn.candidates.parents]
        tokens = [token for turn in turns for token in turn.candidates.tokens]
        texts = None if ids is None else extend_rows(ids, parents, tokens)
        ends = self.stop.each(tokens, seq.prompt_length + state.length + 1, texts, None)
        live = [i for i in range(len(tokens)) if not turns[i // self.size].pool.done]
        after = self._after(state, [turn.pool for turn in turns], ends, None if texts is None else texts[live])
        step = Step(
            tokens[0],
            self._place(open_, self.logits(views, len(log_probs))) if self.keep_logits else None,
            self._place(open_, torch.cat([turn.scores for turn in turns])) if self.keep_scores else None,
        )
        leaves = [parents[i] if state.length else 0 for i in live]
        shown, numbers = None, count()
        if state.length:  # the leaf of every beam; -1 in pools that are done
            shown = [-1 if pool.done else next(numbers) for pool in state.pools for _ in pool.live]
        return Advance(after, leaves, [tokens[i] for i in live], step, after.finish, shown)

    def walk(self, pool: BeamPool, candidates: Candidates) -> tuple[list[int], BeamPool]:
        """The candidates that go on, best first, and the pool with the texts that ended before them."""
        going: list[int] = []
        for rank, (parent, token) in enumerate(zip(candidates.parents, candidates.tokens, strict=True)):
            if token not in self.stop.eos_ids:
                going.append(rank)
            elif rank < self.size and (not pool.progress or pool.progress[parent].fulfilled):
                beam = pool.extend(candidates, rank)
                pool = self._add(pool, beam._replace(tokens=(*beam.tokens[:-1], self.end_id)).end("eos"))
            if len(going) == self.size:
                break
        return going, pool

    def step(self, pool: BeamPool, continuations: Candidates, best: float) -> BeamPool:
        """The pool with its next beams; `best` is the step's best candidate."""
        live = tuple(pool.extend(continuations, i) for i in range(len(continuations.tokens)))
        done = len(pool.hypotheses) >= self.size and self.early_stopping != "exhaustive"
        if done and self.early_stopping is not True:
            bound = best / self.horizon(len(live[0].tokens)) ** self.length_penalty
            done = min(h.score for h in pool.hypotheses) >= bound
        return replace(pool, live=live, done=done)

    def close(self, pool: BeamPool, beams: Iterable[Beam]) -> BeamPool:
        """The pool with these `beams`, which have finish reasons, among its hypotheses."""
        return reduce(self._add, beams, pool)

    def _add(self, pool: BeamPool, beam: Beam) -> BeamPool:
        """The pool with `beam` among its hypotheses, of which it keeps the best `size`."""
        score = beam.score / len(beam.tokens) ** self.length_penalty
        hypotheses = pool.hypotheses
        if len(hypotheses) >= self.size:
            worst = min(range(len(hypotheses)), key=lambda i: hypotheses[i].score)
            if not score > hypotheses[worst].score:
                return pool
            hypotheses = hypotheses[:worst] + hypotheses[worst + 1 :]
        return replace(pool, hypotheses=(*hypotheses, beam._replace(score=score)))

    def _after(self, state: Beams, pools: list[BeamPool], ends: list[str | None], ids: Tensor | None) -> Beams:
        """The next state, from the open pools after their step and each beam's finish reason, if it ends here."""
        reasons = [end for end in ends if end is not None]
        if len(reasons) == len(ends):
            pools = [
                pool if pool.done else self.close(pool, map(Beam.end, pool.live, reasons[i * self.size :]))
                for i, pool in enumerate(pools)
            ]
        fresh = iter(pools)
        after = Beams(tuple(pool if pool.done else next(fresh) for pool in state.pools), ids=ids)
        over = len(reasons) == len(ends) or all(pool.done for pool in after.pools)
        return replace(after, finish=after.finished[0].reason) if over else after

    def _place(self, open_: Sequence[BeamPool], values: Tensor) -> Tensor:
        """`values` `[open beams, vocab]` as rows of all beams; a finished pool is certain of its padding."""
        rows = values.new_full((self.num_beams, values.shape[1]), -torch.inf)
        rows[:, self.pad_id : self.pad_id + 1] = 0.0
        rows[[pool.offset + i for pool in open_ for i in range(self.size)]] = values
        return rows


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GroupSearch(PoolSearch):
    """`groups` beam searches of `num_beams / groups` beams, each of which pays for tokens that earlier ones chose.

    Source: Diverse Beam Search, arXiv 1610.02424. The beams of all groups are leaves of one search, so one target pass
    serves them all.
    """

    diversity_penalty: float
    name: ClassVar[str] = "groupsearch"

    @classmethod
    def serves(cls, options: Options) -> bool:
        return options.num_beam_groups > 1

    @classmethod
    def of(cls, setup: StrategySetup) -> GroupSearch:
        penalty = setup.options.diversity_penalty or 0.0
        return cls(diversity_penalty=penalty, pad_id=setup.pad_id, end_id=setup.end_id, **cls.common(setup))

    def expand(self, seq: SequenceView, ends: Sequence[Branch], logits: Tensor, budget: Budget) -> Level:
        """Every group's beams by the draft's scores, by default twice the target's, without ended texts.

        A branch's `groups` holds the groups that it serves.
        """
        log_probs = self.draft_scores(seq, ends, logits)
        # The target's leaves are in the order of their groups.
        serves: list[Collection[int]] = [
            end.groups or (range(self.groups) if len(ends) == 1 else (i // self.size,)) for i, end in enumerate(ends)
        ]
        children: dict[tuple[int, int], tuple[int, Branch]] = {}
        choices: list[int] = []
        for group in range(self.groups):
            members = [i for i, numbers in enumerate(serves) if group in numbers]
            if not members:
                continue
            scores = log_probs[members]
            for token in choices:
                scores[:, token] -= self.diversity_penalty
            total = totals(scores, [ends[i].score for i in members])
            best = best_totals(total, max(self.ahead(budget) // self.groups, 1))
            choices += best.tokens[: self.size]
            for i, branch in branches(best, [ends[i] for i in members]):
                place = (members[i], branch.tokens[-1])
                earlier = children[place][1] if place in children else branch
                better = max(earlier, branch, key=lambda b: b.score)
                children[place] = (members[i], better._replace(groups=frozenset((*(earlier.groups or ()), group))))
        return sorted(children.values(), key=lambda branch: -branch[1].score)

    def turns(self, pools: Sequence[BeamPool], ids: Tensor | None, log_probs: Tensor) -> Iterator[Turn]:
        """`PoolSearch.turns`, with penalties for the choices of earlier groups; `log_probs` `[beams, vocab]`."""
        at, choices = 0, list[int]()
        for pool in pools:
            if pool.done:
                # As in transformers, the padding of finished texts counts as chosen too.
                choices += [self.pad_id] * self.size
                continue
            rows = slice(at, at + self.size)
            row_ids = None if ids is None else ids[rows]
            scores = self.processors(row_ids, log_probs[rows] - self._penalties(choices, log_probs))
            candidates = best_totals(totals(scores, pool.sums), self.candidates(self.size))
            going, pool = self.walk(pool, candidates)
            best = candidates.part(going)
            yield Turn(self.step(pool, best, candidates.scores[0]), best, scores)
            choices, at = choices + best.tokens, at + self.size

    def _penalties(self, choices: Sequence[int], scores: Tensor) -> Tensor:
        """The penalty of every token, `[vocab]`; some checkpoints pad with an id beyond their vocabulary."""
        vocab = scores.shape[1]
        ids = torch.tensor([token for token in choices if token < vocab], dtype=torch.long)
        return self.diversity_penalty * ids.bincount(minlength=vocab)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ConstrainedSearch(PoolSearch):
    """Beam search for texts that fulfil constraints; `progress`: the prompt's, which counts towards them.

    Besides the best continuations, a step considers continuations that advance a beam's constraints; beams compete with
    beams that have advanced as far. If fewer than `count` open beams fulfil the constraints at the end, the other beams
    are hypotheses as well.
    """

    progress: ConstraintProgress
    count: int = 1
    name: ClassVar[str] = "constrainedsearch"

    @classmethod
    def serves(cls, options: Options) -> bool:
        return options.constrained

    @classmethod
    def of(cls, setup: StrategySetup) -> ConstrainedSearch:
        """The search of one sequence; as in transformers, padding counts towards the constraints."""
        o = setup.options
        progress = ConstraintProgress.of(read_constraints(o.constraints, o.force_words_ids)).after(list(setup.prompt))
        count = o.num_return_sequences or 1
        return cls(progress=progress, count=count, end_id=setup.end_id, **cls.common(setup))

    def begin(self) -> Beams:
        return Beams((BeamPool.of(self.num_beams, progress=self.progress),))

    def turns(self, pools: Sequence[BeamPool], ids: Tensor | None, log_probs: Tensor) -> Iterator[Turn]:
        """`PoolSearch.turns`, with continuations that advance constraints; `log_probs` `[beams, vocab]`."""
        [pool] = pools
        total = totals(self.processors(ids, log_probs), pool.sums)
        candidates = best_totals(total, self.candidates(self.num_beams))
        going, pool = self.walk(pool, candidates)
        beams = [beam.tokens for beam in pool.live]
        best = _push_constraints(candidates.part(going), beams, pool.progress, total, self.num_beams)
        steps = zip(best.parents, best.tokens, strict=True)
        progress = tuple(pool.progress[beam].after([token]) for beam, token in steps)
        yield Turn(replace(self.step(pool, best, candidates.scores[0]), progress=progress), best, total)

    def close(self, pool: BeamPool, beams: Iterable[Beam]) -> BeamPool:
        """Adds the beams that fulfil the constraints, and the other beams if too few do."""
        fulfilled, unfulfilled = list[Beam](), list[Beam]()
        for beam, progress in zip(beams, pool.progress, strict=True):
            (fulfilled if progress.fulfilled else unfulfilled).append(beam)
        return super().close(pool, fulfilled + (unfulfilled if len(fulfilled) < self.count else []))

    def expand(self, seq: SequenceView, ends: Sequence[Branch], logits: Tensor, budget: Budget) -> Level:
        """The draft's beams: by default twice as many as the target's, without ended texts, with forced tokens."""
        ahead = self.ahead(budget)
        total = totals(self.draft_scores(seq, ends, logits), [end.score for end in ends])
        output = seq.tokens[seq.prompt_length :]
        progress = [self.progress.after([*output, *end.tokens]) for end in ends]
        candidates = best_totals(total, ahead)
        beams = [tuple(end.tokens) for end in ends]
        return branches(_push_constraints(candidates, beams, progress, total, ahead), ends)


def _push_constraints(
    candidates: Candidates,
    beams: Sequence[tuple[int, ...]],
    progress: Sequence[ConstraintProgress],
    total: Tensor,
    count: int,
) -> Candidates:
    """The next `count` live beams: of the best and the forced candidates, the best of every bank in turn.

    A bank holds candidates whose constraints have advanced equally far. `total`: scores `[beams, vocab]`.
    """
    pairs = list(zip(candidates.parents, candidates.tokens, strict=True))
    ranks = [progress[beam].after([token]).bank for beam, token in pairs]
    present = {(beams[beam], token) for beam, token in pairs}
    for beam, constraints in enumerate(progress):
        for token, after in constraints.forced():
            if (beams[beam], token) not in present:
                present.add((beams[beam], token))
                pairs.append((beam, token))
                ranks.append(after.bank)
    if len(pairs) == len(candidates.tokens):
        return candidates
    parents, tokens = [beam for beam, _ in pairs], [token for _, token in pairs]
    sums = total[parents, tokens]
    order = (torch.tensor(ranks) * _STEP + sums).sort(descending=True).indices.tolist()
    places = _places([ranks[i] for i in order])
    turns = sorted(range(len(order)), key=places.__getitem__)
    return Candidates(sums.tolist(), parents, tokens).part([order[turn] for turn in turns][:count])


def _places(banks: Sequence[int]) -> list[int]:
    """Each element's index in its run of equal banks."""
    return [place for _, run in groupby(banks) for place, _ in enumerate(run)]
