"""How often a draft knows the target's greedy token, among its first 1, 2, 3 … guesses, and what its passes cost.

    python benchmarks/agreement.py                      # the package's pair on held-out code
    python benchmarks/agreement.py --target t --draft d --prompts humaneval.jsonl --count 64

Both models read the target's own text (teacher-forced). These are the numbers that `synthetic.py` drafts by.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from measure import Watch, read_prompts, table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec import LanguageModel
from specdec.core.tree import Tree
from specdec.core.work import Work
from specdec.options.bundled_models import pair

RANKS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
NODES = (1, 4, 16, 64)


@torch.no_grad()
def ranks(target: Any, draft: Any, ids: Tensor, tokens: int) -> Tensor:
    """`[tokens]`: how many tokens the draft finds likelier than the target's own, after each prefix of its text."""
    text = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    new = text[0, ids.shape[1] :]
    logits = draft(text[:, :-1]).logits[0, ids.shape[1] - 1 :]
    return (logits > logits.gather(1, new[:, None])).sum(1)


def seconds_of_a_pass(draft: Any, nodes: int, prefix: int = 256, repeats: int = 30) -> float:
    """Median seconds of a draft pass over siblings at the end of a text."""
    session = LanguageModel(draft).session()
    row = session.add()
    session.run([Work.text(row, [5] * prefix)])
    session.commit([row], [list(range(prefix))])
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        session.run([Work(row, Tree([7] * nodes, [-1] * nodes), nodes)])
        seconds.append(time.perf_counter() - began)
        session.commit([row], [[]])
    return statistics.median(seconds)


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=pair().target)
    parser.add_argument("--draft", default=pair().draft)
    parser.add_argument("--prompts", type=Path, help="text file or JSON lines (default: held-out code)")
    parser.add_argument("--count", type=int, default=32, help="prompts")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per prompt")
    args = parser.parse_args()
    target, draft = (
        AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32).eval() for p in (args.target, args.draft)
    )
    tokenizer, watch = AutoTokenizer.from_pretrained(args.target), Watch()
    prompts = [tokenizer(p, return_tensors="pt").input_ids for p in read_prompts(args.prompts, args.count)]
    found = torch.cat([ranks(target, draft, ids, args.tokens) for ids in prompts])
    print(f"{len(found)} tokens of {len(prompts)} prompts\n")
    print(
        table(
            ["first guesses", "target's token among them"],
            [[f"{k}", f"{(found < k).float().mean():.3f}"] for k in RANKS],
        )
    )
    rows = []
    for nodes in NODES:
        watch.look()
        rows.append([f"{nodes}", f"{1e3 * seconds_of_a_pass(draft, nodes):.2f}"])
    print()
    print(table(["nodes", "ms of a draft pass"], rows))
    print(f"\n{watch.verdict()}")


if __name__ == "__main__":
    main()
