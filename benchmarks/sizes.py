"""Milliseconds per token over the size of a model: specdec without a draft, and transformers.

    python benchmarks/sizes.py --json benchmarks/results/sizes.json && python docs/make/figures.py    # a quarter of an
    hour

Models are Llamas of random weights in float32, whose passes cost what those of real ones of this size cost. Both write
the same number of tokens greedily after one prompt, in turn; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measure import Watch, interleaved, table
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from specdec import SpecGenerator
from specdec.bench.machine import provenance
from specdec.options.load import BACKENDS

SHAPES = ((4, 256), (8, 384), (12, 512), (16, 768), (24, 1024), (24, 1536))  # layers and width
PROMPT = list(range(3, 67))


def written(folder: str, layers: int, width: int) -> int:
    """Saves a model of random weights there and returns the number of its parameters."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 64}
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "vocab_size": 8192}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))
    model.save_pretrained(folder)
    return model.num_parameters()


def systems(folder: str, tokens: int, backend: str) -> dict[str, Callable[[Any], Any]]:
    """Both, as functions from a prompt's ids to the text."""
    how = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": [], "pad_token_id": 0}
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = SpecGenerator.from_pretrained(folder, dtype="float32", backend=backend, prefix_cache=False)
    plain = {**how, "eos_token_id": None, "min_new_tokens": tokens}

    def reference(ids: list[int]) -> Any:
        prompt = torch.tensor([ids])
        return theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **plain)

    return {"transformers": reference, "specdec": lambda ids: ours.generate([ids], **how)}


def main() -> None:
    """Measures every size and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--backend", choices=BACKENDS, default="packed", help="what specdec's passes run on")
    parser.add_argument("--count", type=int, default=len(SHAPES), help="sizes, from the smallest on")
    args = parser.parse_args()
    watch, sizes = Watch(), []
    for layers, width in SHAPES[: args.count]:
        with TemporaryDirectory() as folder:
            found: dict[str, float] = {"parameters": written(folder, layers, width)}
            both = systems(folder, args.tokens, args.backend)
            for name, [seconds] in interleaved(both, [PROMPT], args.repeats, watch, warm_up=True).items():
                found[name] = round(1e3 * statistics.median(seconds) / args.tokens, 2)
        sizes.append(found)
    rows = [[f"{one['parameters'] / 1e6:.1f} M", f"{one['transformers']}", f"{one['specdec']}"] for one in sizes]
    print(table(["parameters", "transformers, ms per token", "specdec, ms per token"], rows))
    print(f"\n{watch.verdict()}")
    if args.json:
        machine = {"processor": provenance()["processor"], "threads": torch.get_num_threads()}
        args.json.write_text(json.dumps({**machine, "sizes": sizes}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
