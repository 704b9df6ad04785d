"""Top-k and top-p, by compiled code where there is some; both return copies that keep what transformers' warpers keep.

Ties at the cut: top-k keeps all of them; top-p keeps the highest token ids, which is where a stable ascending sort
leaves them. So the kept set differs from transformers' only by rounding of the summed mass at the cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec import kernels

_NEVER = float("-inf")


class Top:
    """Keeps the `k` largest logits and all ties of the last, and of these the largest until their mass reaches `p`.

    The one that crosses `p` stays (arXiv 1904.09751); the rest becomes -inf. 0 for `k` and 1 for `p` keep all. Compiled
    code, which computes no gradients, applies both in one pass over the vocabulary.
    """

    def __init__(self, k: int = 0, p: float = 1.0, min_tokens_to_keep: int = 1) -> None:
        self.k, self.p = max(k, min_tokens_to_keep) if k else 0, p
        self.min_tokens_to_keep = min_tokens_to_keep

    def __repr__(self) -> str:
        return f"Top({self.k}, {self.p})"

    def __call__(self, ids: Tensor | None, logits: Tensor) -> Tensor:
        """`logits` `[n, vocab]`, -inf for the tokens that are not kept; `ids` do not matter."""
        fits = logits.is_cpu and logits.dtype == torch.float32 and not logits.requires_grad
        if fits and kernels.available():
            return kernels.keep_top(logits, self.k, self.p, self.min_tokens_to_keep)  # type: ignore[no-any-return]
        if self.k:
            last = logits.topk(min(self.k, logits.shape[-1]), dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < last, _NEVER)
        if self.p < 1:
            # A stable sort leaves the highest id last among equals; here it comes first.
            places = logits.argsort(dim=-1, stable=True).flip(-1)
            probs = torch.softmax(logits, dim=-1).gather(-1, places).double()
            mask = probs.cumsum(-1) - probs < self.p
            mask[:, : self.min_tokens_to_keep] = True
            mask = torch.empty_like(logits, dtype=torch.bool).scatter_(-1, places, mask)
            logits = logits.masked_fill(~mask, _NEVER)
        return logits
