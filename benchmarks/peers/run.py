"""The same pair in several engines, in turn on the same prompts: one table, and what would not run.

    python benchmarks/peers/run.py --openvino OUT                                  # OUT: from convert.py
    python benchmarks/peers/run.py --openvino OUT --python openvino=OV/bin/python --python vllm=VLLM/bin/python

Each system is a process of its own, so that engines may live in environments of their own; the others wait meanwhile.
Texts are compared with transformers' greedy one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from engines import ENGINES
from measure import Watch, interleaved, ratio, read_prompts, table
from transformers import AutoTokenizer

from specdec.zoo import pair

REFERENCE = "transformers plain"
HERE = Path(__file__).parent


class Worker:
    """One system in its own process; raises RuntimeError with the engine's words where it fails."""

    def __init__(self, python: str, task: dict[str, Any]) -> None:
        where = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ, "PYTHONPATH": str(HERE.parents[1])}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen([python, str(HERE / "engines.py")], text=True, env=where, **pipes)
        self.outputs: list[list[int]] = []
        self.version = self._ask(task)["ready"]

    def __call__(self, ids: list[int]) -> None:
        self.outputs.append(self._ask(ids)["tokens"])

    def _ask(self, what: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            print(json.dumps(what), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        """Ends the process, which waits for its next prompt, and with it the engine's own processes."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


class Pause(Watch):
    """Lets the engine before come to rest: some go on spinning for a while after their answer."""

    def look(self) -> None:
        """A pause, then the look."""
        time.sleep(0.5)
        super().look()


def started(names: list[str], pythons: dict[str, str], task: dict[str, Any], warm_up: list[int]) -> dict[str, Any]:
    """Every system's worker after one prompt, or the words in which it failed."""
    found: dict[str, Any] = {}
    for name in names:
        python = pythons.get(name.split()[0], sys.executable)
        try:
            found[name] = Worker(python, {**task, "engine": name})
            found[name](warm_up)
            found[name].outputs.clear()
        except (RuntimeError, OSError) as error:
            found[name] = str(error)
        print(f"{name}: {found[name] if isinstance(found[name], str) else 'ready'}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Starts all systems, gives them turns, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(pair().target))
    parser.add_argument("--draft", default=str(pair().draft))
    parser.add_argument("--openvino", help="folder with target/ and draft/ from convert.py")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH", help="interpreter of an engine")
    parser.add_argument("--only", action="append", metavar="ENGINE", help="engines to run; repeatable")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--count", type=int, default=4, help="prompts")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per prompt")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompts = [tokenizer(text).input_ids for text in read_prompts(args.prompts, args.count)]
    task = {name: getattr(args, name) for name in ("target", "draft", "openvino", "tokens")}
    names = [name for name in ENGINES if not args.only or name.split()[0] in args.only or name == REFERENCE]
    watch = Pause()
    found = started(names, dict(entry.split("=", 1) for entry in args.python), task, prompts[0])
    workers = {name: worker for name, worker in found.items() if isinstance(worker, Worker)}
    try:
        seconds = interleaved(workers, prompts, args.repeats, watch)
    finally:
        for worker in workers.values():
            worker.close()
    rows = []
    for name, worker in workers.items():
        per_token = statistics.median(statistics.median(s) for s in seconds[name]) / args.tokens
        plain = f"{name.split()[0]} plain"
        against = [f"{ratio(seconds[n], seconds[name]):.2f}x" if n in workers else "" for n in (REFERENCE, plain)]
        alike = sum(a == b for a, b in zip(worker.outputs, workers[REFERENCE].outputs, strict=True))
        rows.append([name, worker.version, f"{1e3 * per_token:.2f}", *against, f"{alike}/{len(worker.outputs)}"])
    print(table(["system", "version", "ms per token", "vs transformers", "vs its own plain", "same text"], rows))
    for name, words in found.items():
        if isinstance(words, str):
            print(f"\n{name} did not run: {words}")
    print(f"\n{watch.verdict()}")


if __name__ == "__main__":
    main()
