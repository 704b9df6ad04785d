"""How far a batch and a service scale, by a model of the cluster that is checked where there are machines.

    python benchmarks/scaling.py --measure FILE    # what a worker of one CPU does, then real runs over Ray
    python benchmarks/scaling.py --figures FILE    # the model beside these runs, and up to 64 workers

The model: a worker takes a number of rows at once, and all of them advance at the speed that was measured for as many
rows that come and go; rows that wait stand in blocks before the workers, as `specdec batch --ray` sends them. The
driver takes blocks one after the other, each for the time that was measured with workers that do nothing. Nothing else
is shared. Workers are alike and none fails; models are loaded already; the network costs nothing. In a service requests
arrive at random (Poisson), and a request goes to the replica that its conversation hashes to, or to the least busy.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from measure import table

from specdec.batch import BatchSpec
from specdec.batch.worker import OutputLine

SIZES = (1, 2, 4, 8, 16, 32)
WORKERS = (1, 2, 4, 8, 16, 32, 64)
AT_ONCE = (8, 32)  # rows of a worker, of which half are a block
MANY = 20_000  # rows of the curve


@dataclass(frozen=True)
class Speed:
    """Tokens per second of each of the rows that share passes, interpolated linearly between measured numbers."""

    rows: list[int]
    tokens: list[float]

    def __call__(self, rows: int) -> float:
        at = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        (a, b), (x, y) = self.rows[at - 1 : at + 1], self.tokens[at - 1 : at + 1]
        share = (min(max(rows, self.rows[0]), self.rows[-1]) - a) / (b - a)
        return x + share * (y - x)


@dataclass
class Worker:
    """Rows that advance together: each is done when the clock of the worker, in tokens of a row, reaches its end."""

    speed: Speed
    at_once: int
    clock: float = 0.0
    now: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    waiting: deque[tuple[int, float]] = field(default_factory=deque)

    @property
    def busy(self) -> int:
        """Rows that are here."""
        return len(self.ends) + len(self.waiting)

    def advance(self, now: float) -> None:
        """Lets the rows go on until `now`, before which none ends."""
        if self.ends:
            self.clock += (now - self.now) * self.speed(len(self.ends))
        self.now = now

    def add(self, row: int, tokens: float, now: float) -> None:
        """A row comes."""
        self.advance(now)
        self.waiting.append((row, tokens))
        self._begin()

    def next_end(self) -> float:
        """When the next row ends, as things stand."""
        return self.now + (self.ends[0][0] - self.clock) / self.speed(len(self.ends)) if self.ends else math.inf

    def end(self) -> int:
        """The row that ends now."""
        self.advance(self.next_end())
        _, row = heappop(self.ends)
        self._begin()
        return row

    def _begin(self) -> None:
        while self.waiting and len(self.ends) < self.at_once:
            row, tokens = self.waiting.popleft()
            heappush(self.ends, (self.clock + tokens, row))


def batch_answers(
    lengths: list[int], workers: int, speed: Speed, at_once: int, driver: float, size: int
) -> list[tuple[float, int]]:
    """When the driver has how many answers; `lengths` are the rows' new tokens, `size` is that of a block.

    `driver` is what a block costs it, in seconds.
    """
    pool = [Worker(speed, at_once) for _ in range(workers)]
    blocks = deque(list(range(i, min(i + size, len(lengths)))) for i in range(0, len(lengths), size))
    left: dict[int, int] = {}  # rows of a block that are not done, by its number
    of = {row: row // size for row in range(len(lengths))}
    home: dict[int, int] = {}
    ends: list[tuple[float, int, int]] = []  # when a worker has news, as last heard
    answers, version = [(0.0, 0)], [0] * workers

    def hear(w: int) -> None:
        version[w] += 1
        if pool[w].ends:
            heappush(ends, (pool[w].next_end(), w, version[w]))

    def send(w: int, now: float) -> None:
        if blocks:
            rows = blocks.popleft()
            number = of[rows[0]]
            left[number], home[number] = len(rows), w
            for row in rows:
                pool[w].add(row, lengths[row], now)
            hear(w)

    for _ in range(4):
        for w in range(workers):
            send(w, 0.0)
    while ends:
        now, w, heard = heappop(ends)
        if heard != version[w]:
            continue
        number = of[pool[w].end()]
        left[number] -= 1
        hear(w)
        if not left[number]:  # a block comes back as a whole
            free, done = answers[-1]
            answers.append((max(free, now) + driver, done + min(size, len(lengths) - number * size)))
            send(w, now)
    return answers


def block_size(rows: int, workers: int, at_once: int) -> int:
    """That of `specdec batch --ray`."""
    return max(1, min(128, at_once // 2, rows // (8 * workers)))


def later(answers: list[tuple[float, int]]) -> float:
    """Seconds from the first quarter of the rows to the last one."""
    return answers[-1][0] - next(at for at, done in answers if 4 * done >= answers[-1][1])


def service_seconds(
    lengths: list[int], workers: int, speed: Speed, at_once: int, rate: float, *, sticky: bool, seed: int = 0
) -> list[float]:
    """Seconds from arrival to the last token of requests that arrive `rate` a second, in the order of their ends."""
    rng, pool = random.Random(seed), [Worker(speed, at_once) for _ in range(workers)]
    arrived: list[float] = []
    seconds: list[float] = []
    clock = 0.0
    for row, tokens in enumerate(lengths):
        clock += rng.expovariate(rate)
        while (first := min(pool, key=Worker.next_end)).next_end() <= clock:
            ended = first.end()
            seconds.append(first.now - arrived[ended])
        chosen = rng.choice(pool) if sticky else min(pool, key=lambda worker: worker.busy)
        arrived.append(clock)
        chosen.add(row, tokens, clock)
    while (first := min(pool, key=Worker.next_end)).ends:
        ended = first.end()
        seconds.append(first.now - arrived[ended])
    return seconds


def measured(rows: int, tokens: int, at_once: int) -> dict[str, Any]:
    """What one CPU does alone, what a block costs the driver, and real runs over Ray at one and two such workers."""
    from specdec.batch import Source, connect

    command = [sys.executable, __file__, "--one-cpu", str(tokens)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, env=_one_thread()).stdout
    figures: dict[str, Any] = {**json.loads(found.splitlines()[-1]), "at_once": at_once, "runs": {}}
    figures["lengths"] = [tokens // 4 + 29 * n % (3 * tokens // 2) for n in range(rows)]
    asked = [
        {"prompt": prompt, "options": {"max_new_tokens": length}}
        for prompt, length in zip(_prompts(rows), figures["lengths"], strict=True)
    ]
    spec = BatchSpec("generate", *_pair(), options={"eos_token_id": []}, loading={"dtype": "float32"})
    sys.path.remove(str(Path(__file__).parent))  # Ray would take requests.py beside this file for a package
    connect("local")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
        source = Source.of(Path(folder) / "in.jsonl")
        for workers in (1, 2):
            figures["runs"][workers] = later(_real(source, spec, workers, at_once))
        (Path(folder) / "in.txt").write_text("x\n" * 4000)
        idle = _real(Source.of(Path(folder) / "in.txt"), Idle("generate", spec.target), 1, at_once)
        figures["driver"] = later(idle) / 3000 * block_size(4000, 1, at_once)
    return {**figures, "curves": {size: scaling(figures, size) for size in AT_ONCE}}


def _real(source: Any, spec: Any, workers: int, at_once: int) -> list[tuple[float, int]]:
    """When a real run had how many answers."""
    from specdec.batch import WorkerPool, over_ray, run_batch

    reports: list[tuple[float, int]] = []
    start = over_ray(WorkerPool(workers, workers, cpus=1, at_once=at_once), source.rows)
    out = source.path.with_name("out.jsonl")
    run_batch(
        source, out, spec, start=start, overwrite=True, tell=lambda p: reports.append((time.perf_counter(), p.done))
    )
    return reports


class Idle(BatchSpec):
    """Work that costs its workers nothing."""

    def start(self) -> Any:
        """What answers a row at once."""
        return lambda row: OutputLine(row.number, b'{"output": ""}\n', 1)


def one_cpu(tokens: int) -> dict[str, Any]:
    """Tokens per second of each row for every number of rows that run, where a new one comes for each that ends."""
    from specdec import SpecGenerator

    target, draft = _pair()
    generator = SpecGenerator.from_pretrained(target, draft, dtype="float32")
    speeds = []
    for size in SIZES:
        ends = []

        def answer(prompt: str, ends: list[float] = ends) -> None:
            generator.generate(prompt, max_new_tokens=tokens, eos_token_id=[])
            ends.append(time.perf_counter())

        count = 5 * size + 8
        with ThreadPoolExecutor(size) as pool:
            list(pool.map(answer, _prompts(count)))
        speeds.append((count - 2 * size) * tokens / size / (ends[-size - 1] - ends[size - 1]))
    return {"rows": list(SIZES), "tokens": speeds}


def _pair() -> tuple[str, str]:
    from specdec.options import bundled_models

    return str(bundled_models.pair().target), str(bundled_models.pair().draft)


def _prompts(count: int) -> list[str]:
    from measure import read_prompts

    texts = read_prompts(None, 64)
    return [text[: 40 + 37 * n % 300] for n, text in enumerate((texts * count)[:count])]


def _one_thread() -> dict[str, str]:
    import os

    return {**os.environ, "OMP_NUM_THREADS": "1"}


def scaling(figures: dict[str, Any], at_once: int) -> list[tuple[int, float]]:
    """Rows per second by the model, from the number of workers and of rows that each takes at once."""
    rng, speed = random.Random(0), Speed(figures["rows"], figures["tokens"])
    many = [rng.choice(figures["lengths"]) for _ in range(MANY)]
    how = (speed, at_once, figures["driver"], at_once // 2)
    return [(workers, MANY / batch_answers(many, workers, *how)[-1][0]) for workers in WORKERS]


def report(figures: dict[str, Any]) -> None:
    """The model beside the real runs, and beyond them."""
    speed = Speed(figures["rows"], figures["tokens"])
    lengths, at_once, driver = figures["lengths"], figures["at_once"], figures["driver"]
    rows = []
    for workers, real in sorted(figures["runs"].items()):
        size = block_size(len(lengths), int(workers), at_once)
        seconds = later(batch_answers(lengths, int(workers), speed, at_once, driver, size))
        rows.append([workers, f"{real:.1f}", f"{seconds:.1f}", f"{seconds / real - 1:+.0%}"])
    print(f"driver: {driver * 1e3:.1f} ms a block\n")
    print(table(["workers", "real seconds after the first quarter", "model", "difference"], rows))
    rng = random.Random(0)
    curves = figures["curves"]
    cells = {
        size: [f"{pace:.0f} ({pace / n / curve[0][1]:.0%})" for n, pace in curve] for size, curve in curves.items()
    }
    print(f"\n{MANY} rows: rows per second, and of N times one worker\n")
    header = ["workers", *(f"{size} rows at once" for size in curves)]
    print(table(header, [[str(n), *row] for n, *row in zip(WORKERS, *cells.values(), strict=True)]))
    most = at_once * speed(at_once) / statistics.mean(lengths)  # requests a second that a replica can end
    rows = []
    for workers in WORKERS:
        asked = [rng.choice(lengths) for _ in range(100 * workers + 500)]
        cells = []
        for sticky in (False, True):
            took = sorted(service_seconds(asked, workers, speed, at_once, 0.6 * most * workers, sticky=sticky))
            cells += [f"{took[len(took) // 2]:.2f}", f"{took[int(0.95 * len(took))]:.2f}"]
        rows.append([str(workers), f"{0.6 * most * workers:.0f}", *cells])
    print("\nA service at 60% of what its replicas can end\n")
    header = ["replicas", "requests/s", "least busy: median s", "95%", "by conversation: median s", "95%"]
    print(table(header, rows))


def main() -> None:
    """Measures, or reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, help="Write the figures of this machine there.")
    parser.add_argument("--figures", type=Path, help="Read them.")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--one-cpu", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one_cpu is not None:
        print(json.dumps(one_cpu(args.one_cpu)))
    if args.measure is not None:
        args.measure.write_text(json.dumps(measured(args.rows, args.tokens, args.at_once)) + "\n")
    if args.figures is not None:
        report(json.loads(args.figures.read_text()))


if __name__ == "__main__":
    main()
