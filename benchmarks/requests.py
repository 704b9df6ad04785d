"""Many callers on one generator, measured on the package's pair or yours, each beside what it is compared to.

    python benchmarks/requests.py                     # all three
    python benchmarks/requests.py --only arrival --dtype bfloat16

together: eight greedy requests from eight threads, with the draft model and without, against the same requests one
          after the other, transformers' padded batch without a draft, and its continuous batching (`generate_batch`).
arrival:  a prompt of 2,000 tokens arrives among seven running rows: the longest gap between their tokens, over the
          time of one chunk of that prompt and one round.
chat:     the second turn of a chat of 1,000 tokens: time to its first token, over that of reading it all.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from measure import Watch, read_prompts, table
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec import SpecGenerator
from specdec.engine.openmp import release_helpers
from specdec.options.bundled_models import pair

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": [], "pad_token_id": 0}


def at_once(jobs: Sequence[Callable[[], Any]]) -> None:
    """Runs every job in a thread of its own, and waits for all."""
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def together(target: Any, draft: Any, prompts: list[torch.Tensor], tokens: int, repeats: int, watch: Watch) -> None:
    """Tokens per second of eight requests at once, and of the same one after the other."""
    options = {**GREEDY, "max_new_tokens": tokens}
    plain, assisted = (SpecGenerator(target, d, prefix_cache=False) for d in (None, draft))
    batch = [ids[0].tolist() for ids in prompts]

    def ours(generator: SpecGenerator, *, threads: bool) -> Callable[[], Any]:
        jobs = [lambda ids=ids: generator.generate(ids, **options) for ids in prompts]
        return (lambda: at_once(jobs)) if threads else lambda: [job() for job in jobs]

    systems = {
        "one after the other, draft model": ours(assisted, threads=False),
        "eight threads, draft model": ours(assisted, threads=True),
        "one after the other, plain": ours(plain, threads=False),
        "eight threads, plain": ours(plain, threads=True),
        "transformers, padded batch, plain": lambda: padded(target, batch, tokens),
        "transformers, continuous batching, plain": lambda: continuous(target, batch, tokens),
    }
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for name in list(systems):
        try:
            systems[name]()  # warms up
        except Exception as error:
            print(f"{name}: left out ({type(error).__name__}: {str(error).splitlines()[0]})")
            del systems[name], seconds[name]
    names = list(systems)
    for turn in range(repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            watch.look()
            release_helpers()  # of the thread that has run the last system: they slow down every other one
            time.sleep(0.1)
            began = time.perf_counter()
            systems[name]()
            seconds[name].append(time.perf_counter() - began)
    base = statistics.median(seconds[names[0]])
    rows = []
    for name in names:
        median = statistics.median(seconds[name])
        rows.append([name, f"{len(prompts) * tokens / median:.0f}", f"{base / median:.2f}x"])
    print(table(["eight requests", "tokens per second", "over the first"], rows))


def padded(target: Any, batch: list[list[int]], tokens: int) -> None:
    """One call of `generate` over all prompts, padded on the left."""
    width = max(map(len, batch))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in batch])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
    with torch.no_grad():
        target.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )


def continuous(target: Any, batch: list[list[int]], tokens: int) -> None:
    """transformers' own continuous batching."""
    config = target.generation_config.__class__(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    attention = target.config._attn_implementation
    try:
        found = target.generate_batch(inputs=batch, generation_config=config, progress_bar=False)
    finally:
        target.set_attn_implementation(attention)
    if len(found) != len(batch):
        raise RuntimeError(f"{len(found)} answers to {len(batch)} requests")


class Passes:
    """Seconds and nodes of every forward of a model."""

    def __init__(self, model: Any) -> None:
        self.seen: list[tuple[float, int]] = []
        self._began = 0.0
        self._hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True),
        ]

    def _before(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def _after(self, _: Any, args: Any, given: dict[str, Any], output: Any) -> None:
        self.seen.append((time.perf_counter() - self._began, given["input_ids"].numel()))

    def remove(self) -> None:
        """Takes the hooks out."""
        for hook in self._hooks:
            hook.remove()


def arrival(target: Any, draft: Any, prompts: list[torch.Tensor], repeats: int, watch: Watch) -> None:
    """The longest gap between tokens of seven running rows while a prompt of 2,000 tokens is read."""
    long = torch.cat(prompts * 16, dim=1)[:, :2000]
    found = []
    for _ in range(repeats):
        watch.look()
        generator = SpecGenerator(target, draft, prefix_cache=False, schedule="constant", num_assistant_tokens=5)
        times: list[list[float]] = [[] for _ in range(7)]
        begun = threading.Barrier(8)
        passes = Passes(target)

        def run(row: int, generator: Any = generator, times: Any = times, begun: Any = begun) -> None:
            for event in generator.stream(prompts[row], max_new_tokens=160, **GREEDY):
                times[row].append(time.perf_counter())
                if len(times[row]) == 8:
                    begun.wait()
                del event

        def join(generator: Any = generator, begun: Any = begun) -> None:
            begun.wait()
            generator.generate(long, max_new_tokens=20, **GREEDY)

        at_once([*(lambda row=row: run(row) for row in range(7)), join])
        passes.remove()
        gaps = [after - before for row in times for before, after in pairwise(row[8:])]
        chunk = max(seconds for seconds, nodes in passes.seen if nodes >= 128)
        round_ = statistics.median(gaps)
        found.append((max(gaps), chunk, round_))
    longest, chunk, round_ = (statistics.median(values) for values in zip(*found, strict=True))
    print(
        f"arrival: longest gap {1e3 * longest:.0f} ms; a chunk {1e3 * chunk:.0f} ms and a round {1e3 * round_:.0f} ms: "
        f"{longest / (chunk + round_):.2f} times both"
    )


def chat(target: Any, draft: Any, prompts: list[torch.Tensor], repeats: int, watch: Watch) -> None:
    """Time to the first token of a second turn, with and without what the first turn has read."""
    first = torch.cat(prompts * 8, dim=1)[:, :900]
    found = []
    for _ in range(repeats):
        watch.look()
        seconds = []
        for keeps in (True, False):
            generator = SpecGenerator(target, draft, prefix_cache=keeps)
            answer = generator.generate(first, max_new_tokens=60, **GREEDY).sequences
            turn = torch.cat([answer, prompts[1][:, :40]], dim=1)
            seconds.append(first_token(generator.stream(turn, max_new_tokens=8, **GREEDY)))
        found.append(seconds)
    kept, anew = (statistics.median(values) for values in zip(*found, strict=True))
    times = f"{1e3 * kept:.1f} ms, read anew {1e3 * anew:.1f} ms"
    print(f"chat: first token of the second turn after {times}: {kept / anew:.3f}")


def first_token(stream: Iterator[Any]) -> float:
    """Seconds until the first event."""
    began = time.perf_counter()
    next(stream)
    return time.perf_counter() - began


def main() -> None:
    """Runs the measurements that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("together", "arrival", "chat"))
    parser.add_argument("--target", help="folder or hub id (default: the package's pair)")
    parser.add_argument("--draft")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    watch, how = Watch(), {"dtype": getattr(torch, args.dtype)}
    if args.target is None:
        args.target, args.draft = pair().target, pair().draft
    target = AutoModelForCausalLM.from_pretrained(args.target, **how).eval()
    draft = None if args.draft is None else AutoModelForCausalLM.from_pretrained(args.draft, **how).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompts = [tokenizer(p, return_tensors="pt").input_ids for p in read_prompts(None, 8)]
    watch.look()
    if args.only in (None, "together"):
        together(target, draft, prompts, args.tokens, args.repeats, watch)
    if args.only in (None, "arrival"):
        arrival(target, draft, prompts, args.repeats, watch)
    if args.only in (None, "chat"):
        chat(target, draft, prompts, args.repeats, watch)
    print(watch.verdict())


if __name__ == "__main__":
    main()
