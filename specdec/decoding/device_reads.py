"""Reading values from a device: each read of an accelerator waits for all work queued before it."""

from __future__ import annotations

import torch
from torch import Tensor


def is_local(values: Tensor) -> bool:
    """Whether values are in the CPU's memory, where reading them one by one is cheap."""
    return values.is_cpu


def has_float64(values: Tensor) -> bool:
    """Whether the device of `values` computes in float64, which Apple's GPUs do not."""
    return values.device.type != "mps"


def with_float64(values: Tensor) -> Tensor:
    """`values`, copied to the CPU if their device has no float64."""
    return values if has_float64(values) else values.cpu()


def read(*parts: Tensor) -> list[list[float]]:
    """The values of several vectors of one length, in one transfer; float64 holds any float32 and token id exactly."""
    exact = torch.float64 if has_float64(parts[0]) else torch.float32
    return torch.stack([part.to(exact) for part in parts]).tolist()


def first_best(values: Tensor) -> int:
    """The index of the largest of `values` `[vocab]`; of equals the first."""
    if is_local(values):  # numpy takes a tenth of torch's time for one row
        return int(values.detach().float().numpy().argmax())
    return int(values.argmax())
