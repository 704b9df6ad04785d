"""The engine's own promises, measured on the package's pair, each interleaved with what it is compared to.

    python benchmarks/engine.py                # all of them
    python benchmarks/engine.py --only long --dtype bfloat16
    python benchmarks/engine.py --only useless --backend eager

overhead: wall time per round outside any model forward, chains of 5, greedy.
useless:  tokens per second with an always-wrong draft model and the cost schedule, over plain decoding.
path:     how many files and functions of the package a second greedy call with the draft model enters, and how many of
          them more than every second of its rounds.
long:     the time of one round's target side at past 2,000 over past 128, against the same ratio for bare forwards
          over preallocated buffers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from measure import Watch, interleaved, ratio, read_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import specdec
from specdec import LanguageModel, SpecGenerator
from specdec.core.budget import Budget
from specdec.core.drafts import Draft, Proposer, SequenceView
from specdec.core.tree import Tree
from specdec.options.bundled_models import pair
from specdec.options.load import BACKENDS
from specdec.proposers import ModelDraft

GREEDY = {"do_sample": False, "eos_token_id": [], "pad_token_id": 0}


class Stopwatch:
    """Begin and end of every forward of a model, by torch's own hooks."""

    def __init__(self, model: Any) -> None:
        self.spans: list[tuple[float, float]] = []
        self._began = 0.0
        model.register_forward_pre_hook(self._before)
        model.register_forward_hook(self._after)

    def _before(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def _after(self, *_: Any) -> None:
        self.spans.append((self._began, time.perf_counter()))

    @property
    def seconds(self) -> float:
        """Time spent inside."""
        return sum(end - began for began, end in self.spans)


class AlwaysWrong(Draft, Proposer):
    """A draft model's work and cost, with every guess spoiled."""

    def __init__(self, model: LanguageModel) -> None:
        self._draft = ModelDraft(model)

    def start(self, vocab_size: int) -> AlwaysWrong:
        """A proposer: the model's own, and the width of the vocabulary to spoil within."""
        self._proposer, self._vocab = self._draft.start(vocab_size), vocab_size
        return self

    def propose(self, rows: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Tree]:
        """The model's guesses, each replaced by its neighbour."""
        trees = self._proposer.propose(rows, budgets)
        return [Tree.chain([(t + 1) % self._vocab for t in tree.tokens], tree.confidence) for tree in trees]

    def drop(self, keys: Sequence[int]) -> None:
        """Passed on."""
        self._proposer.drop(keys)


class Preallocated(DynamicCache):
    """The least a cache can do: write into a buffer, return a view of it."""

    def __init__(self, layers: int, capacity: int) -> None:
        super().__init__()
        self._buffers: list[Any] = [None] * layers
        self._capacity, self.past = capacity, 0

    def update(self, key: Any, value: Any, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Writes at `past`, the same place in every pass."""
        if self._buffers[layer_idx] is None:
            shape = (*key.shape[:2], self._capacity, key.shape[3])
            self._buffers[layer_idx] = (key.new_zeros(shape), value.new_zeros(shape))
        end = self.past + key.shape[2]
        for buffer, new in zip(self._buffers[layer_idx], (key, value), strict=True):
            buffer[:, :, self.past : end] = new
        keys, values = self._buffers[layer_idx]
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Tokens before this pass."""
        return self.past

    def get_mask_sizes(self, query_length: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """The whole past."""
        return self.past + query_length, 0


def overhead(target: Any, draft: Any, prompts: list[Any], repeats: int) -> None:
    """Milliseconds per round outside forwards."""
    clocks = [Stopwatch(target), Stopwatch(draft)]
    generator = SpecGenerator(target, draft, schedule="constant", num_assistant_tokens=5, prefix_cache=False)
    generator.generate(prompts[0], max_new_tokens=16, **GREEDY)
    found = []
    for _ in range(repeats):
        for ids in prompts:
            for clock in clocks:
                clock.spans.clear()
            stats = generator.generate(ids, max_new_tokens=96, **GREEDY).stats
            inside = sum(clock.seconds for clock in clocks)
            found.append(1e3 * (stats.seconds - inside) / stats.num_target_passes)
    print(f"overhead: {statistics.median(found):.2f} ms per round outside forwards (chains of 5, greedy)")


def path(target: Any, draft: Any, prompt: Any) -> None:
    """Counts the files and functions of the package, comprehensions left out, that a warm call and its rounds enter."""
    root, calls = str(Path(specdec.__file__).parent), Counter[tuple[str, str]]()

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root) and not code.co_name.startswith("<"):
            calls[code.co_filename, code.co_qualname] += 1

    generator = SpecGenerator(target, draft, schedule="constant", num_assistant_tokens=5)
    for _ in range(2):
        calls.clear()
        threading.setprofile(note)
        sys.setprofile(note)
        rounds = generator.generate(prompt, max_new_tokens=32, **GREEDY).stats.num_target_passes
        sys.setprofile(None)
        threading.setprofile(None)
    often = [function for function, count in calls.items() if 2 * count > rounds]
    for name, seen in (("the call", list(calls)), ("its rounds", often)):
        print(f"path: {name}: {len({file for file, _ in seen})} files, {len(seen)} functions")


def useless(target: LanguageModel, draft: LanguageModel, prompts: list[Any], repeats: int, watch: Watch) -> None:
    """Speed with an always-wrong draft over plain speed."""
    wrong = AlwaysWrong(draft)
    for tokens in (256, 512):
        # A new generator for every call: nothing learned before helps.
        systems = {
            "plain": lambda ids, n=tokens: SpecGenerator(target, prefix_cache=False).generate(
                ids, max_new_tokens=n, **GREEDY
            ),
            "wrong": lambda ids, n=tokens: SpecGenerator(target, wrong, schedule="cost", prefix_cache=False).generate(
                ids, max_new_tokens=n, **GREEDY
            ),
        }
        seconds = interleaved(systems, prompts[:4], repeats, watch)
        print(f"useless: {ratio(seconds['plain'], seconds['wrong']):.3f}x of plain over {tokens} tokens")


def long(target: Any, draft: Any, prompt: Any, repeats: int) -> None:
    """How a round's target side, and a bare forward, grow with the past."""
    ours, bare = Stopwatch(target), {128: [], 2000: []}
    helper = Stopwatch(draft)
    generator = SpecGenerator(target, draft, schedule="constant", num_assistant_tokens=5, prefix_cache=False)
    rounds: dict[int, list[float]] = {128: [], 2000: []}
    text = prompt.repeat(1, 2000 // prompt.shape[1] + 1)
    cache = Preallocated(target.config.num_hidden_layers, 2304)
    for _ in range(repeats):
        for past in (128, 2000):
            ours.spans.clear()
            helper.spans.clear()
            generator.generate(text[:, :past], max_new_tokens=40, **GREEDY)
            rounds[past] += target_side(ours.spans, helper.spans)
            cache.past = past
            with torch.no_grad():
                for _ in range(12):
                    began = time.perf_counter()
                    target(text[:, :6], past_key_values=cache, position_ids=torch.arange(past, past + 6)[None])
                    bare[past].append(time.perf_counter() - began)
    medians = {name: [statistics.median(v[p]) for p in (128, 2000)] for name, v in (("rounds", rounds), ("bare", bare))}
    grown = {name: after / before for name, (before, after) in medians.items()}
    print(
        f"long: a round's target side {1e3 * medians['rounds'][0]:.2f} -> {1e3 * medians['rounds'][1]:.2f} ms "
        f"({grown['rounds']:.3f}x) from past 128 to 2,000; a bare forward {1e3 * medians['bare'][0]:.2f} -> "
        f"{1e3 * medians['bare'][1]:.2f} ms ({grown['bare']:.3f}x); ratio {grown['rounds'] / grown['bare']:.3f}"
    )


def target_side(target: list[tuple[float, float]], draft: list[tuple[float, float]]) -> list[float]:
    """Seconds from one target pass's begin to the next, less the draft's forwards between; prefill rounds left out."""
    found = []
    for (began, _), (following, _) in pairwise(target[1:]):
        drafting = sum(e - b for b, e in draft if began <= b < following)
        found.append(following - began - drafting)
    return found


def main() -> None:
    """Runs the measurements that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("overhead", "path", "useless", "long"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--backend", choices=BACKENDS, default="packed", help="what passes of `useless` run on")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    watch = Watch()
    how = {"dtype": getattr(torch, args.dtype)}
    target, draft = (AutoModelForCausalLM.from_pretrained(p, **how).eval() for p in (pair().target, pair().draft))
    tokenizer = AutoTokenizer.from_pretrained(pair().target)
    prompts = [tokenizer(p, return_tensors="pt").input_ids for p in read_prompts(None, 6)]
    watch.look()
    if args.only in (None, "overhead"):
        overhead(target, draft, prompts, args.repeats)
    if args.only in (None, "path"):
        path(target, draft, prompts[0])
    if args.only in (None, "useless"):
        folders = str(pair().target), str(pair().draft)
        ours = [SpecGenerator.from_pretrained(folder, dtype=args.dtype, backend=args.backend) for folder in folders]
        useless(*(generator.target for generator in ours), prompts, args.repeats, watch)
    if args.only in (None, "long"):
        long(target, draft, prompts[0], args.repeats)
    print(watch.verdict())


if __name__ == "__main__":
    main()
