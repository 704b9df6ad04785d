"""Constrained beam search: beams that are on their way to contain given words (semantics of transformers 4.49).

Besides the best continuations, a step looks at those that bring a beam forward with its constraints, and lets beams
compete with those that have come as far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from specdec.config import Options
from specdec.select.base import RowSetup
from specdec.select.constraints import Progress, wanted
from specdec.select.pool import Pool, PoolSearch, ranked
from specdec.select.scoring import Beam, Candidates, Hypothesis, best_totals, branches, extended, totals
from specdec.types import Branch, NodeOutput, Plan, Row, SearchStep, Step

_STEP = 100
"""What a step towards the constraints weighs against a beam's log-probability."""


@dataclass(frozen=True)
class ConstrainedBeams:
    """Where a search stands: its beams, and how far each of them is.

    `ids` `[beams, length]` are kept where processors or criteria read them.
    """

    pool: Pool
    progress: tuple[Progress, ...]
    finish: str | None = None
    ids: Tensor | None = None

    @property
    def live(self) -> tuple[Beam, ...]:
        """The live beams."""
        return self.pool.live

    @property
    def finished(self) -> tuple[Hypothesis, ...]:
        """The hypotheses, best first."""
        return ranked(self.pool.ended)

    @property
    def length(self) -> int:
        """How many tokens every live beam has generated."""
        return self.pool.length

    @property
    def leaf_scores(self) -> list[float]:
        """The live beams' scores; before the first token they have one leaf in common."""
        return self.pool.running if self.length else [0.0]


@dataclass(frozen=True, kw_only=True)
class ConstrainedSearch(PoolSearch):
    """Beam search for texts that fulfil constraints; `progress` is that of the prompt, which counts towards them.

    If fewer open beams than `returned` fulfil them at the end, the others are hypotheses as well.
    """

    progress: Progress
    returned: int = 1
    name: ClassVar[str] = "constrainedsearch"

    @classmethod
    def serves(cls, options: Options) -> bool:
        """Where texts must contain given words."""
        return options.constrained

    @classmethod
    def of(cls, setup: RowSetup) -> ConstrainedSearch:
        """The search of one row; as in transformers, padding counts towards the constraints."""
        o = setup.options
        progress = Progress.of(wanted(o.constraints, o.force_words_ids)).after(list(setup.prompt))
        returned = o.num_return_sequences or 1
        return cls(progress=progress, returned=returned, end_id=setup.end_id, **cls.parts(setup))

    def begin(self) -> ConstrainedBeams:
        """The state before the first token."""
        return ConstrainedBeams(Pool.of(self.num_beams), (self.progress,) * self.num_beams)

    def advance(self, row: Row, state: ConstrainedBeams, outputs: Sequence[NodeOutput]) -> SearchStep:
        """One step from the target's logits at all live beams."""
        ids, pool = self.texts(row, state.ids), state.pool
        total = totals(self.processors(ids, self.log_probs(outputs, self.num_beams)), pool.running)
        found = best_totals(total, self.candidates(self.num_beams))
        going, pool = self.walk(pool, found, lambda beam: state.progress[beam].fulfilled)
        beams = [beam.tokens for beam in pool.live]
        chosen = _pushed(_part(found, going), beams, state.progress, total, self.num_beams)
        pool = self.step(pool, [pool.extend(chosen, i) for i in range(len(chosen.tokens))], found.scores[0])
        texts = None if ids is None else extended(ids, chosen.parents, chosen.tokens)
        ends = self.stop.each(chosen.tokens, row.prompt_length + state.length + 1, texts, None)
        progress = [state.progress[beam].after([t]) for beam, t in zip(chosen.parents, chosen.tokens, strict=True)]
        after = self._after(ConstrainedBeams(pool, tuple(progress), ids=texts), ends)
        logits = self.logits(outputs, self.num_beams).clone() if self.keep_logits else None
        step = Step(chosen.tokens[0], -1, logits, total if self.keep_scores else None)
        return SearchStep(after, chosen.parents if state.length else [0] * self.num_beams, chosen.tokens, step)

    def expand(self, row: Row, ends: Sequence[Branch], logits: Tensor, plan: Plan) -> list[tuple[int, Branch]]:
        """The draft's own beams: by default twice as many as the target's, of texts that go on, forced ones too."""
        ahead = self.ahead(plan)
        total = totals(self.draft_scores(row, ends, logits), [end.score for end in ends])
        generated = row.tokens[row.prompt_length :]
        progress = [self.progress.after([*generated, *end.tokens]) for end in ends]
        found = best_totals(total, ahead)
        beams = [tuple(end.tokens) for end in ends]
        return branches(_pushed(found, beams, progress, total, ahead), ends)

    def _after(self, state: ConstrainedBeams, ends: list[str | None]) -> ConstrainedBeams:
        """The state, finished if it is; `ends` say why each live beam would end here."""
        pool, reasons = state.pool, [end for end in ends if end is not None]
        if not pool.done and len(reasons) < len(ends):
            return state
        if not pool.done:
            beams = list(zip(pool.live, reasons, state.progress, strict=True))
            fulfilled = [(beam, reason) for beam, reason, progress in beams if progress.fulfilled]
            others = [(beam, reason) for beam, reason, progress in beams if not progress.fulfilled]
            pool = self.closed(pool, fulfilled + (others if len(fulfilled) < self.returned else []))
        after = replace(state, pool=pool)
        return replace(after, finish=after.finished[0].reason)


def _pushed(
    found: Candidates, beams: Sequence[tuple[int, ...]], progress: Sequence[Progress], total: Tensor, count: int
) -> Candidates:
    """The `count` live beams to come: of the best candidates and the forced ones, the best of every bank in turn.

    A bank are those candidates that are equally far with the constraints. `total` `[beams, vocab]` are their scores.
    """
    pairs = list(zip(found.parents, found.tokens, strict=True))
    ranks = [progress[beam].after([token]).bank for beam, token in pairs]
    known = {(beams[beam], token) for beam, token in pairs}
    for beam, own in enumerate(progress):
        for token, after in own.forced():
            if (beams[beam], token) not in known:
                known.add((beams[beam], token))
                pairs.append((beam, token))
                ranks.append(after.bank)
    if len(pairs) == len(found.tokens):
        return found
    parents, tokens = [beam for beam, _ in pairs], [token for _, token in pairs]
    sums = total[parents, tokens]
    order = (torch.tensor(ranks, device=sums.device) * _STEP + sums).sort(descending=True).indices.tolist()
    places = _places([ranks[i] for i in order])
    turns = sorted(range(len(order)), key=places.__getitem__)
    return _part(Candidates(sums.tolist(), parents, tokens), [order[turn] for turn in turns][:count])


def _part(found: Candidates, kept: Sequence[int]) -> Candidates:
    """Some candidates, in this order."""
    return Candidates(
        [found.scores[i] for i in kept], [found.parents[i] for i in kept], [found.tokens[i] for i in kept]
    )


def _places(banks: Sequence[int]) -> list[int]:
    """Everyone's place in its run of equal banks."""
    places: list[int] = []
    for i, bank in enumerate(banks):
        places.append(places[-1] + 1 if i and bank == banks[i - 1] else 0)
    return places
