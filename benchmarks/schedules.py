"""Draft schedules beside each other and beside plain decoding, on the package's pair or yours.

    python benchmarks/schedules.py                                  # chains of the draft model, greedy, one at a time
    python benchmarks/schedules.py --draft suffix --batch 8 --temperature 1.2
    python benchmarks/schedules.py --draft wrong                    # a draft model whose guesses are all wrong

Every schedule, and decoding without a draft, answers the same prompts in turn; a second is that of a whole call. The
figures are medians over prompts, each of the median over `--repeats`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from engine import AlwaysWrong
from measure import Watch, interleaved, ratio, read_prompts, table

from specdec import LanguageModel, SpecGenerator
from specdec.core.draft_schedules import SCHEDULES
from specdec.options.bundled_models import pair
from specdec.options.load import BACKENDS
from specdec.proposers import ModelDraft


def drafts(name: str, model: LanguageModel) -> Any:
    """The draft of this name; `wrong` does a draft model's work, and guesses nothing right."""
    if name == "wrong":
        return AlwaysWrong(model)
    return {"model": ModelDraft(model), "both": ("suffix", model)}.get(name, name)


def main() -> None:
    """Prints tokens per second of every schedule, as times of plain decoding and of the best schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="python-code", help="a bundled pair")
    parser.add_argument("--draft", default="model", help="model, wrong, both, or any word of `draft=`")
    parser.add_argument("--batch", type=int, default=1, help="prompts at a time")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--backend", choices=BACKENDS, default="packed")
    parser.add_argument("--count", type=int, default=6, help="prompts, or batches of prompts")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    bundled = pair(args.pair)
    loaded = [
        SpecGenerator.from_pretrained(str(folder), dtype="float32", backend=args.backend)
        for folder in (bundled.target, bundled.draft)
    ]
    for generator in loaded:
        generator.wait_until_compiled()
    target, tokenizer = loaded[0].target, loaded[0].tokenizer
    draft = drafts(args.draft, loaded[1].target)
    how: dict[str, Any] = {"max_new_tokens": args.tokens, "eos_token_id": [], "pad_token_id": 0}
    if args.temperature:
        how |= {"do_sample": True, "temperature": args.temperature, "top_k": 0, "seed": 1}

    def runs(schedule: str | None) -> Callable[[list[str]], Any]:
        own = {"schedule": schedule} if schedule else {}
        gen = SpecGenerator(target, draft if schedule else None, tokenizer=tokenizer, prefix_cache=False, **own)
        return lambda texts: gen.generate(texts, **how)

    systems = {"plain": runs(None), **{name: runs(name) for name in SCHEDULES}}
    texts = read_prompts(None, args.count * args.batch)
    cases = [texts[i : i + args.batch] for i in range(0, len(texts), args.batch)]
    for run in systems.values():
        run(cases[0])
    watch = Watch()
    seconds = interleaved(systems, cases, args.repeats, watch)
    gains = {name: ratio(seconds["plain"], own) for name, own in seconds.items()}
    best = max(gain for name, gain in gains.items() if name not in ("plain", "auto"))
    rows = [[name, f"{gain:.2f}", f"{gain / best:.2f}"] for name, gain in gains.items()]
    header = [f"{args.draft}, {args.batch} at a time, temperature {args.temperature:g}", "of plain", "of best"]
    print(table(header, rows))
    print(watch.verdict())


if __name__ == "__main__":
    main()
