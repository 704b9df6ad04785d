"""Top-k and top-p without sorting the vocabulary; both return copies that keep what transformers' warpers keep.

Ties at the cut: top-k keeps all of them; top-p keeps the highest token ids, which is where a stable ascending sort
leaves them. So the kept set differs from transformers' only by rounding of the summed mass at the cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec import kernels
from specdec.decoding import device_reads

_NEVER = float("-inf")
_COLUMN = 256
_FIRST = 256
_TIES = 16
"""The number of ties of the k-th logit that top-k followed by top-p reads; bfloat16 logits often have a few."""
_BINS = 4096
_SPAN = 24.0
"""The histogram covers this range below the largest logit; e^-24 of the largest probability is negligible."""


def top_values(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest of `logits` `[n, vocab]`, descending, and their token ids, both `[n, k]`.

    On the CPU by columns: the k largest lie in the k columns with the largest maxima, and maxima are cheap.
    """
    vocab = logits.shape[-1]
    columns = vocab // _COLUMN
    if logits.device.type != "cpu" or columns < 4 * k:
        values, ids = logits.topk(k, dim=-1)
        return values, ids
    body = columns * _COLUMN
    best = logits[:, :body].view(-1, _COLUMN, columns).amax(dim=1).topk(k, dim=-1, sorted=False).indices
    places = (best.unsqueeze(-1) + torch.arange(0, body, columns)).flatten(1)
    if body < vocab:
        tail = torch.arange(body, vocab).expand(len(logits), -1)
        places = torch.cat((places, tail), dim=1)
    values, found = logits.gather(-1, places).topk(k, dim=-1)
    return values, places.gather(-1, found)


def _ordered(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Both `[n, k]` by descending value, the highest id first among equals."""
    ids, by_id = ids.sort(dim=-1, descending=True)
    values, by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value)


def _only(like: Tensor, values: Tensor, ids: Tensor, kept: Tensor) -> Tensor:
    """`like`'s shape `[n, vocab]` with the `kept` of `values` at their `ids`, all `[n, k]`, and -inf elsewhere."""
    return torch.full_like(like, _NEVER).scatter_(-1, ids, values.masked_fill(~kept, _NEVER))


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
        last = top_values(logits, min(self.k, logits.shape[-1]))[0][:, -1:]
        return logits.masked_fill(logits < last, _NEVER)


class TopP:
    """Keeps the largest logits until their mass reaches `p`, the one that crosses included (arXiv 1904.09751).

    Peaked rows are decided among their largest 256 tokens; flat ones by a histogram of the mass over the logits, of
    which only the bin with the cut is sorted.
    """

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
        probs = torch.softmax(logits, dim=-1)
        if not device_reads.is_local(logits):  # sorting costs less than a read that decides whether it is needed
            places = torch.arange(logits.shape[-1], device=logits.device).expand_as(logits)
            values, places = _ordered(logits, places)
            return _only(logits, values, places, self.kept(probs.gather(-1, places)))
        first = min(max(_FIRST, self.min_tokens_to_keep), logits.shape[-1])
        # One more than needed: it shows whether a tie of the last one was left out.
        values, places = _ordered(*top_values(logits, min(first + 1, logits.shape[-1])))
        mass = probs.gather(-1, places)
        kept = self.kept(mass)
        if first == logits.shape[-1] or not bool((kept & (values == values[:, -1:])).any()):
            return _only(logits, values, places, kept)
        return torch.stack([self._cut(*row) for row in zip(logits, probs, strict=True)])

    def kept(self, probs: Tensor, before: float = 0.0) -> Tensor:
        """Which of the descending `probs` `[n, k]` stay; `before`: the mass of larger tokens."""
        near = device_reads.with_float64(probs)
        kept = near.double().cumsum(-1) - near + before < self.p
        if before == 0.0:
            kept[..., : self.min_tokens_to_keep] = True
        return kept.to(probs.device)

    def _cut(self, logits: Tensor, probs: Tensor) -> Tensor:
        """Filtered copy of one row `[vocab]` that keeps more than 256 tokens."""
        most = logits.max()
        if not most.isfinite():
            return logits.clone()  # the sampler raises
        below = (most - logits).mul_(_BINS / _SPAN).clamp_(max=_BINS - 1)
        bins = below.long()
        mass = torch.bincount(bins, probs, _BINS).double().cumsum(0)
        at = int(torch.searchsorted(mass, self.p))
        if at == _BINS:  # p is 1 but for rounding
            return logits.clone()
        inside = (bins == at).nonzero().squeeze(-1)
        values, ids = _ordered(logits[inside], inside)
        kept = self.kept(probs[ids], float(mass[at - 1]) if at else 0.0)
        # `threshold` is a masked fill that runs vectorised: bins up to this one stay.
        lowest = torch.nextafter(values[-1], torch.tensor(_NEVER))
        filtered = torch.nn.functional.threshold(logits, float(lowest), _NEVER)
        filtered[ids[~kept]] = _NEVER
        return filtered


class TopKTopP:
    """`TopK` followed by `TopP`, in one pass over the vocabulary."""

    def __init__(self, k: int, p: float, *, min_tokens_to_keep: int = 1) -> None:
        self.top_k = TopK(k, min_tokens_to_keep=min_tokens_to_keep)
        self.top_p = TopP(p, min_tokens_to_keep=min_tokens_to_keep)

    def __repr__(self) -> str:
        return f"TopKTopP({self.top_k.k}, {self.top_p.p})"

    def __call__(self, ids: Tensor | None, logits: Tensor) -> Tensor:
        k = self.top_k.k
        if (found := _compiled(logits, k, self.top_p.p, self.top_p.min_tokens_to_keep)) is not None:
            return found
        if k >= logits.shape[-1]:
            return self.top_p(ids, logits)
        if not device_reads.is_local(logits):
            return self.top_p(ids, self.top_k(ids, logits))
        values, places = _ordered(*top_values(logits, min(k + _TIES, logits.shape[-1])))
        last = values[:, k - 1 : k]
        if bool((values[:, -1:] == last).any()):
            return self.top_p(ids, self.top_k(ids, logits))
        values.masked_fill_(values < last, _NEVER)
        return _only(logits, values, places, self.top_p.kept(torch.softmax(values, dim=-1)))
