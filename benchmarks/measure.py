"""What the benchmark scripts share: prompts, assistants, clocks of encoders, a server, interleaved timing, a table."""

from __future__ import annotations

import copy
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specdec.bench import prompts
from specdec.bench.machine import Watch

__all__ = ["Encoders", "Watch", "assistant", "interleaved", "ratio", "read_prompts", "served", "table"]

_PATIENCE = 120.0  # seconds until a server listens


def read_prompts(path: Path | None, count: int) -> list[str]:
    """Held-out code of the package's corpus, or prompts of a file as `specdec bench` reads it."""
    return [prompt.text for prompt in prompts.pick_prompts("code" if path is None else str(path), count)]


def assistant(draft: Any) -> Any:
    """A copy of the draft with the settings of the report on transformers' assisted decoding: 5 tokens, +2/−1."""
    helper = copy.deepcopy(draft)
    settings = {"num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.0}
    helper.generation_config.update(num_assistant_tokens=5, **settings)
    return helper


class Encoders:
    """The seconds that a target's encoder has run, which no draft shortens; made before generators, which copy it."""

    def __init__(self, target: Any) -> None:
        self.seconds = self._began = 0.0
        encoder = target.get_encoder()
        encoder.register_forward_pre_hook(self._begin)
        encoder.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._began


@contextmanager
def served(*arguments: str, **process: Any) -> Iterator[tuple[str, Path]]:
    """The address of `specdec serve` with these arguments, and its log; `process`: options of its process."""
    command = [sys.executable, "-m", "specdec", "serve", *arguments, "--port", "0", "--quiet"]
    with TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file, **process)
        log, end = Path(folder) / "log", time.monotonic() + _PATIENCE
        try:
            while not (found := re.search(r"listening on (\S+)", log.read_text())):
                if server.poll() is not None or time.monotonic() > end:
                    sys.exit(f"the server does not listen:\n{log.read_text()}")
                time.sleep(0.1)
            yield found[1], log
        finally:
            server.kill()
            server.wait()


def interleaved(
    systems: Mapping[str, Callable[[Any], Any]],
    cases: Sequence[Any],
    repeats: int,
    watch: Watch,
    outputs: dict[str, list[Any]] | None = None,
    *,
    warm_up: bool = False,
) -> dict[str, list[list[float]]]:
    """Seconds `[case][repeat]` of every system; all run one case in turn, starting with another one each time.

    `outputs` gets the results of every system, in the order of its runs. `warm_up`: all run the first case once before,
    which does not count.
    """
    for run in systems.values() if warm_up else ():
        run(cases[0])
    names = list(systems)
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in cases] for name in names}
    turn = 0
    for _ in range(repeats):
        for c, case in enumerate(cases):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                watch.look()
                began = time.perf_counter()
                result = systems[name](case)
                seconds[name][c].append(time.perf_counter() - began)
                if outputs is not None:
                    outputs.setdefault(name, []).append(result)
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
