"""Seconds from the start of a process to its first token, specdec beside transformers, in turn.

    python benchmarks/start.py TARGET --dtype bfloat16

Both load TARGET and its tokenizer, read one prompt and write one token, in processes of their own. specdec has built
its kernels and chosen its backend before, as after its first use on a machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

from measure import Watch, table

READY = "import sys, time; began = time.perf_counter(); target, dtype = sys.argv[1:]\n"
SYSTEMS = {
    "transformers": """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(target)
model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval()
loaded = time.perf_counter()
model.generate(torch.arange(3, 67)[None], do_sample=False, max_new_tokens=1)
""",
    "specdec": """
from specdec import SpecGenerator
generator = SpecGenerator.from_pretrained(target, dtype=dtype)
loaded = time.perf_counter()
generator.generate([list(range(3, 67))], do_sample=False, max_new_tokens=1)
""",
}
DONE = "print(loaded - began, time.perf_counter() - loaded)"


def main() -> None:
    """Runs both in turn and prints medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="folder or hub id")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    watch, seconds = Watch(), {name: list[tuple[float, ...]]() for name in SYSTEMS}
    # Both packages' modules are compiled to bytecode, as pip does: the first turn does so for a checkout.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for turn in range(args.repeats + 1):
        for name, code in SYSTEMS.items():
            watch.look()
            command = [sys.executable, "-W", "ignore", "-c", READY + code + DONE, args.target, args.dtype]
            began = time.perf_counter()
            printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
            whole = time.perf_counter() - began
            if turn:  # files are in memory now
                loading, first = map(float, printed.split())
                seconds[name].append((loading, first, whole - loading - first, whole))
    medians = {name: map(statistics.median, zip(*found, strict=True)) for name, found in seconds.items()}
    rows = [[name, *(f"{one:.2f}" for one in found)] for name, found in medians.items()]
    print(table(["seconds", "imports and loading", "first token", "interpreter and its end", "in all"], rows))
    print(f"\n{watch.verdict()}")


if __name__ == "__main__":
    main()
