"""What quantizing does to a model: its bytes, how well it foretells a text, and the milliseconds of a token.

    python benchmarks/quantized.py HuggingFaceTB/SmolLM2-135M-Instruct --text book.txt

Every way reads the same windows of the text. *Same token*: at how many positions its likeliest token is that of the
model in float32. Milliseconds are medians of plain greedy texts that go on with the first windows, the ways in turn.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import Watch, interleaved, table
from torch import Tensor
from torch.nn import functional as F

from specdec import SpecGenerator

# Name -> how it is loaded; the first one is what the others are compared with.
WAYS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8-weight, float32": {"dtype": "float32", "quantization": "int8-weight"},
    "int8-weight, bfloat16": {"dtype": "bfloat16", "quantization": "int8-weight"},
    "int8-weight, rows as they are": {"dtype": "bfloat16", "quantization": "int8-weight", "activations": "float"},
    "int4-weight, float32": {"dtype": "float32", "quantization": "int4-weight"},
    "int4-weight, bfloat16": {"dtype": "bfloat16", "quantization": "int4-weight"},
    "int4-weight, rows as they are": {"dtype": "bfloat16", "quantization": "int4-weight", "activations": "float"},
}
PROMPTS = 4
PROMPT_TOKENS, NEW_TOKENS = 96, 48


@torch.no_grad()
def foretold(generator: SpecGenerator, windows: Tensor) -> tuple[float, Tensor]:
    """The perplexity of `windows` `[windows, tokens]`, and the likeliest token behind each of theirs."""
    loss, likeliest = 0.0, []
    for window in windows:
        logits = generator.target.model(window[None]).logits[0, :-1].float()
        loss += float(F.cross_entropy(logits, window[1:], reduction="sum"))
        likeliest.append(logits.argmax(-1))
    return math.exp(loss / windows[:, 1:].numel()), torch.stack(likeliest)


def main() -> None:
    """Prints a row for every way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512, help="of a window")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--backend", default="packed")
    given = parser.parse_args()
    ways = {
        name: SpecGenerator.from_pretrained(given.target, backend=given.backend, **how) for name, how in WAYS.items()
    }
    ids = next(iter(ways.values())).tokenizer(given.text.read_text("utf-8"), return_tensors="pt").input_ids[0]
    starts = torch.linspace(0, len(ids) - given.tokens, given.windows).long()
    windows = torch.stack([ids[start : start + given.tokens] for start in starts.tolist()])
    found = {name: foretold(generator, windows) for name, generator in ways.items()}
    exact = next(iter(found.values()))[1]
    length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    systems = {name: lambda prompt, g=generator: g.generate(prompt, **length) for name, generator in ways.items()}
    prompts = list(windows[:PROMPTS, None, :PROMPT_TOKENS])
    seconds = interleaved(systems, prompts, given.repeats, Watch(), warm_up=True)
    print(table(["", "MB of weights", "perplexity", "same token", "ms per token"], [
        [
            name,
            f"{generator.target.weight_bytes / 1e6:.0f}",
            f"{found[name][0]:.2f}",
            f"{float((found[name][1] == exact).float().mean()):.1%}",
            f"{1e3 * median(map(median, seconds[name])) / NEW_TOKENS:.2f}",
        ]
        for name, generator in ways.items()
    ]))  # fmt: skip


if __name__ == "__main__":
    main()
