"""Plain decoding beside busy programs: all threads, fewer as the engine decides, and one, in turn.

python benchmarks/crowded.py --target MODEL --busy 0 1 4
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys

import torch
from measure import table

from specdec import SpecGenerator
from specdec.engine import openmp

WAYS = {"all threads": (math.inf, None), "as it comes": (openmp._WAITING, None), "one thread": (math.inf, 1)}


def main() -> None:
    """Prints tokens per second, medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="zoo:python-code")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    generator, threads = SpecGenerator.from_pretrained(args.target, prefix_cache=False), torch.get_num_threads()
    call = {"max_new_tokens": args.tokens, "max_time": 20, "do_sample": False, "eos_token_id": []}
    rows = []
    for busy in args.busy:
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
        rates: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(args.repeats):
            for way, (waiting, count) in WAYS.items():
                openmp._WAITING = waiting
                torch.set_num_threads(count or threads)
                stats = generator.generate([list(range(1000, 1020))], **call).stats
                assert stats is not None
                rates[way].append(stats.tokens_per_second)
        for other in others:
            other.kill()
        rows.append([str(busy), *(f"{statistics.median(rates[way]):.1f}" for way in WAYS)])
    print(f"{threads} threads, tokens per second, {args.tokens} tokens, medians of {args.repeats} in turn\n")
    print(table(["busy programs", *WAYS], rows))


if __name__ == "__main__":
    main()
