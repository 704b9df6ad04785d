"""Constrained beam search: texts that contain given words (semantics of transformers 4.49).

Besides the best continuations, a step considers those that advance a beam's constraints; beams compete with beams that
have advanced as far.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from specdec.core.drafts import Branch, Plan, SequenceView
from specdec.decoding.strategies.base import StrategySetup
from specdec.decoding.strategies.beam_scoring import Beam, Beams, Candidates, Pool, best_totals, branches, totals
from specdec.decoding.strategies.constraints import Progress, wanted
from specdec.decoding.strategies.legacy_beams import PoolSearch, Turn
from specdec.options.generate import Options

_STEP = 100
"""The weight of one step of the constraints against a beam's log-probability."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ConstrainedSearch(PoolSearch):
    """Beam search for texts that fulfil constraints; `progress`: that of the prompt, which counts towards them.

    If fewer open beams than `returned` fulfil them at the end, the others are hypotheses as well.
    """

    progress: Progress
    returned: int = 1
    name: ClassVar[str] = "constrainedsearch"

    @classmethod
    def serves(cls, options: Options) -> bool:
        return options.constrained

    @classmethod
    def of(cls, setup: StrategySetup) -> ConstrainedSearch:
        """The search of one sequence; as in transformers, padding counts towards the constraints."""
        o = setup.options
        progress = Progress.of(wanted(o.constraints, o.force_words_ids)).after(list(setup.prompt))
        returned = o.num_return_sequences or 1
        return cls(progress=progress, returned=returned, end_id=setup.end_id, **cls.parts(setup))

    def begin(self) -> Beams:
        return Beams((Pool.of(self.num_beams, progress=self.progress),))

    def turns(self, pools: Sequence[Pool], ids: Tensor | None, own: Tensor) -> Iterator[Turn]:
        """The pool's step, with continuations that advance constraints."""
        [pool] = pools
        total = totals(self.processors(ids, own), pool.running)
        found = best_totals(total, self.candidates(self.num_beams))
        going, pool = self.walk(pool, found)
        beams = [beam.tokens for beam in pool.live]
        chosen = _pushed(found.part(going), beams, pool.progress, total, self.num_beams)
        steps = zip(chosen.parents, chosen.tokens, strict=True)
        progress = tuple(pool.progress[beam].after([token]) for beam, token in steps)
        yield Turn(replace(self.step(pool, chosen, found.scores[0]), progress=progress), chosen, total)

    def closed(self, pool: Pool, beams: Iterable[tuple[Beam, str]]) -> Pool:
        """Adds beams that fulfil the constraints, and the others if these are too few."""
        fulfilled, others = list[tuple[Beam, str]](), list[tuple[Beam, str]]()
        for beam, progress in zip(beams, pool.progress, strict=True):
            (fulfilled if progress.fulfilled else others).append(beam)
        return super().closed(pool, fulfilled + (others if len(fulfilled) < self.returned else []))

    def expand(self, seq: SequenceView, ends: Sequence[Branch], logits: Tensor, plan: Plan) -> list[tuple[int, Branch]]:
        """The draft's beams: by default twice as many as the target's, without ended texts, with forced tokens."""
        ahead = self.ahead(plan)
        total = totals(self.draft_scores(seq, ends, logits), [end.score for end in ends])
        generated = seq.tokens[seq.prompt_length :]
        progress = [self.progress.after([*generated, *end.tokens]) for end in ends]
        found = best_totals(total, ahead)
        beams = [tuple(end.tokens) for end in ends]
        return branches(_pushed(found, beams, progress, total, ahead), ends)


def _pushed(
    found: Candidates, beams: Sequence[tuple[int, ...]], progress: Sequence[Progress], total: Tensor, count: int
) -> Candidates:
    """The next `count` live beams: of the best and the forced candidates, the best of every bank in turn.

    A bank holds candidates whose constraints have advanced equally far. `total`: scores `[beams, vocab]`.
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
    return Candidates(sums.tolist(), parents, tokens).part([order[turn] for turn in turns][:count])


def _places(banks: Sequence[int]) -> list[int]:
    """Each element's index in its run of equal banks."""
    places: list[int] = []
    for i, bank in enumerate(banks):
        places.append(places[-1] + 1 if i and bank == banks[i - 1] else 0)
    return places
