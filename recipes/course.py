"""The course of one stage of training."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.distill.optimise import descend, rate

CHECK_EVERY = 200  # steps


@dataclass(frozen=True)
class Course:
    """One stage of training; the learning rate decays after the share `decay_from` of its steps.

    `check` is called every 200 steps and at the end: it saves, and tells how good the model is.
    """

    name: str
    batches: Iterator[Any]
    loss_of: Callable[[Any], Tensor]
    steps: int
    decay_from: float
    check: Callable[[], str]
    optimizers: Sequence[torch.optim.Optimizer]

    def run(self) -> None:
        """One optimiser step per batch, and progress now and then."""
        start = time.perf_counter()
        for step, batch in enumerate(self.batches):
            loss = self.loss_of(batch)
            descend(loss, self.optimizers, rate(step, step / self.steps, self.decay_from))
            seconds = time.perf_counter() - start
            if step % 20 == 0:
                print(f"{self.name} step {step}/{self.steps} loss {loss.item():.3f} {seconds:.0f} s", flush=True)
            if step % CHECK_EVERY == CHECK_EVERY - 1 or step == self.steps - 1:
                print(f"{self.name} step {step}/{self.steps} held-out {self.check()} {seconds:.0f} s", flush=True)


def check_stage(parser: ArgumentParser, stage: str | None, out: Path, needs: Mapping[str, tuple[str, ...]]) -> None:
    """Ends as a wrong usage where a stage is run alone without the models in `out` that it needs."""
    for role in needs.get(stage or "", ()):
        if not (out / role / "config.json").exists():
            parser.error(f"--stage {stage} needs a model in {out / role}, and there is none: run the stages before it")
