"""Reading values from a device: each read of an accelerator waits for all work queued before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_local(values: Tensor) -> bool:
    """Whether values are in the CPU's memory, where reading them one by one is cheap."""
    return values.is_cpu


def read(*parts: Tensor) -> list[list[float]]:
    """The values of several vectors of one length, in one transfer; float64 holds any float32 and token id exactly."""
    exact = torch.float32 if parts[0].device.type == "mps" else torch.float64
    return torch.stack([part.to(exact) for part in parts]).tolist()


def as_ints(numbers: Sequence[float]) -> list[int]:
    """Token ids from values that were read."""
    return [int(number) for number in numbers]


def first_best(values: Tensor) -> int:
    """The index of the largest of `values` `[vocab]`; of equals the first."""
    if is_local(values):  # numpy takes a tenth of torch's time for one row
        return int(values.detach().float().numpy().argmax())
    return int(values.argmax())


def first_bests(values: Tensor) -> list[int]:
    """The same for every row of local `values` `[rows, vocab]`."""
    return values.detach().float().numpy().argmax(axis=-1).tolist()
