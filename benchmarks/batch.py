"""What `specdec batch` costs: the library's own batches, a run from file to file in this process, and one over Ray.

    python benchmarks/batch.py                 # in this process
    python benchmarks/batch.py --ray           # and over Ray with one worker, which has all CPUs

library:  `generate` with so many prompts at a time, those of like length together, as a program would call it.
embedded: `specdec batch`, with as many rows at once; reading, order, journal and output are in it, loading is not.
ray:      the same over one worker. As workers load models and Ray starts actors while the clock runs, both runs are
          also compared by their pace after the first quarter of the rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import Watch, read_prompts, table

from specdec import SpecGenerator
from specdec.batch import BatchSpec, Progress, Source, WorkerPool, connect, embedded, over_ray, run_batch
from specdec.options import bundled_models


class Paces:
    """Tokens per second of every repeat, of the whole run and after its first quarter."""

    def __init__(self) -> None:
        self.whole: list[float] = []
        self.later: list[float] = []

    def of_run(self, execute: Callable[[Callable[[Progress], None]], Progress]) -> None:
        """Runs it once."""
        reports: list[tuple[float, Progress]] = []
        began = time.perf_counter()
        end = execute(lambda progress: reports.append((time.perf_counter(), progress)))
        seconds = time.perf_counter() - began
        at, quarter = next(one for one in reports if 4 * one[1].done >= end.total)
        self.whole.append(end.new_tokens / seconds)
        self.later.append((end.new_tokens - quarter.new_tokens) / (reports[-1][0] - at))


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
    parser.add_argument("--ray", action="store_true")
    args = parser.parse_args()
    pair, watch = bundled_models.pair(), Watch()
    texts = read_prompts(None, 64)
    prompts = [text[: 40 + 37 * n % 400] for n, text in enumerate((texts * args.rows)[: args.rows])]
    options = {"max_new_tokens": args.tokens}
    loading = {"dtype": "float32"}
    generator = SpecGenerator.from_pretrained(str(pair.target), str(pair.draft), **loading)
    spec = BatchSpec("generate", str(pair.target), str(pair.draft), options=options, loading=loading)
    ready = embedded(args.at_once)(spec)
    own, over = Paces(), Paces()
    batches: list[float] = []
    if args.ray:
        sys.path.remove(str(Path(__file__).parent))  # Ray would take requests.py beside this file for a package
        connect("local")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "in.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
        source, out = Source.of(Path(folder) / "in.jsonl"), Path(folder) / "out.jsonl"

        def from_file(start: Any) -> Callable[[Callable[[Progress], None]], Progress]:
            return lambda tell: run_batch(source, out, spec, start=start, overwrite=True, tell=tell)

        library(generator, prompts[: args.at_once], args.at_once, options)
        for _ in range(args.repeats):
            watch.look()
            batches.append(library(generator, prompts, args.at_once, options))
            own.of_run(from_file(lambda _: ready))
            if args.ray:
                over.of_run(from_file(over_ray(WorkerPool(1, 1, at_once=args.at_once), args.rows)))
    rows = [["library, batches", middle(batches), "", "1.00"]]
    rows.append(["embedded", middle(own.whole), middle(own.later), ratio(own.whole, batches)])
    if args.ray:
        rows.append(
            ["ray, one worker", middle(over.whole), middle(over.later), f"{ratio(over.later, own.later)} (pace)"]
        )
    print(f"{args.rows} rows, {args.at_once} at once, {args.tokens} tokens each, {args.repeats} repeats in turn\n")
    print(table(["", "tokens/s", "after the first quarter", "of the row above"], rows))
    print("\n" + watch.verdict())


def middle(values: list[float]) -> str:
    """The median."""
    return f"{statistics.median(values):.0f}"


def ratio(some: list[float], others: list[float]) -> str:
    """The median of each repeat's ratio."""
    return f"{statistics.median(a / b for a, b in zip(some, others, strict=True)):.2f}"


if __name__ == "__main__":
    main()
