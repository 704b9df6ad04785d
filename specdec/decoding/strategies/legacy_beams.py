"""The bookkeeping of transformers 4.49's beam scorers, for group and constrained beam search.

It differs from that of transformers 5: candidates that end make room, a search is judged by its best candidate even
where that one ends, and of equal hypotheses the later wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.core.drafts import SequenceView
from specdec.core.strategies import Advance, View
from specdec.core.tree import Step
from specdec.decoding.strategies.beam_scoring import Beam, Beams, Candidates, Hypothesis, Pool, Scoring, extended


class Turn(NamedTuple):
    """One pool's step: the pool after it, its beams as continuations of earlier ones, its scores."""

    pool: Pool
    found: Candidates
    scores: Tensor


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PoolSearch(Scoring):
    """Base of the searches that are scored as in transformers 4.49.

    `end_id` ends every text, whichever end token it chose, as in transformers. `pad_id` follows the texts of a pool
    that is done.
    """

    end_id: int = 0
    pad_id: int = 0

    def turns(self, pools: Sequence[Pool], ids: Tensor | None, own: Tensor) -> Iterator[Turn]:
        """The open pools' steps in order, from `ids` and log-probabilities `own` of all their beams."""
        raise NotImplementedError

    def advance(self, seq: SequenceView, state: Beams, views: Sequence[View], steps: Sequence[Step]) -> Advance:
        open_ = [pool for pool in state.pools if not pool.done]
        ids, own = self.texts(seq, state.ids), self.log_probs(views, len(open_) * self.size)
        turns = list(self.turns(state.pools, ids, own))
        parents = [i * self.size + parent for i, turn in enumerate(turns) for parent in turn.found.parents]
        tokens = [token for turn in turns for token in turn.found.tokens]
        texts = None if ids is None else extended(ids, parents, tokens)
        ends = self.stop.each(tokens, seq.prompt_length + state.length + 1, texts, None)
        kept = [i for i in range(len(tokens)) if not turns[i // self.size].pool.done]
        after = self._after(state, [turn.pool for turn in turns], ends, None if texts is None else texts[kept])
        step = Step(
            tokens[0],
            self._placed(open_, self.logits(views, len(own))) if self.keep_logits else None,
            self._placed(open_, torch.cat([turn.scores for turn in turns])) if self.keep_scores else None,
        )
        leaves = [parents[i] if state.length else 0 for i in kept]
        shown = self._shown(state.pools) if state.length else None
        return Advance(after, leaves, [tokens[i] for i in kept], step, after.finish, shown)

    def walk(self, pool: Pool, found: Candidates) -> tuple[list[int], Pool]:
        """The candidates that go on, best first, and the pool with the texts that ended before them."""
        going: list[int] = []
        for rank, (parent, token) in enumerate(zip(found.parents, found.tokens, strict=True)):
            if token not in self.stop.eos_ids:
                going.append(rank)
            elif rank < self.size and (not pool.progress or pool.progress[parent].fulfilled):
                beam = pool.extend(found, rank)
                pool = self._ended(pool, beam._replace(tokens=(*beam.tokens[:-1], self.end_id)), "eos")
            if len(going) == self.size:
                break
        return going, pool

    def step(self, pool: Pool, chosen: Candidates, best: float) -> Pool:
        """The pool with its next beams; `best` is the step's best candidate."""
        live = tuple(pool.extend(chosen, i) for i in range(len(chosen.tokens)))
        return replace(pool, live=live, done=self._is_done(pool.ended, best, len(live[0].tokens)))

    def closed(self, pool: Pool, beams: Iterable[tuple[Beam, str]]) -> Pool:
        """The pool with these `beams` among its hypotheses, each with its finish reason."""
        for beam, reason in beams:
            pool = self._ended(pool, beam, reason)
        return pool

    def _ended(self, pool: Pool, beam: Beam, reason: str) -> Pool:
        """The pool with `beam` among its hypotheses, of which it keeps the best `size`."""
        score = beam.score / len(beam.tokens) ** self.length_penalty
        kept = pool.ended
        if len(kept) >= self.size:
            worst = min(range(len(kept)), key=lambda i: kept[i].score)
            if not score > kept[worst].score:
                return pool
            kept = kept[:worst] + kept[worst + 1 :]
        return replace(pool, ended=(*kept, Hypothesis(beam.tokens, score, beam.origins, reason)))

    def _is_done(self, ended: Sequence[Hypothesis], best: float, length: int) -> bool:
        if len(ended) < self.size or self.early_stopping == "exhaustive":
            return False
        if self.early_stopping is True:
            return True
        return min(h.score for h in ended) >= best / self.horizon(length) ** self.length_penalty

    def _after(self, state: Beams, stepped: list[Pool], ends: list[str | None], ids: Tensor | None) -> Beams:
        """The next state, from the open pools after their step and each beam's finish reason, if it ends here."""
        reasons = [end for end in ends if end is not None]
        if len(reasons) == len(ends):
            stepped = [
                pool if pool.done else self.closed(pool, zip(pool.live, reasons[i * self.size :], strict=False))
                for i, pool in enumerate(stepped)
            ]
        fresh = iter(stepped)
        after = Beams(tuple(pool if pool.done else next(fresh) for pool in state.pools), ids=ids)
        over = len(reasons) == len(ends) or all(pool.done for pool in after.pools)
        return replace(after, finish=after.finished[0].reason) if over else after

    def _placed(self, open_: Sequence[Pool], values: Tensor) -> Tensor:
        """`values` `[open beams, vocab]` as rows of all beams; a finished pool is certain of its padding."""
        rows = values.new_full((self.num_beams, values.shape[1]), -torch.inf)
        rows[:, self.pad_id : self.pad_id + 1] = 0.0
        rows[[pool.offset + i for pool in open_ for i in range(self.size)]] = values
        return rows

    def _shown(self, pools: Sequence[Pool]) -> list[int]:
        """The leaf of every beam; -1 in pools that are done."""
        leaves = count()
        return [-1 if pool.done else next(leaves) for pool in pools for _ in pool.live]
