"""The state of one round: each sequence's turn in it, and its seconds by phase."""

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
    """The seconds of a round, by phase."""

    def __init__(self, device: torch.device) -> None:
        self.spent = {"draft": 0.0, "verify": 0.0, "select": 0.0}
        self._device = device
        self._began = self._last = clock()

    def lap(self, phase: str) -> None:
        """Adds the time since the last lap to `phase`, after waiting for the device's kernels."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        now = clock()
        self.spent[phase] += now - self._last
        self._last = now

    def round(self, seqs: list[SequenceRound], nodes: int) -> Round:
        """The finished round."""
        total = clock() - self._began
        return Round(seqs, nodes, self.spent["draft"], self.spent["verify"], self.spent["select"], total)


@dataclass(eq=False, slots=True)
class Turn:
    """One sequence's round: its rows of the target's cache (one, or two under guidance), and its part of the pass in
    each.

    `num_cached`: positions of text cached per row. `passes`: the numbers of the target passes that computed it.
    `hidden`: hidden states per layer that its draft reads. `asked`: a draft was asked for a proposal.
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
        """Whether the pass includes the end of the text."""
        return self.parts[0].complete

    @property
    def nodes(self) -> int:
        """How many nodes the target computes for it."""
        return sum(part.cost for part in self.parts)

    @property
    def batch_seqs(self) -> list[tuple[RunningSequence, RowPass, int]]:
        """The sequence, and its unconditional sequence, each with its part and its cached length."""
        return list(zip(self.seq.batch_seqs, self.parts, self.num_cached, strict=True))

    @property
    def committed(self) -> list[tuple[int, list[int], int]]:
        """What stays in the target's cache: row, path of the pass, and how many nodes of the path are text."""
        path, text = ((), 0) if self.walk is None else (self.walk.path, self.walk.text)
        rows = zip(self.cache_rows, self.parts, strict=True)
        return [(row, part.path(path), len(part.text) + text) for row, part in rows]

    def commit(self) -> Commit:
        """The message to its draft."""
        path, text, ends = ([], 0, False) if self.walk is None else (*self.walk[1:3], self.walk.finish is not None)
        return Commit(self.seq, path, text, None if ends or not self.hidden else self._hidden(path))

    def _hidden(self, path: list[int]) -> Hidden:
        """The hidden states of the new text and of new nodes on the path, without positions that have no ids."""
        part, first = self.parts[0], self.num_cached[0] - self.seq.num_embeds_only
        nodes = part.path([node for node in path if node >= part.num_cached])[max(-first, 0) :]
        assert self.scores is not None
        own = [node - self.scores.num_cached for node in nodes]
        states = torch.stack([layer[_run(own)] for layer in self.hidden], dim=1)
        return Hidden(max(first, 0), part.num_cached, states)

    def share(self, prefill: bool) -> SequenceRound:
        """The round's result for this sequence; call it before the sequence takes the walk."""
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
    """Consecutive numbers as a slice, which copies nothing."""
    together = numbers and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return slice(numbers[0], numbers[-1] + 1) if together else numbers
