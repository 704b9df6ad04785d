"""What `specdec batch` costs: the library's own batches, and a run from file to file.

    python benchmarks/batch.py

library: `generate` with so many prompts at a time, those of like length together, as a program would call it.
batch:   `specdec batch`, with as many rows at once; reading, order, journal and output are in it, loading is not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import Watch, read_prompts, table

from specdec import SpecGenerator
from specdec.batch import BatchSpec, Source, run_batch
from specdec.options import bundled_models


def library(generator: SpecGenerator, prompts: list[str], size: int, options: dict[str, Any]) -> float:
    """Tokens per second of batches of prompts of like length."""
    ordered = sorted(prompts, key=len, reverse=True)
    began, tokens = time.perf_counter(), 0
    for first in range(0, len(ordered), size):
        stats = generator.generate(ordered[first : first + size], **options).stats
        assert stats is not None
        tokens += stats.num_new_tokens
    return tokens / (time.perf_counter() - began)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    pair, watch = bundled_models.pair(), Watch()
    texts = read_prompts(None, 64)
    prompts = [text[: 40 + 37 * n % 400] for n, text in enumerate((texts * args.rows)[: args.rows])]
    options = {"max_new_tokens": args.tokens}
    loading = {"dtype": "float32"}
    generator = SpecGenerator.from_pretrained(str(pair.target), str(pair.draft), **loading)
    spec = BatchSpec("generate", str(pair.target), str(pair.draft), options=options, loading=loading)
    how: dict[str, Any] = {"at_once": args.at_once, "overwrite": True}
    batches, own = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "in.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
        source, out = Source.of(Path(folder) / "in.jsonl"), Path(folder) / "out.jsonl"

        library(generator, prompts[: args.at_once], args.at_once, options)
        for _ in range(args.repeats):
            watch.look()
            batches.append(library(generator, prompts, args.at_once, options))
            done = run_batch(source, out, spec, **how)
            own.append(done.new_tokens / done.seconds)
    rows = [["library, batches", middle(batches), "1.00"], ["batch", middle(own), ratio(own, batches)]]
    print(f"{args.rows} rows, {args.at_once} at once, {args.tokens} tokens each, {args.repeats} repeats in turn\n")
    print(table(["", "tokens/s", "of the row above"], rows))
    print("\n" + watch.verdict())


def middle(values: list[float]) -> str:
    """The median."""
    return f"{statistics.median(values):.0f}"


def ratio(some: list[float], others: list[float]) -> str:
    """The median of each repeat's ratio."""
    return f"{statistics.median(a / b for a, b in zip(some, others, strict=True)):.2f}"


if __name__ == "__main__":
    main()
