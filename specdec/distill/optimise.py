"""Makes optimisers, takes steps with them, and writes weights."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_NO_LAYER = re.compile("embed|shared|bias|letters|lm_head|proj_out")  # matrices that are not a layer's


def make_optimizers(
    model: nn.Module, muon_rate: float = 0.004, adam_rate: float = 0.002
) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings, convolutions, biases, norms and heads."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for n, p in named if p.ndim == 2 and not _NO_LAYER.search(n)]
    others = [p for n, p in named if p.ndim != 2 or _NO_LAYER.search(n)]
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


def save(model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes the weights in `dtype` as safetensors, tied ones once; the model itself is not changed."""
    first = {weight.data_ptr(): name for name, weight in reversed(model.state_dict().items())}
    state = {k: v.to(dtype) for k, v in model.state_dict().items() if first[v.data_ptr()] == k}
    model.save_pretrained(folder, state_dict=state)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
