"""The same model in several engines, in turn on the same prompts: one table, and what would not run.

    python benchmarks/peers/run.py float32 --openvino OUT --python openvino=OV/bin/python     # the package's pair
    python benchmarks/peers/run.py int8 --target MODEL --openvino OUT --prompts chats.jsonl --chat
    python benchmarks/peers/run.py gguf --target MODEL --gguf MODEL.gguf --gguf-draft DRAFT.gguf --llama PROGRAM

Each system (an engine, and how it drafts) is a process of its own, so that engines may live in environments of their
own; the others are stopped meanwhile. "ms per token" are those after the first token; "first" is the time until that.
Ratios are medians over prompts of ratios of median times. Texts are compared with the first system's, which is
specdec's plain one if that runs: "agrees" counts the tokens before the first that differs, of all tokens. Ctrl-C ends
the turns: the figures so far are printed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from fnmatch import fnmatch
from itertools import takewhile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from engines import ENGINES, Task
from measure import Watch, interleaved, ratio, read_prompts, table
from transformers import AutoTokenizer
from worker import Worker

from specdec.bench.machine import provenance
from specdec.options.bundled_models import pair

HERE = Path(__file__).parent
MODELS = ("target", "draft", "openvino", "gguf", "gguf_draft", "llama")
Times = list[list[float]]


class System(Worker):
    """One system; `outputs`, `first` and `rest` have one entry per call: the tokens, seconds to the first, seconds per
    later token.
    """

    def __init__(self, python: str, task: Task, tokens: int) -> None:
        super().__init__(python, str(HERE / "engines.py"), **asdict(task))
        self._tokens = tokens
        self.forget()

    def forget(self) -> None:
        """Begins to record anew."""
        self.outputs: list[list[int]] = []
        self.first: list[float] = []
        self.rest: list[float] = []

    def forget_after(self, calls: int) -> None:
        """Keeps the first calls alone."""
        for kept in (self.outputs, self.first, self.rest):
            del kept[calls:]

    def __call__(self, ids: list[int]) -> None:
        answer = self.ask(ids=ids, tokens=self._tokens)
        self.outputs.append(answer["tokens"])
        self.first.append(answer["first"])
        self.rest.append((answer["seconds"] - answer["first"]) / max(len(answer["tokens"]) - 1, 1))


def tasks(args: argparse.Namespace) -> list[Task]:
    """Every engine with these weights, in every way to draft that the models allow; the first is the reference."""
    models = {name: getattr(args, name) for name in MODELS}
    drafted = args.gguf_draft if args.weights == "gguf" else args.draft
    ways = ("plain", "lookup", "model", "both") if drafted else ("plain", "lookup")
    ways += ("auto",) if args.weights in ("float32", "bfloat16", "int8") else ()  # elsewhere it is the lookup
    found = [
        Task(name, args.weights, draft, models)
        for name, engine in ENGINES.items()
        for draft in ways
        if args.weights in engine.weights and draft in engine.drafts
    ]
    return [task for task in found if any(fnmatch(task.name, pattern) for pattern in args.only)]


def started(every: list[Task], args: argparse.Namespace, warm_up: list[int]) -> dict[str, System | str]:
    """Every system's worker after one prompt, or the words in which it failed."""
    pythons = dict(entry.split("=", 1) for entry in args.python)
    found: dict[str, System | str] = {}
    for task in every:
        began = time.perf_counter()
        try:
            worker = System(pythons.get(task.engine, sys.executable), task, args.tokens)
            found[task.name] = worker
            for _ in range(args.warm_up):
                worker(warm_up)
            worker.forget()
        except (RuntimeError, OSError) as error:
            found[task.name] = str(error)
        words = found[task.name] if isinstance(found[task.name], str) else "ready"
        print(f"{task.name}: {words} after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return found


def by_case(values: list[float], cases: int) -> Times:
    """Values in the order of calls as `[case][repeat]`."""
    return [values[case::cases] for case in range(cases)]


def middle(times: Times) -> float:
    """The median over cases of the medians over repeats, in milliseconds."""
    return 1e3 * statistics.median(map(statistics.median, times))


def agreeing(expected: list[list[int]], got: list[list[int]]) -> str:
    """How many tokens come before the first that differs, of how many."""
    same = sum(
        sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(a, b, strict=False)))
        for a, b in zip(expected, got, strict=True)
    )
    return f"{same}/{sum(map(len, expected))}"


def report(workers: dict[Task, System], cases: int) -> str:
    """The table: each system beside its own plain decoding, and beside each engine's plain and best."""
    rest = {task: by_case(worker.rest, cases) for task, worker in workers.items()}
    reference, *others = workers
    plain = {(t.engine, t.weights): t for t in workers if t.draft == "plain"}
    columns: dict[str, Callable[[Task], Task | None]] = {"own plain": lambda t: plain.get((t.engine, t.weights))}
    for engine in dict.fromkeys(task.engine for task in others if not task.engine.startswith("specdec")):
        own = [task for task in others if task.engine == engine]
        best = min(own, key=lambda task: middle(rest[task]))
        columns[f"{engine} plain"] = lambda _, engine=engine: plain.get((engine, others[0].weights))
        columns[f"{engine} best"] = lambda _, best=best: best
    rows = []
    for task, worker in workers.items():
        beside = [column(task) for column in columns.values()]
        ratios = ["" if other is None else f"{ratio(rest[other], rest[task]):.2f}x" for other in beside]
        cells = [task.name, f"{middle(rest[task]):.2f}", f"{middle(by_case(worker.first, cases)):.0f}", *ratios]
        rows.append([*cells, agreeing(workers[reference].outputs, worker.outputs)])
    return table(["system", "ms per token", "first, ms", *(f"vs {name}" for name in columns), "agrees"], rows)


def arguments() -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", choices=("float32", "bfloat16", "int8", "int4", "gguf"))
    parser.add_argument("--target", help="folder or hub id (default: the package's pair)")
    parser.add_argument("--draft")
    parser.add_argument("--openvino", help="folder from convert.py")
    parser.add_argument("--gguf", help="the target as a GGUF file")
    parser.add_argument("--gguf-draft", help="the draft as a GGUF file")
    parser.add_argument("--llama", help="llama.cpp's program llama-speculative-simple")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH", help="interpreter of an engine")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="systems, such as 'specdec*'; repeatable")
    parser.add_argument("--prompts", type=Path, help="text file or JSON lines (default: held-out code)")
    parser.add_argument("--chat", action="store_true", help="prompts go through the target's chat template")
    parser.add_argument("--count", type=int, default=3, help="prompts")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1, help="runs of one prompt before anything is timed")
    args = parser.parse_args()
    args.only = args.only or ["*"]
    if args.target is None:
        args.target, args.draft = str(pair().target), str(pair().draft)
    return args


def main() -> None:
    """Starts all systems, gives them turns, prints the table."""
    args = arguments()
    tokenizer = AutoTokenizer.from_pretrained(args.target)

    def ids(text: str) -> list[int]:
        if not args.chat:
            return tokenizer(text).input_ids
        turn = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]

    prompts = [ids(text) for text in read_prompts(args.prompts, args.count)]
    watch = Watch()
    every = tasks(args)
    found = started(every, args, prompts[0])
    workers = {task: worker for task in every if isinstance(worker := found[task.name], System)}
    if not workers:
        sys.exit(f"no system ran: {found}")
    try:
        with suppress(KeyboardInterrupt):
            interleaved({task.name: worker for task, worker in workers.items()}, prompts, args.repeats, watch)
    finally:
        for worker in workers.values():
            worker.end()
    calls = min(len(worker.rest) for worker in workers.values())
    if not calls:
        sys.exit("interrupted before every system had answered")
    cases = min(calls, len(prompts))
    for worker in workers.values():
        worker.forget_after(calls - calls % cases)
    machine = provenance()
    print(f"{machine['processor']}, {machine['cores']} cores, torch {machine['versions']['torch']}, ", end="")
    print(", ".join(dict.fromkeys(worker.version for worker in workers.values())))
    lengths = statistics.median(map(len, prompts[:cases]))
    print(f"{args.weights}, {cases} prompts of {lengths:.0f} tokens, {args.tokens} new, {calls // cases} repeats\n")
    print(report(workers, cases))
    for name, words in found.items():
        if isinstance(words, str):
            print(f"\n{name} did not run: {words}")
    print(f"\n{watch.verdict()}", flush=True)


if __name__ == "__main__":
    main()
