"""The course of one stage of training, and the checkpoints that it writes."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from recipes.optimise import descend, rate

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


def save(model: PreTrainedModel, folder: Path) -> None:
    """Writes the weights in bfloat16 as safetensors, tied ones once, to load in float32; the model stays as it is."""
    first = {weight.data_ptr(): name for name, weight in reversed(model.state_dict().items())}
    state = {k: v.bfloat16() for k, v in model.state_dict().items() if first[v.data_ptr()] == k}
    model.save_pretrained(folder, state_dict=state)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def check_stage(parser: ArgumentParser, stage: str | None, out: Path, needs: Mapping[str, tuple[str, ...]]) -> None:
    """Ends as a wrong usage where a stage is run alone without the models in `out` that it needs."""
    for role in needs.get(stage or "", ()):
        if not (out / role / "config.json").exists():
            parser.error(f"--stage {stage} needs a model in {out / role}, and there is none: run the stages before it")
