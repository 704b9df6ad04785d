"""One round as it is under way: a sequence's turn in it, and where its seconds go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter as clock

import torch
from torch import Tensor

from specdec.core.drafts import Commit, Hidden
from specdec.core.rounds import Round, RowPass, SequenceRound
from specdec.core.sequence import RunningSequence, Walk
from specdec.core.tree import Scores


class Stopwatch:
    """The seconds of a round, and what they went into."""

    def __init__(self, device: torch.device) -> None:
        self.spent = {"draft": 0.0, "verify": 0.0, "select": 0.0}
        self._device = device
        self._began = self._last = clock()

    def lap(self, phase: str) -> None:
        """Counts the time since the last lap for `phase`, kernels that are still under way included."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        now = clock()
        self.spent[phase] += now - self._last
        self._last = now

    def round(self, seqs: list[SequenceRound], nodes: int) -> Round:
        """What the round came to."""
        total = clock() - self._began
        return Round(seqs, nodes, self.spent["draft"], self.spent["verify"], self.spent["select"], total)


@dataclass(eq=False, slots=True)
class Turn:
    """One sequence's round, step by step: its cache rows in the target, the text held there, its parts of the pass.

    `passes` are the numbers of those that it took part in, `hidden` what they said of the layers that its draft reads.
    """

    seq: RunningSequence
    cache_rows: list[int]
    num_cached: list[int]
    parts: list[RowPass]
    scores: Scores | None = None
    walk: Walk | None = None
    error: Exception | None = None
    asked: bool = False
    passes: Sequence[int] = ()
    hidden: Sequence[Tensor] = ()

    @property
    def complete(self) -> bool:
        """Whether the pass comes to the end of the text."""
        return self.parts[0].complete

    @property
    def nodes(self) -> int:
        """How many nodes the target computes for it."""
        return sum(part.cost for part in self.parts)

    @property
    def batch_seqs(self) -> list[tuple[RunningSequence, RowPass, int]]:
        """The sequence and its unconditional sequence, with their parts and the text held of each."""
        return list(zip(self.seq.batch_seqs, self.parts, self.num_cached, strict=True))

    @property
    def committed(self) -> list[tuple[int, list[int], int]]:
        """What the target is to hold of the pass: cache row, nodes, and how many of these are text."""
        path, text = ((), 0) if self.walk is None else (self.walk.path, self.walk.text)
        return [
            (cache_row, p.path(path), len(p.text) + text)
            for cache_row, p in zip(self.cache_rows, self.parts, strict=True)
        ]

    def commit(self) -> Commit:
        """What its draft is told, before or after the sequence takes its walk."""
        path, text, ends = ([], 0, False) if self.walk is None else (*self.walk[1:3], self.walk.finish is not None)
        return Commit(self.seq, path, text, None if ends or not self.hidden else self._told(path))

    def _told(self, path: list[int]) -> Hidden:
        """The hidden states of the text that was read and of new nodes on the path; of tokens that have ids."""
        part, first = self.parts[0], self.num_cached[0] - self.seq.num_embeds_only
        nodes = part.path([node for node in path if node >= part.num_cached])[max(-first, 0) :]
        assert self.scores is not None
        own = [node - self.scores.num_cached for node in nodes]
        states = torch.stack([layer[_run(own)] for layer in self.hidden], dim=1)
        return Hidden(max(first, 0), part.num_cached, states)

    def share(self, prefill: bool) -> SequenceRound:
        """What the round came to; before the sequence takes its walk."""
        assert self.walk is not None
        walk, proposal = self.walk, self.parts[0].proposal
        tested, levels = self.seq.tested(proposal, walk)
        return SequenceRound(
            id=self.seq.id,
            drafted=len(proposal),
            depth=proposal.depth,
            accepted=walk.accepted,
            prefill=prefill,
            source=proposal.source,
            tested=tested,
            levels=levels,
            steps=walk.steps,
            finish=walk.finish,
        )


def _run(numbers: list[int]) -> list[int] | slice:
    """These numbers as a slice, which copies nothing, where they follow one another."""
    together = numbers and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return slice(numbers[0], numbers[-1] + 1) if together else numbers
