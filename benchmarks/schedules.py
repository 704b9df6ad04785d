"""Draft schedules beside each other and beside plain decoding: drafts, sequences at a time, temperatures.

    python benchmarks/schedules.py                                  # everything, in about half an hour
    python benchmarks/schedules.py --draft suffix model@eager --batch 8 --temperature 0 1.2 --seconds 60

Drafts: `model` (the pair's), `wrong` (the same work, and every guess wrong), `early_exit:8` (a third of the bundled
target), `both`, or any word of `draft=`; `@eager` behind one sets the backend. Every schedule, and decoding without a
draft, answers the same prompts in turn; a second is that of a whole call. A row is the times of plain decoding's speed,
medians over prompts of the median over repeats, and the default's share of the best of the other schedules.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from engine import AlwaysWrong
from measure import Watch, interleaved, ratio, read_prompts, table

from specdec import LanguageModel, SpecGenerator
from specdec.core.draft_schedules import DEFAULT, SCHEDULES
from specdec.options.bundled_models import Pair, pair
from specdec.proposers import ModelDraft

DRAFTS = ["model", "model@eager", "suffix", "wrong", "early_exit:8"]


@cache
def loaded(folder: Path, backend: str) -> SpecGenerator:
    """A model of the pair."""
    return SpecGenerator.from_pretrained(str(folder), dtype="float32", backend=backend)


def drafts(name: str, model: LanguageModel) -> Any:
    """The draft of this name."""
    if name == "wrong":
        return AlwaysWrong(model)
    return {"model": ModelDraft(model), "both": ("suffix", model)}.get(name, name)


def systems(models: Pair, draft: str, how: dict[str, Any]) -> dict[str, Callable[[list[str]], Any]]:
    """Plain decoding, and the draft with every schedule."""
    word, _, backend = draft.partition("@")
    target, small = (loaded(folder, backend or "packed") for folder in (models.target, models.draft))
    draft = drafts(word, small.target)

    def runs(given: Any, **own: Any) -> Callable[[list[str]], Any]:
        generator = SpecGenerator(target.target, given, tokenizer=target.tokenizer, prefix_cache=False, **own)
        return lambda texts: generator.generate(texts, **how)

    return {"plain": runs(None), **{name: runs(draft, schedule=name) for name in SCHEDULES}}


def measured(
    runs: dict[str, Callable[[list[str]], Any]], cases: list[list[str]], seconds: float, watch: Watch
) -> list[float]:
    """Every schedule's speed as times of plain decoding's, and the default's as times of the best other one's."""
    began = time.perf_counter()
    for run in runs.values():
        run(cases[0])
    turn = (time.perf_counter() - began) * len(cases)
    found = interleaved(runs, cases, max(round(seconds / turn), 1), watch)
    gains = {name: ratio(found["plain"], found[name]) for name in SCHEDULES}
    return [*gains.values(), gains[DEFAULT] / max(gain for name, gain in gains.items() if name != DEFAULT)]


def main() -> None:
    """Prints a row for every draft, number of sequences and temperature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="python-code", help="a bundled pair")
    parser.add_argument("--draft", nargs="+", default=DRAFTS)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 8, 16], help="prompts at a time")
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 0.7, 1.2], help="0: greedy")
    parser.add_argument("--count", type=int, default=2, help="prompts, or batches of prompts")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=10.0, help="for a row; prompts are repeated until then")
    args = parser.parse_args()
    watch, rows = Watch(), []
    for draft, batch, temperature in product(args.draft, args.batch, args.temperature):
        how: dict[str, Any] = {"max_new_tokens": args.tokens, "eos_token_id": [], "pad_token_id": 0}
        if temperature:
            how |= {"do_sample": True, "temperature": temperature, "top_k": 0, "seed": 1}
        texts = read_prompts(None, args.count * batch)
        cases = [texts[i : i + batch] for i in range(0, len(texts), batch)]
        gains = measured(systems(pair(args.pair), draft, how), cases, args.seconds, watch)
        rows.append([f"{draft}, {batch}, {temperature:g}", *(f"{gain:.2f}" for gain in gains)])
        print(*rows[-1], flush=True)
    print(table(["draft, sequences, temperature", *SCHEDULES, f"{DEFAULT} of best"], rows))
    print(watch.verdict())


if __name__ == "__main__":
    main()
