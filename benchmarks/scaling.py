"""How far a batch and a service scale, by a model of the cluster that is checked where there are machines.

    python benchmarks/scaling.py --measure figures.json     # what a worker of one CPU does, then real runs over Ray
    python benchmarks/scaling.py --figures figures.json     # the model beside these runs, and up to 64 workers

The model: a worker takes so many rows at once, and all of them advance at the speed that was measured for as many rows;
rows that wait stand in blocks before the workers, as `specdec batch --ray` sends them. The driver takes each row's
answer by itself, for the time that was measured, and nothing else is shared. Workers are alike and none fails; models
are loaded already; the network costs nothing. In a service requests arrive at random (Poisson), and a request goes to
the replica that its conversation hashes to, or to the least busy of all.
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
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from measure import table

SIZES = (1, 2, 4, 8, 16, 32)
WORKERS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Speed:
    """Tokens per second of each of so many rows that share their passes, between measured numbers by a line."""

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


def batch_seconds(lengths: list[int], workers: int, speed: Speed, at_once: int, driver: float, size: int) -> float:
    """Seconds until the driver has every answer; `lengths` are the rows' new tokens, `size` is that of a block."""
    pool = [Worker(speed, at_once) for _ in range(workers)]
    blocks = deque(list(range(i, min(i + size, len(lengths)))) for i in range(0, len(lengths), size))
    left: dict[int, int] = {}  # rows of a block that are not done, by its number
    of = {row: row // size for row in range(len(lengths))}
    home: dict[int, int] = {}
    ends: list[tuple[float, int, int]] = []  # when a worker has news, as last heard
    free, version = 0.0, [0] * workers

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
            free = max(free, now) + driver * min(size, len(lengths) - number * size)
            send(w, now)
    return free


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
    """What one CPU does alone, and real runs over Ray at one and two workers of one CPU."""
    from specdec.scale import Pool, Source, Work, connect, over_ray, run

    pair = _pair()
    prompts = _prompts(rows)
    command = [sys.executable, __file__, "--one-cpu", str(tokens)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, env=_one_thread()).stdout
    figures: dict[str, Any] = {**json.loads(found.splitlines()[-1]), "at_once": at_once, "runs": {}}
    work = Work("generate", *pair, options={"max_new_tokens": tokens}, loading={"dtype": "float32"})
    sys.path.remove(str(Path(__file__).parent))  # Ray would take requests.py beside this file for a package
    connect("local")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "in.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
        source, out = Source.of(Path(folder) / "in.jsonl"), Path(folder) / "out.jsonl"
        for workers in (1, 2):
            told: list[tuple[float, int]] = []
            start = over_ray(Pool(workers, workers, cpus=1, at_once=at_once), rows)
            tell = lambda p, told=told: told.append((time.perf_counter(), p.done))  # noqa: E731
            run(source, out, work, start=start, overwrite=True, tell=tell)
            first = next(one for one in told if one[1])
            figures["runs"][workers] = {"rows": rows - first[1], "seconds": told[-1][0] - first[0]}
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        figures["lengths"] = [line["usage"]["completion_tokens"] for line in lines]
        figures["driver"] = _driver_seconds(source, work, out)
    return figures


def one_cpu(tokens: int) -> dict[str, Any]:
    """Tokens per second of each row for every number of rows."""
    from specdec import SpecGenerator

    target, draft = _pair()
    generator = SpecGenerator.from_pretrained(target, draft, dtype="float32")
    prompts = _prompts(max(SIZES))
    generator.generate(prompts[:4], max_new_tokens=8)
    speeds = []
    for size in SIZES:
        took = []
        for _ in range(3):
            began = time.perf_counter()
            stats = generator.generate(prompts[:size], max_new_tokens=tokens).stats
            assert stats is not None
            took.append(stats.num_new_tokens / size / (time.perf_counter() - began))
        speeds.append(statistics.median(took))
    return {"rows": list(SIZES), "tokens": speeds}


def _driver_seconds(source: Any, work: Any, out: Path) -> float:
    """Seconds in which the driver sends a row off and writes its answer, without the cluster."""
    from specdec.scale import run
    from specdec.scale.ray_data import _block
    from specdec.scale.work import Line

    data = out.read_bytes().splitlines(keepends=True)

    def start(_: Any) -> Any:
        def answers(rows: Any, stop: Any) -> Any:
            for row in rows:
                _block([row])
                yield Line(row.number, data[row.number], False, 1)

        return answers

    began = time.perf_counter()
    run(source, out.with_name("again.jsonl"), work, start=start)
    return (time.perf_counter() - began) / len(data)


def _pair() -> tuple[str, str]:
    from specdec import zoo

    return str(zoo.pair().target), str(zoo.pair().draft)


def _prompts(count: int) -> list[str]:
    from measure import read_prompts

    texts = read_prompts(None, 64)
    return [text[: 40 + 37 * n % 300] for n, text in enumerate((texts * count)[:count])]


def _one_thread() -> dict[str, str]:
    import os

    return {**os.environ, "OMP_NUM_THREADS": "1"}


def report(figures: dict[str, Any]) -> None:
    """The model beside the real runs, and beyond them."""
    speed = Speed(figures["rows"], figures["tokens"])
    lengths, at_once, driver = figures["lengths"], figures["at_once"], figures["driver"]
    rows = []
    for workers, real in sorted(figures["runs"].items()):
        size = max(1, min(128, at_once // 2, len(lengths) // (8 * int(workers))))
        seconds = batch_seconds(lengths[-real["rows"] :], int(workers), speed, at_once, driver, size)
        rows.append([workers, f"{real['seconds']:.1f}", f"{seconds:.1f}", f"{seconds / real['seconds'] - 1:+.0%}"])
    print(f"driver: {driver * 1e6:.0f} µs a row\n")
    print(table(["workers", "real seconds", "model", "difference"], rows))
    rng = random.Random(0)
    many = [rng.choice(lengths) for _ in range(20_000)]
    alone = batch_seconds(many, 1, speed, at_once, driver, at_once // 2)
    rows = []
    for workers in WORKERS:
        seconds = batch_seconds(many, workers, speed, at_once, driver, at_once // 2)
        rows.append([str(workers), f"{len(many) / seconds:.0f}", f"{alone / seconds / workers:.0%}"])
    print(f"\n{len(many)} rows\n")
    print(table(["workers", "rows/s", "of N times one worker"], rows))
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
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--one-cpu", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one_cpu is not None:
        print(json.dumps(one_cpu(args.one_cpu)))
    if args.measure is not None:
        args.measure.write_text(json.dumps(measured(args.rows, args.tokens, args.at_once)))
    if args.figures is not None:
        report(json.loads(args.figures.read_text()))


if __name__ == "__main__":
    main()
