"""Top-k, top-p and draws of specdec against transformers' warpers and torch: interleaved runs, medians and ratios.

python benchmarks/warpers.py --vocab 49152 --rows 1
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from specdec import kernels
from specdec.decoding import noise
from specdec.decoding.processors import Top

Warper = Callable[[Tensor | None, Tensor], Tensor]


def logits_of(kind: str, rows: int, vocab: int) -> Tensor:
    """`[rows, vocab]`: "peaked" as a trained model's, or "flat", where top-p 0.9 keeps most tokens."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(rows, vocab, generator=generator)
    if kind == "flat":
        return noise * 0.8
    rank = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(rows)]) + 1
    return noise * 0.5 - 1.5 * rank.float().log()


def draws(ids: Tensor | None, logits: Tensor) -> Tensor:
    """Ours, for each row at an address of its own."""
    return torch.tensor([noise.draw(row, noise.key(0, noise.DRAW, i)) for i, row in enumerate(logits)])


def multinomial(ids: Tensor | None, logits: Tensor) -> Tensor:
    """Torch's, as transformers draws."""
    return torch.multinomial(logits.softmax(-1), 1)[:, 0]


def cases() -> dict[str, tuple[str, Warper, Warper]]:
    """Name -> kind of logits, ours, theirs."""
    top_k, top_p = TopKLogitsWarper(50), TopPLogitsWarper(0.9)
    return {
        "top-k 50": ("peaked", Top(50), top_k),
        "top-k 50 + top-p 0.9": ("peaked", Top(50, 0.9), lambda ids, x: top_p(ids, top_k(ids, x))),
        "top-k 50 + top-p 0.9, flat": ("flat", Top(50, 0.9), lambda ids, x: top_p(ids, top_k(ids, x))),
        "top-p 0.9": ("peaked", Top(p=0.9), top_p),
        "top-p 0.9, flat": ("flat", Top(p=0.9), top_p),
        "draw": ("peaked", draws, multinomial),
        "draw, flat": ("flat", draws, multinomial),
    }


def milliseconds(warper: Warper, logits: Tensor) -> float:
    """One timed call."""
    start = perf_counter()
    warper(None, logits)
    if logits.is_cuda:
        torch.cuda.synchronize()
    return (perf_counter() - start) * 1e3


def main() -> None:
    """Prints one line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--without-kernels", action="store_true", help="as where there is no compiler")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.without_kernels:
        kernels.available = lambda: False
    how = "with kernels" if kernels.available() else "without kernels"
    print(f"{args.rows} x {args.vocab}, float32, {args.device}, {args.threads} thread(s), {how}, medians")
    print(f"{'case':28}{'kept':>8}{'specdec ms':>12}{'transformers ms':>17}{'ratio':>8}{'same set':>10}")
    for name, (kind, ours, theirs) in cases().items():
        logits = logits_of(kind, args.rows, args.vocab).to(args.device)
        kept, verdict = 1, ""
        if ours is not draws:
            mine, other = ours(None, logits).isfinite(), theirs(None, logits).isfinite()
            differ = int((mine != other).sum())
            kept, verdict = int(mine.sum()) // args.rows, f"{differ} off" if differ else "yes"
        times = [(milliseconds(ours, logits), milliseconds(theirs, logits)) for _ in range(args.repeats)]
        ratio = median(b / a for a, b in times)
        a, b = median(a for a, _ in times), median(b for _, b in times)
        print(f"{name:28}{kept:>8}{a:>12.2f}{b:>17.2f}{ratio:>7.1f}x{verdict:>10}")


if __name__ == "__main__":
    main()
