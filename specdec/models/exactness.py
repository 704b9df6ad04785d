"""What a target's layers promise: whether the tokens that share a pass can change one another's logits."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from specdec.models.int8 import Int8Linear
from specdec.models.offload import execution_device

Exactness = Literal["exact", "rounding", "row-dependent"]
_OUTLIER = 100.0  # far beyond what LLM.int8() still takes for an ordinary activation (6)


@torch.no_grad()
def exactness(model: nn.Module, dtype: torch.dtype) -> Exactness:
    """What holds of a text decoded with a draft, beside the same call without one.

    "exact": it is the same; "rounding": the same but for near-ties, since kernels round differently in passes of
    different sizes and something in the model is in half precision; "row-dependent": it may differ, as some quantized
    layers look at all rows of a pass. Ordinary layers are known to compute every row on its own; of others, one of each
    kind is tried out.
    """
    kinds = {_kind(module): module for module in model.modules() if hasattr(module, "in_features")}
    unknown = [module for kind, module in kinds.items() if kind not in _KNOWN]
    if not all(_rows_independent(module, _row(module, dtype)) for module in unknown):
        return "row-dependent"
    half = dtype not in (torch.float32, torch.float64)
    return "rounding" if half or any(_rounds_input(module, _row(module, dtype)) for module in unknown) else "exact"


def _kind(module: nn.Module) -> tuple[type, type]:
    """Layers of one kind compute alike: their class, and that of their weight, which quantization replaces."""
    return type(module), type(getattr(module, "weight", None))


_KNOWN = ((nn.Linear, nn.Parameter), (Int8Linear, nn.Parameter))


def _row(layer: Any, dtype: torch.dtype) -> Tensor:
    """An input `[in]` to try a layer with, where it computes."""
    device = execution_device(layer) if any(True for _ in layer.parameters()) else torch.device("cpu")
    return torch.linspace(-1, 1, layer.in_features, device=device, dtype=dtype)


def _rows_independent(layer: Any, row: Tensor) -> bool:
    """Whether the output for `row` `[in]` is the same, to the last bit, beside zeros and beside outliers."""
    if any(weight.is_meta for weight in layer.parameters()):
        return False  # read in every pass, and not there to be tried
    quiet, loud = (layer(torch.stack([row, torch.full_like(row, other)])) for other in (0.0, _OUTLIER))
    return torch.equal(quiet[0], loud[0])


def _rounds_input(layer: Any, row: Tensor) -> bool:
    """Whether a layer rounds its input, here `row` `[in]`, to half precision, which makes much of tiny differences."""
    halves = (row.to(half).to(row.dtype) for half in (torch.bfloat16, torch.float16))
    return any(torch.equal(layer(row[None]), layer(half[None])) for half in halves)
