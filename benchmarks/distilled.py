"""A distilled draft on chat prompts: plain decoding, the draft, suffix and both in turn, and whether the texts agree.

    python benchmarks/distilled.py TARGET DRAFT --prompts specbench.jsonl --count 12 [--backend packed] [--dtype
    bfloat16]

Prompts go through the target's chat template. Use prompts that the draft was not trained on. Ratios are the median over
prompts of the ratio of median seconds; acceptance lengths are tokens per pass with guesses, over all prompts. Any
draft will do that `SpecGenerator` takes by name.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import Watch, interleaved, ratio, read_prompts, table

from recipes.distill.texts import encode_prompts
from specdec import Generation, SpecGenerator
from specdec.options.load import BACKENDS

PLAIN = "plain"


def build(args: argparse.Namespace) -> tuple[dict[str, Callable[[list[int]], Generation]], Any]:
    """The systems by name, each from a prompt's ids to its result, and the tokenizer."""
    loaded = SpecGenerator.from_pretrained(args.target, dtype=args.dtype, backend=args.backend, prefix_cache=False)

    def system(draft: Any, **options: Any) -> Callable[[list[int]], Generation]:
        generator = SpecGenerator(loaded.target.model, draft, backend=args.backend, prefix_cache=False)
        run = {"max_new_tokens": args.tokens, "do_sample": False, **options}
        return lambda ids: generator.generate([ids], **run)

    drafted = {
        f"{args.guesses} guesses": system(args.draft, schedule="constant", num_assistant_tokens=args.guesses),
        "cost": system(args.draft, schedule="cost"),
        "suffix, cost": system("suffix", schedule="cost"),
        "hybrid, cost": system(f"suffix+{args.draft}", schedule="cost"),
    }
    return {PLAIN: system(None), **drafted}, loaded.tokenizer


def main() -> None:
    """Measures, and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="folder or hub id")
    parser.add_argument("draft", help="what `python -m recipes distill` wrote, or another draft")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=12, help="prompts, of all kinds in turn")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt")
    parser.add_argument("--guesses", type=int, default=3, help="of the constant schedule")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", choices=BACKENDS, default="packed")
    args = parser.parse_args()
    systems, tokenizer = build(args)
    prompts = encode_prompts(tokenizer, read_prompts(args.prompts, args.count))
    made: dict[str, list[Generation]] = {name: [] for name in systems}
    watch = Watch()
    seconds = interleaved(systems, prompts, args.repeats, watch, made, warm_up=True)
    expected = [out.new_tokens() for out in made[PLAIN]]
    rows = []
    for name, outs in made.items():
        counts = [len(out.new_tokens()[0]) for out in outs[: len(prompts)]]
        per_token = median(median(times) / max(count, 1) for times, count in zip(seconds[name], counts, strict=True))
        stats = [out.stats for out in outs if out.stats is not None]
        same = sum(a == out.new_tokens() for a, out in zip(expected, outs, strict=True))
        steps, drafted, right = (
            sum(getattr(one, f"num_{what}") for one in stats)
            for what in ("draft_rounds", "draft_tokens", "accepted_draft_tokens")
        )
        rows.append(
            [
                name,
                f"{1e3 * per_token:.2f}",
                f"{ratio(seconds[PLAIN], seconds[name]):.2f}×",
                f"{1 + right / max(steps, 1):.2f}",
                f"{right / drafted:.0%}" if drafted else "",
                f"{1e3 * sum(one.draft_seconds for one in stats) / drafted:.2f}" if drafted else "",
                f"{same}/{len(outs)}",
            ]
        )
    print(
        f"{len(prompts)} prompts, {args.tokens} new tokens, {args.dtype}, backend {args.backend}, "
        f"torch {torch.__version__}\n"
    )
    header = ["draft", "ms per token", "vs plain", "acceptance length", "accepted", "ms per draft token", "same text"]
    print(table(header, rows))
    print(f"\n{watch.verdict()}")


if __name__ == "__main__":
    main()
