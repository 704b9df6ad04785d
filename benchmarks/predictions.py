"""Predictions of the output: the target's own text with a share of its tokens replaced, interleaved with no prediction.

    python benchmarks/predictions.py --count 6 --tokens 128 --edits 0 0.02 0.05 0.1 1

Shares are of tokens that are drawn anew, as an edited file differs from what it was; at 1 nothing of it is right.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from typing import Any

import torch
from measure import Watch, interleaved, ratio, read_prompts, table

from specdec import SpecGenerator
from specdec.options.bundled_models import pair


def edited(text: list[int], share: float, vocab: int, seed: int) -> list[int]:
    """The text with about this share of its tokens replaced."""
    generator = random.Random(seed)
    return [generator.randrange(vocab) if generator.random() < share else token for token in text]


def main() -> None:
    """Prints one line per draft and share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=6, help="prompts")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--edits", type=float, nargs="+", default=[0, 0.02, 0.05, 0.1, 1], help="shares of tokens")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    models = pair()
    plain = SpecGenerator.from_pretrained(str(models.target), dtype=args.dtype, prefix_cache=False)
    drafts = {"suffix": "suffix", "hybrid": f"suffix+{models.draft}"}
    generators = {
        name: SpecGenerator(plain.target, draft, tokenizer=plain.tokenizer, schedule="cost", prefix_cache=False)
        for name, draft in drafts.items()
    }
    prompts = read_prompts(None, args.count)
    common: dict[str, Any] = {"max_new_tokens": args.tokens, "eos_token_id": []}
    texts = [plain.generate(prompt, **common).new_tokens()[0] for prompt in prompts]
    same: dict[str, int] = {}
    passes: dict[str, list[float]] = {}

    def system(name: str, generator: SpecGenerator, share: float | None) -> Callable[[int], None]:
        def run(case: int) -> None:
            text = texts[case]
            known = None if share is None else edited(text, share, generator.target.vocab_size, case)
            out = generator.generate(prompts[case], prediction=known, **common)
            same[name] = same.get(name, 0) + (out.new_tokens()[0] == text)
            assert out.stats is not None
            passes.setdefault(name, []).append(out.stats.target_passes_per_token)

        return run

    systems = {"plain": system("plain", plain, None)}
    for draft, generator in generators.items():
        for share in (None, *args.edits):
            name = f"{draft}, {'no prediction' if share is None else f'{share:.0%} of it edited'}"
            systems[name] = system(name, generator, share)
    watch = Watch()
    seconds = interleaved(systems, range(len(prompts)), args.repeats, watch)
    rows = [
        [
            name,
            f"{1e3 * statistics.median(map(statistics.median, seconds[name])) / args.tokens:.2f}",
            f"{ratio(seconds['plain'], seconds[name]):.2f}x",
            f"{statistics.mean(passes[name]):.3f}",
            f"{same[name]}/{len(passes[name])}",
        ]
        for name in systems
    ]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.dtype}\n")
    print(table(("system", "ms per token", "vs plain", "target passes per token", "same text"), rows))
    print(f"\n{watch.verdict()}")


if __name__ == "__main__":
    main()
