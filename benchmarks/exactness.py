"""What exactness costs, on the package's pair and held-out code, greedy.

    python benchmarks/exactness.py --prompts 12 --tokens 64            # how often a draft changes a text
    python benchmarks/exactness.py --strict --prompts 4 --tokens 64    # milliseconds with and without the promise

Texts: plain beside assisted, for every way of quantizing. Strict: the same weights with `exactness="strict"` and
without, interleaved, plain and assisted; "strict" is the time with the promise over the time without.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

from measure import Watch, interleaved, ratio, table

from specdec import SpecGenerator
from specdec.bench.prompts import held_out_prompts
from specdec.bench.samples import differences
from specdec.options.bundled_models import pair

MODES = [
    (quantization, dtype) for quantization in (None, "int8-weight", "int8", "nf4") for dtype in ("float32", "bfloat16")
]
STRICT = [(None, "float32"), (None, "bfloat16"), ("int8-weight", "bfloat16"), ("int4-weight", "bfloat16")]
DRAFTED = {"schedule": "constant", "num_assistant_tokens": 5}


def main() -> None:
    """Prints one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    prompts = held_out_prompts(given.prompts)
    if given.strict:
        strict(prompts, given.tokens, given.repeats)
    else:
        texts(prompts, given.tokens)


def loaded(quantization: str | None, dtype: str, **options: Any) -> tuple[SpecGenerator, SpecGenerator]:
    """Plain and assisted."""
    files = pair()
    assisted = SpecGenerator.from_pretrained(
        str(files.target), str(files.draft), quantization=quantization, dtype=dtype, prefix_cache=False, **options
    )
    return SpecGenerator(assisted.target, tokenizer=assisted.tokenizer, prefix_cache=False), assisted


def texts(prompts: list[str], tokens: int) -> None:
    """One line per mode: texts that differ, where first, and the ratio of times, plain over assisted."""
    print("| quantization | dtype | exactness | texts changed | first at token | plain / assisted time |")
    print("| --- | --- | --- | ---: | ---: | ---: |")
    for quantization, dtype in MODES:
        plain, assisted = loaded(quantization, dtype, draft_options={"dtype": "float32"})
        places, ratios = [], []
        for text in prompts:
            mine = plain.generate(text, max_new_tokens=tokens)
            theirs = assisted.generate(text, max_new_tokens=tokens, **DRAFTED)
            difference = next(differences(mine.new_tokens(), theirs.new_tokens()), None)
            places += [] if difference is None else [difference.position]
            ratios.append(mine.stats.seconds / theirs.stats.seconds)
        row = (quantization, dtype, theirs.stats.exactness, f"{len(places)} of {len(prompts)}")
        print("|", *(f"{cell} |" for cell in (*row, min(places, default=""), f"{median(ratios):.2f}")), flush=True)


def strict(prompts: list[str], tokens: int, repeats: int) -> None:
    """One line per mode: milliseconds per token without the promise, and what the promise multiplies them by."""
    watch, rows = Watch(), []
    for quantization, dtype in STRICT:
        systems: dict[str, Callable[[str], Any]] = {}
        for exactness in ("auto", "strict"):
            plain, assisted = loaded(quantization, dtype, backend="packed", exactness=exactness)
            options = {"max_new_tokens": tokens, "eos_token_id": [], "pad_token_id": 0}
            systems[exactness] = lambda text, plain=plain, how=options: plain.generate(text, **how)
            systems[f"{exactness}, assisted"] = lambda text, assisted=assisted, how=options: assisted.generate(
                text, **how, **DRAFTED
            )
        seconds = interleaved(systems, prompts, repeats, watch, warm_up=True)
        cells = []
        for way in ("", ", assisted"):
            usual = seconds["auto" + way]
            cells.append(f"{1e3 * median(map(median, usual)) / tokens:.2f}")
            cells.append(f"{ratio(seconds['strict' + way], usual):.2f}x")
        rows.append([", ".join(filter(None, (quantization, dtype))), *cells])
    print(table(["weights", "plain, ms per token", "strict", "assisted, ms per token", "strict"], rows))
    print(f"\n{watch.verdict()}")


if __name__ == "__main__":
    main()
