"""The state of one round: each sequence's turn in it, and its seconds by phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter as clock

import torch
from torch import Tensor

from specdec.core.drafts import Commit, Hidden
from specdec.core.outcome import Outcome
from specdec.core.rounds import Round, SequenceRound
from specdec.core.sequence import RunningSequence
from specdec.core.work import Logits, Work


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
    """One sequence's round: its work in each of its rows of the target's cache (one, or two under guidance).

    `lengths`: positions of text cached per row. `complete`: the pass includes the end of the text. `passes`: the
    numbers of the target passes that computed it. `hidden`: hidden states per layer that its draft reads. `asked`: a
    draft was asked for a proposal.
    """

    seq: RunningSequence
    lengths: list[int]
    works: list[Work]
    complete: bool = False
    out: Logits | None = None
    outcome: Outcome | None = None
    error: Exception | None = None
    asked: bool = False
    passes: Sequence[int] = ()
    hidden: Sequence[Tensor] = ()

    @property
    def nodes(self) -> int:
        """How many nodes the target computes for it."""
        return sum(work.num_new for work in self.works)

    @property
    def committed(self) -> list[tuple[int, list[int], int]]:
        """What stays in the target's cache: row, path of the pass, and how many nodes of the path are text."""
        path, text = ((), 0) if self.outcome is None else (self.outcome.path, self.outcome.num_text)
        return [(work.row, work.path(path), work.num_text + text) for work in self.works]

    def commit(self) -> Commit:
        """The message to its draft."""
        one = self.outcome or Outcome(self.seq)
        path, text, ends = one.path, one.num_text, one.finish is not None
        return Commit(self.seq, path, text, None if ends or not self.hidden else self._hidden(path))

    def _hidden(self, path: list[int]) -> Hidden:
        """The hidden states of the new text and of new nodes on the path, without positions that have no ids."""
        work, first = self.works[0], self.lengths[0] - self.seq.num_embeds_only
        nodes = work.path([node for node in path if node >= work.num_cached])[max(-first, 0) :]
        own = [node - work.num_cached for node in nodes]
        states = torch.stack([layer[_run(own)] for layer in self.hidden], dim=1)
        return Hidden(max(first, 0), work.num_cached, states)


def _run(numbers: list[int]) -> list[int] | slice:
    """Consecutive numbers as a slice, which copies nothing."""
    together = numbers and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return slice(numbers[0], numbers[-1] + 1) if together else numbers
