"""Makes optimisers, and takes steps with them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

_NO_LAYER = re.compile("embed|shared|bias|letters|lm_head|proj_out")  # matrices that are not a layer's


def make_optimizers(
    model: nn.Module, muon_rate: float = 0.004, adam_rate: float = 0.002
) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings, convolutions, biases, norms and heads."""
    parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for n, p in parameters if p.ndim == 2 and not _NO_LAYER.search(n)]
    others = [p for n, p in parameters if p.ndim != 2 or _NO_LAYER.search(n)]
    muon = torch.optim.Muon(matrices, lr=muon_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0)]


def rate(step: int, done: float, decay_from: float) -> float:
    """Learning-rate factor: a warm-up of 40 steps, a plateau, and a linear decay from the share `decay_from` on."""
    return min(1.0, (step + 1) / 40, max(1 - done, 0.0) / max(1 - decay_from, 1e-9))


def descend(loss: Tensor, optimizers: Sequence[torch.optim.Optimizer], factor: float) -> None:
    """One step of all optimisers, at `factor` times their initial learning rates."""
    torch.autograd.backward(loss)
    for optimizer in optimizers:
        torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
