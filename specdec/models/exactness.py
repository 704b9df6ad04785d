"""Whether tokens that share a pass can change one another's logits."""

from __future__ import annotations

import random
from typing import Any, Literal

import torch
from torch import Tensor, nn

from specdec.core.tree import Tree
from specdec.core.work import Work
from specdec.kernels import PackedLinear
from specdec.models.backends.int8_linear import Int8Linear
from specdec.models.hf.derived import media_modules
from specdec.models.hf.device_hooks import execution_device
from specdec.models.probe import trial_encoding
from specdec.models.protocols import ModelSpec, Session

Exactness = Literal["strict", "exact", "rounding", "row-dependent"]
_OUTLIER = 100.0  # far beyond LLM.int8()'s threshold for outliers (6)
_TEXT, _BRANCHING = 80, 40  # tokens of the trial text, and after how many of them it branches
_WIDTHS = (1, 1, 2, 3, 1, 5, 8, 16, 43)  # tokens of the passes over it
_LONGER = 300  # tokens of a row beside it, for which buffers grow


@torch.no_grad()
def exactness(model: nn.Module, dtype: torch.dtype) -> Exactness:
    """How a text decoded with a draft compares with the same call without one.

    "exact": it is the same. "rounding": the same but for near-ties, as kernels round differently in passes of other
    sizes and something in the model is in half precision, or rows are in 8 bits. "row-dependent": it may differ, as
    some quantized layers look at all rows of a pass. Ordinary layers compute each row by itself; one layer of each
    other kind is tried.
    """
    kinds = {_kind(module): module for module in model.modules() if hasattr(module, "in_features")}
    layers: list[Any] = [module for kind, module in kinds.items() if kind not in _ORDINARY]
    # Adapters around embeddings take ids.
    layers = [m for m in layers if not isinstance(getattr(m, "get_base_layer", lambda: None)(), nn.Embedding)]
    # Rows in 8 bits turn the last bit of a float32 into a step, now and then.
    half = dtype not in (torch.float32, torch.float64) or any(getattr(m, "rounds", False) for m in model.modules())
    try:
        if not all(_rows_independent(module, _row(module, dtype)) for module in layers):
            return "row-dependent"
        return "rounding" if half or any(_rounds_input(module, _row(module, dtype)) for module in layers) else "exact"
    except Exception:  # a layer whose input is no row, or that does not run yet
        return "row-dependent"


@torch.no_grad()
def strict_obstacle(language: ModelSpec) -> str | None:
    """Why logits may depend on more than their text: a layer of another kind, or the result of trying.

    Returns None if packed layers multiply all weights, and logits are equal, bit for bit, in passes of other widths, as
    branches, beside other rows and in larger buffers. Trying is not enough: half precision hides most differences.
    """
    if name := _other_layer(language):
        return f"`{name}` is no packed layer"
    source = random.Random(0)
    most = min(language.vocab_size, language.num_ids)
    longer = [source.randrange(3, most) for _ in range(min(_LONGER, language.max_positions or _LONGER))]
    text = longer[:_TEXT]
    encoding, session = trial_encoding(language), language.session()
    parts, other, whole = (session.add(encoding) for _ in range(3))
    narrow, first = [], 0
    for width in _WIDTHS:
        narrow.append(_read(session, [parts], [text[first : first + width]])[0])
        first += width
    session.truncate([parts], [0])
    start_beside, start = _read(session, [other, parts], [longer[:7], text[:_BRANCHING]])
    suffix = Tree.chain(longer[7:])
    branches = Tree([text[_BRANCHING], 3, 4, text[_BRANCHING + 1], 3], [-1, -1, 0, 0, 1])
    end_beside, branch_end = session.run([Work(other, suffix, len(suffix)), Work(parts, branches, len(branches))])
    session.commit([other, parts], [list(range(len(suffix))), [0, 3]])
    end = _read(session, [parts], [text[_BRANCHING + 2 :]])[0]
    expected = _read(session, [whole], [longer])[0]
    if not torch.equal(torch.cat(narrow), expected[: len(text)]):
        return "passes of other widths give other logits"
    if not torch.equal(torch.cat([start, branch_end.logits[[0, 3]], end]), expected[: len(text)]):
        return "branches change logits"
    if not torch.equal(torch.cat([start_beside, end_beside.logits]), expected):
        return "other rows beside them change logits"
    return None


def _other_layer(language: ModelSpec) -> str | None:
    """The first layer that is not packed; encoders and media modules do not count: their passes are always alike."""
    outside = [language.model.get_encoder()] if language.is_encoder_decoder else media_modules(language.model).values()
    skipped = {module for part in outside for module in part.modules()}
    for name, module in language.model.named_modules():
        if module in skipped or isinstance(module, PackedLinear | nn.Embedding):
            continue
        if any(weight.dim() > 1 for weight in module.parameters(recurse=False)):
            return name
    return None


def _read(session: Session, rows: list[int], texts: list[list[int]]) -> list[Tensor]:
    """Extends rows by texts in one pass; returns their logits."""
    outputs = session.run([Work.text(row, text, len(text)) for row, text in zip(rows, texts, strict=True)])
    session.commit(rows, [list(range(len(text))) for text in texts])
    return [out.logits for out in outputs]


def _kind(module: nn.Module) -> tuple[type, type]:
    """Layers of one kind compute alike: their class and the class of their weight, which quantization replaces."""
    return type(module), type(getattr(module, "weight", None))


_ORDINARY = ((nn.Linear, nn.Parameter), (Int8Linear, nn.Parameter))


def _row(layer: Any, dtype: torch.dtype) -> Tensor:
    return torch.linspace(-1, 1, layer.in_features, device=execution_device(layer), dtype=dtype)


def _rows_independent(layer: Any, row: Tensor) -> bool:
    """Whether the output for `row` `[in]` is the same, bit for bit, beside zeros and beside outliers."""
    if any(weight.is_meta for weight in layer.parameters()):
        return False  # offloaded, so it cannot be tried
    quiet, loud = (layer(torch.stack([row, torch.full_like(row, other)])) for other in (0.0, _OUTLIER))
    return torch.equal(quiet[0], loud[0])


def _rounds_input(layer: Any, row: Tensor) -> bool:
    halves = (row.to(half).to(row.dtype) for half in (torch.bfloat16, torch.float16))
    return any(torch.equal(layer(row[None]), layer(half[None])) for half in halves)
