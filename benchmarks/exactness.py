"""How often a draft changes the text of a quantized target: the package's pair, held-out code, greedy.

python benchmarks/exactness.py --prompts 12 --tokens 64
"""

from __future__ import annotations

import argparse
from statistics import median

from specdec import SpecGenerator
from specdec.bench.compare import differences
from specdec.bench.duel import prompt
from specdec.zoo import pair

MODES = [
    (quantization, dtype) for quantization in (None, "int8-weight", "int8", "nf4") for dtype in ("float32", "bfloat16")
]


def main() -> None:
    """Prints one line per mode: texts that differ, where first, and the ratio of times, plain over assisted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    prompts, files = [prompt(seed) for seed in range(given.prompts)], pair()
    print("| quantization | dtype | exactness | texts changed | first at token | plain / assisted time |")
    print("| --- | --- | --- | ---: | ---: | ---: |")
    for quantization, dtype in MODES:
        assisted = SpecGenerator.from_pretrained(
            str(files.target),
            str(files.draft),
            quantization=quantization,
            dtype=dtype,
            draft_options={"dtype": "float32"},
        )
        plain = SpecGenerator(assisted.target, tokenizer=assisted.tokenizer)
        places, ratios = [], []
        for text in prompts:
            options = {"max_new_tokens": given.tokens}
            mine = plain.generate(text, **options)
            theirs = assisted.generate(text, schedule="constant", num_assistant_tokens=5, **options)
            difference = next(differences(mine.new_tokens(), theirs.new_tokens()), None)
            places += [] if difference is None else [difference.position]
            ratios.append(mine.stats.seconds / theirs.stats.seconds)
        row = (quantization, dtype, theirs.stats.exactness, f"{len(places)} of {len(prompts)}")
        print("|", *(f"{cell} |" for cell in (*row, min(places, default=""), f"{median(ratios):.2f}")), flush=True)


if __name__ == "__main__":
    main()
