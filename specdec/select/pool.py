"""The bookkeeping of transformers 4.49's beam scorers, on which group and constrained beam search stand.

It differs from that of transformers 5: candidates that end make room, a search is judged by its best candidate even
where that one ends, and of equal hypotheses the later wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from specdec.select.scoring import Beam, Candidates, Hypothesis, Scoring, first_beams


@dataclass(frozen=True)
class Pool:
    """Beams that compete with one another, and the texts of theirs that ended, in the order they came.

    `offset` is the number of its first beam in the whole search. A pool that is `done` takes part no more.
    """

    live: tuple[Beam, ...]
    ended: tuple[Hypothesis, ...] = ()
    done: bool = False
    offset: int = 0

    @classmethod
    def of(cls, size: int, offset: int = 0) -> Pool:
        """A pool before its first token."""
        return cls(first_beams(size), offset=offset)

    @property
    def length(self) -> int:
        """How many tokens every live beam has generated."""
        return len(self.live[0].tokens)

    @property
    def running(self) -> list[float]:
        """The live beams' scores."""
        return [beam.score for beam in self.live]

    def extend(self, found: Candidates, i: int) -> Beam:
        """Candidate `i` as a beam."""
        return found.extend(self.live, i, self.offset)


@dataclass(frozen=True, kw_only=True)
class PoolSearch(Scoring):
    """Base of the searches that are scored as in transformers 4.49.

    `end_id` is written at the end of a text, whichever of several it chose: transformers does so.
    """

    end_id: int = 0

    def walk(
        self, pool: Pool, found: Candidates, may_end: Callable[[int], bool] = lambda beam: True
    ) -> tuple[list[int], Pool]:
        """Which candidates go on, best first, and the pool with what ended before them."""
        size, going = len(pool.live), []
        for rank, token in enumerate(found.tokens):
            if token not in self.stop.eos_ids:
                going.append(rank)
            elif rank < size and may_end(found.parents[rank]):
                beam = pool.extend(found, rank)
                pool = self.ended(pool, beam._replace(tokens=(*beam.tokens[:-1], self.end_id)), "eos")
            if len(going) == size:
                break
        return going, pool

    def step(self, pool: Pool, live: Sequence[Beam], best: float) -> Pool:
        """The pool with its next beams; `best` is the step's best candidate."""
        return replace(pool, live=tuple(live), done=self._is_done(pool.ended, len(live), best, pool.length + 1))

    def ended(self, pool: Pool, beam: Beam, reason: str) -> Pool:
        """The pool with `beam` among its hypotheses, if it is better than the worst of as many as there are beams."""
        score = beam.score / len(beam.tokens) ** self.length_penalty
        new = Hypothesis(beam.tokens, score, beam.origins, reason)
        kept = pool.ended
        if len(kept) >= len(pool.live):
            worst = min(range(len(kept)), key=lambda i: kept[i].score)
            if not score > kept[worst].score:
                return pool
            kept = kept[:worst] + kept[worst + 1 :]
        return replace(pool, ended=(*kept, new))

    def closed(self, pool: Pool, beams: Iterable[tuple[Beam, str]]) -> Pool:
        """The pool with these of its `beams` among its hypotheses, each with why it ends."""
        for beam, reason in beams:
            pool = self.ended(pool, beam, reason)
        return pool

    def _is_done(self, ended: Sequence[Hypothesis], size: int, best: float, length: int) -> bool:
        if len(ended) < size or self.early_stopping == "exhaustive":
            return False
        if self.early_stopping is True:
            return True
        return min(h.score for h in ended) >= best / self.horizon(length) ** self.length_penalty


def ranked(ended: Iterable[Hypothesis]) -> tuple[Hypothesis, ...]:
    """Hypotheses, best first; of equals the later."""
    return tuple(sorted(ended, key=lambda h: h.score)[::-1])
