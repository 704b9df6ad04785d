"""Top-k and top-p, by compiled code where there is some; both return copies that keep what transformers' warpers keep.

Ties at the cut: top-k keeps all of them; top-p keeps the highest token ids, which is where a stable ascending sort
leaves them. So the kept set differs from transformers' only by rounding of the summed mass at the cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec import kernels
from specdec.decoding import device_reads

_NEVER = float("-inf")


def _compiled(logits: Tensor, k: int, p: float, least: int) -> Tensor | None:
    """The filtered logits, by compiled code where that applies (it computes no gradients)."""
    fits = device_reads.is_local(logits) and logits.dtype == torch.float32 and not logits.requires_grad
    if fits and kernels.available():
        return kernels.keep_top(logits, k, p, least)  # type: ignore[no-any-return]
    return None


class TopK:
    """Keeps the `k` largest logits and all ties of the last of them; the rest becomes -inf."""

    def __init__(self, k: int, *, min_tokens_to_keep: int = 1) -> None:
        if not isinstance(k, int) or k <= 0:
            raise ValueError("`top_k` must be a positive integer")
        self.k = max(k, min_tokens_to_keep)

    def __repr__(self) -> str:
        return f"TopK({self.k})"

    def __call__(self, ids: Tensor | None, logits: Tensor) -> Tensor:
        if (found := _compiled(logits, self.k, 1.0, 1)) is not None:
            return found
        last = logits.topk(min(self.k, logits.shape[-1]), dim=-1).values[:, -1:]
        return logits.masked_fill(logits < last, _NEVER)


class TopP:
    """Keeps the largest logits until their mass reaches `p`, the one that crosses included (arXiv 1904.09751)."""

    def __init__(self, p: float, *, min_tokens_to_keep: int = 1) -> None:
        if not 0 <= p <= 1:
            raise ValueError("`top_p` must be between 0 and 1")
        self.p = float(p)
        self.min_tokens_to_keep = min_tokens_to_keep

    def __repr__(self) -> str:
        return f"TopP({self.p})"

    def __call__(self, ids: Tensor | None, logits: Tensor) -> Tensor:
        if (found := _compiled(logits, 0, self.p, self.min_tokens_to_keep)) is not None:
            return found
        # A stable sort leaves the highest id last among equals; here it comes first.
        places = logits.argsort(dim=-1, stable=True).flip(-1)
        probs = device_reads.with_float64(torch.softmax(logits, dim=-1).gather(-1, places)).double()
        kept = probs.cumsum(-1) - probs < self.p
        kept[:, : self.min_tokens_to_keep] = True
        kept = torch.empty_like(logits, dtype=torch.bool).scatter_(-1, places, kept.to(logits.device))
        return logits.masked_fill(~kept, _NEVER)


class TopKTopP:
    """`TopK` followed by `TopP`; compiled code applies both in one pass over the vocabulary."""

    def __init__(self, k: int, p: float, *, min_tokens_to_keep: int = 1) -> None:
        self.top_k = TopK(k, min_tokens_to_keep=min_tokens_to_keep)
        self.top_p = TopP(p, min_tokens_to_keep=min_tokens_to_keep)

    def __repr__(self) -> str:
        return f"TopKTopP({self.top_k.k}, {self.top_p.p})"

    def __call__(self, ids: Tensor | None, logits: Tensor) -> Tensor:
        if (found := _compiled(logits, self.top_k.k, self.top_p.p, self.top_p.min_tokens_to_keep)) is not None:
            return found
        return self.top_p(ids, self.top_k(ids, logits))
