"""What the benchmark scripts share: prompts, interleaved timing, and a table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.bench import prompts
from specdec.bench.machine import Watch

__all__ = ["Watch", "interleaved", "ratio", "read_prompts", "table"]


def read_prompts(path: Path | None, count: int) -> list[str]:
    """Held-out code of the package's corpus, or prompts of a file as `specdec bench` reads it."""
    return [prompt.text for prompt in prompts.read_prompts("code" if path is None else str(path), count)]


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
