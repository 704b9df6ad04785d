"""Sampled texts in the packed backend: tokens chosen in C++, and as where there is no C++; all texts must agree.

    python benchmarks/sampled.py [--dtype bfloat16] [--count 6] [--tokens 96] [--repeats 3]

The package's code pair, plain and with its draft. "Before": filters and draws are torch's and NumPy's, and a draft's
chain of guesses takes a call for each. Ratios are the median over prompts of the ratio of median seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from measure import Watch, interleaved, ratio, read_prompts, table

from specdec import SpecGenerator, kernels
from specdec.decoding.samplers import CoupledSampler
from specdec.options.bundled_models import pair

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "temperature 0.8": {"temperature": 0.8},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
}


@contextmanager
def before() -> Iterator[None]:
    """As where no kernels are."""
    with (
        patch.object(kernels, "available", return_value=False),
        patch.object(CoupledSampler, "choice", return_value=None),
    ):
        yield


def main() -> None:
    """Prints one line per kind of sampling."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=Path, help="as for `specdec bench`; held-out code of the package otherwise")
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    ours, how = pair(), {"dtype": args.dtype, "backend": "packed", "prefix_cache": False}
    generators = {
        "plain": SpecGenerator.from_pretrained(str(ours.target), **how),
        "assisted": SpecGenerator.from_pretrained(str(ours.target), str(ours.draft), **how),
    }
    prompts, watch, rows = read_prompts(args.prompts, args.count), Watch(), []
    for kind, options in KINDS.items():
        texts: dict[str, list[int]] = {}
        run = {"max_new_tokens": args.tokens, "do_sample": True, "seed": 1, **options}
        systems = {
            f"{name}, {when}": system(generator, run, texts, how)
            for name, generator in generators.items()
            for when, how in (("now", nullcontext), ("before", before))
        }
        found = interleaved(systems, prompts, args.repeats, watch, warm_up=True)
        sizes = [len(texts[prompt]) for prompt in prompts]
        for name in generators:
            old, new = found[f"{name}, before"], found[f"{name}, now"]
            paces = [median(1e3 * median(s) / n for s, n in zip(one, sizes, strict=True)) for one in (old, new)]
            rows.append([kind, name, *(f"{pace:.2f}" for pace in paces), f"{ratio(old, new):.2f}x"])
    print(table(["", "", "before, ms per token", "now, ms per token", "ratio"], rows))
    print(f"\nevery text equal, with its draft and without\n{watch.verdict()}")


def system(
    generator: SpecGenerator, run: dict[str, Any], texts: dict[str, list[int]], how: Callable[[], Any]
) -> Callable[[str], None]:
    """Writes after a prompt; raises SystemExit where others wrote something else."""

    def write(prompt: str) -> None:
        with how():
            [made] = generator.generate(prompt, **run).new_tokens()
        if texts.setdefault(prompt, made) != made:
            raise SystemExit(f"texts differ after {prompt!r}")

    return write


if __name__ == "__main__":
    main()
