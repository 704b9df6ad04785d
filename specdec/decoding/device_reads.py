"""Where numbers are, and how they are read: whoever looks at a value on an accelerator waits for all work before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_local(values: Tensor) -> bool:
    """Whether values can be looked at one by one: they are in the processor's own memory."""
    return values.device.type == "cpu"


def read(*parts: Tensor) -> list[list[float]]:
    """The numbers of several vectors of one length, in one transfer; float64 holds any float32 and token id exactly."""
    exact = torch.float32 if parts[0].device.type == "mps" else torch.float64
    values: list[list[float]] = torch.stack([part.to(exact) for part in parts]).tolist()
    return values


def as_ints(numbers: Sequence[float]) -> list[int]:
    """Ids among numbers that were read."""
    return [int(number) for number in numbers]


def first_best(values: Tensor) -> int:
    """The first of the largest of `values` `[vocab]`."""
    if is_local(values):  # on one row numpy takes a tenth of torch's time
        return int(values.detach().float().numpy().argmax())
    return int(values.argmax())


def first_bests(values: Tensor) -> list[int]:
    """The first of the largest of every row of local `values` `[rows, vocab]`."""
    best: list[int] = values.detach().float().numpy().argmax(axis=-1).tolist()
    return best
