"""What the benchmark scripts share: prompts, interleaved timing, and a watch for other load on the machine."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def read_prompts(path: Path | None, count: int) -> list[str]:
    """Held-out code of the package's corpus, or prompts of a text file (one per blank-line block) or JSON lines."""
    if path is None:
        from specdec.zoo.corpus import held_out_prompts

        return held_out_prompts(count)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [_text_of(json.loads(line)) for line in text.splitlines() if line.strip()][:count]
    return [block for block in text.split("\n\n") if block.strip()][:count]


def _text_of(entry: Mapping[str, Any]) -> str:
    """The prompt of a HumanEval, GSM8K or Spec-Bench line."""
    for name in ("prompt", "question", "text"):
        if name in entry:
            return entry[name]
    return entry["turns"][0]


class Watch:
    """Notices contention: how much slower a fixed piece of work runs at times than at its best."""

    def __init__(self) -> None:
        self._spins: list[float] = []
        self.load = os.getloadavg()[0]

    def look(self) -> None:
        """A few milliseconds of pure Python on one core, timed."""
        began = time.perf_counter()
        total = 0
        for i in range(40_000):
            total += i
        self._spins.append(time.perf_counter() - began)

    def verdict(self) -> str:
        """One sentence on whether the figures can be trusted."""
        usual, best = statistics.median(self._spins), min(self._spins)
        late = sum(s > 2 * best for s in self._spins) / len(self._spins)
        facts = f"load {self.load:.1f} on {os.cpu_count()} cores at the start, fixed work {usual / best:.2f}x its best"
        if self.load > 0.5 * (os.cpu_count() or 1) or usual > 1.3 * best or late > 0.1:
            return f"CONTENTION: {facts}, {late:.0%} of looks stalled; trust the ratios a little, the times not at all."
        return f"quiet machine: {facts}."


def interleaved(
    systems: Mapping[str, Callable[[Any], Any]], cases: Sequence[Any], repeats: int, watch: Watch
) -> dict[str, list[list[float]]]:
    """Seconds `[case][repeat]` of every system; all run one case in turn, starting with another one each time."""
    names = list(systems)
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in cases] for name in names}
    turn = 0
    for _ in range(repeats):
        for c, case in enumerate(cases):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                watch.look()
                began = time.perf_counter()
                systems[name](case)
                seconds[name][c].append(time.perf_counter() - began)
            turn += 1
    return seconds


def ratio(slow: list[list[float]], fast: list[list[float]]) -> float:
    """How many times faster: the median over cases of the ratio of each case's median seconds."""
    pairs = zip(slow, fast, strict=True)
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
