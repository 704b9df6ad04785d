"""The seconds of a round, by phase."""

from __future__ import annotations

from time import perf_counter as clock

import torch

from specdec.core.rounds import Round, SequenceRound


class Stopwatch:
    """The seconds of a round, by phase."""

    def __init__(self, device: torch.device) -> None:
        self.spent = {"draft": 0.0, "verify": 0.0, "select": 0.0}
        self._device = None if device.type == "cpu" else device
        self._began = self._last = clock()

    def lap(self, phase: str) -> None:
        """Adds the time since the last lap to `phase`, after waiting for the device's kernels."""
        if self._device is not None:
            torch.accelerator.synchronize(self._device)
        now = clock()
        self.spent[phase] += now - self._last
        self._last = now

    def round(self, seqs: list[SequenceRound], nodes: int) -> Round:
        """The finished round."""
        total = clock() - self._began
        return Round(seqs, nodes, self.spent["draft"], self.spent["verify"], self.spent["select"], total)
