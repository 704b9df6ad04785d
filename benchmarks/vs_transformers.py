"""specdec beside transformers: the same pair, the same prompts, one interleaved run, outputs compared.

    python benchmarks/vs_transformers.py                      # the pair and held-out prompts of the package
    python benchmarks/vs_transformers.py --dtype bfloat16 --tokens 256
    python benchmarks/vs_transformers.py --prompts humaneval.jsonl --target my-target --draft my-draft

Every ratio is the median over prompts of the ratio of median seconds. transformers assisted runs with the schedule of
its original report (5 tokens, +2/−1), prompt lookup with 10 tokens. `--json` writes the tables' figures to a file, from
which `docs/make/figures.py` draws.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from measure import Watch, assistant, interleaved, ratio, read_prompts, table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec import SpecGenerator
from specdec.bench.machine import provenance
from specdec.options.bundled_models import pair
from specdec.options.load import BACKENDS

GREEDY = "transformers greedy"
ASSISTED = "transformers assisted"
LOOKUP = "transformers prompt lookup"
PLAIN = "specdec plain"


def build(args: argparse.Namespace, dtype: torch.dtype) -> tuple[dict[str, Callable[[Tensor], Any]], Any]:
    """The systems by name, each from prompt ids `[1, length]` to its result, and the target."""
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).eval()
    draft = AutoModelForCausalLM.from_pretrained(args.draft, dtype=dtype).eval()
    common = {"max_new_tokens": args.tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def reference(**options: Any) -> Callable[[Tensor], Any]:
        return lambda ids: target.generate(ids, attention_mask=torch.ones_like(ids), **common, **options)

    def ours(draft: Any, **options: Any) -> Callable[[Tensor], Any]:
        generator = SpecGenerator(target, draft, backend=args.backend, prefix_cache=False)
        run = {"max_new_tokens": args.tokens, "do_sample": False, "eos_token_id": [], "pad_token_id": 0}
        return lambda ids: generator.generate(ids, **run, **options)

    systems = {
        GREEDY: reference(),
        ASSISTED: reference(assistant_model=assistant(draft)),
        LOOKUP: reference(prompt_lookup_num_tokens=10),
        PLAIN: ours(None),
        "specdec model, heuristic": ours(draft, schedule="heuristic"),
        "specdec model, cost": ours(draft, schedule="cost"),
        "specdec ngram, constant": ours("ngram", schedule="constant", num_assistant_tokens=10),
        "specdec suffix, cost": ours("suffix", schedule="cost"),
        "specdec hybrid, cost": ours(("suffix", draft), schedule="cost"),
        "specdec early exit of 8 layers": ours("early_exit:8", schedule="heuristic"),
    }
    return systems, target


def main() -> None:
    """Runs the comparison for every dtype and prints one table each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or hub id (default: the package's pair)")
    parser.add_argument("--draft")
    parser.add_argument("--prompts", type=Path, help="text file or JSON lines (default: held-out code)")
    parser.add_argument("--count", type=int, default=8, help="prompts")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "both"), default="both")
    parser.add_argument("--backend", choices=BACKENDS, default="packed", help="what specdec's passes run on")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    if args.target is None:
        args.target, args.draft = pair().target, pair().draft
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompts = [tokenizer(p, return_tensors="pt").input_ids for p in read_prompts(args.prompts, args.count)]
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {args.threads} threads, ", end="")
    print(f"{len(prompts)} prompts of {statistics.median(p.shape[1] for p in prompts):.0f} tokens, {args.tokens} new")
    dtypes = ("float32", "bfloat16") if args.dtype == "both" else (args.dtype,)
    tables = {name: report(args, name, prompts) for name in dtypes}
    if args.json is not None:
        found = {name: provenance()[name] for name in ("processor", "cores", "threads", "versions")}
        found |= {"prompts": len(prompts), "tokens": args.tokens, "backend": args.backend, "tables": tables}
        args.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def report(args: argparse.Namespace, dtype: str, prompts: list[Tensor]) -> list[dict[str, str]]:
    """One dtype's table, printed; its rows by their columns."""
    watch = Watch()
    systems, target = build(args, getattr(torch, dtype))
    outputs: dict[str, list[Any]] = {}
    seconds = interleaved(systems, prompts, args.repeats, watch, outputs, warm_up=True)
    best = min((GREEDY, ASSISTED, LOOKUP), key=lambda name: -ratio(seconds[GREEDY], seconds[name]))
    rows = []
    for name in systems:
        per_token = statistics.median(statistics.median(s) for s in seconds[name]) / args.tokens
        stats = [out.stats for out in outputs[name] if hasattr(out, "stats")]
        rows.append(
            [
                name,
                f"{1e3 * per_token:.2f}",
                f"{ratio(seconds[GREEDY], seconds[name]):.2f}x",
                f"{ratio(seconds[ASSISTED], seconds[name]):.2f}x",
                f"{ratio(seconds[best], seconds[name]):.2f}x",
                f"{statistics.mean(s.mean_acceptance_length for s in stats):.2f}" if stats else "",
                f"{statistics.mean(s.draft_acceptance_rate for s in stats):.0%}" if stats else "",
                same(outputs[GREEDY], outputs[name], target),
            ]
        )
    header = ["system", "ms per token", "vs greedy", "vs assisted", f"vs best ({best.split()[-1]})"]
    print(f"\n{dtype}\n")
    header += ["mean acceptance length", "acceptance rate", "same text"]
    print(table(header, rows))
    for row in rows:
        if row[0].startswith("specdec") and float(row[2][:-1]) < 1:
            print(f"\n{row[0]} is slower than transformers greedy here ({row[2]}).")
    print(f"\n{watch.verdict()}", flush=True)
    return [dict(zip(header, row, strict=True)) for row in rows]


def same(expected: list[Any], got: list[Any], target: Any) -> str:
    """How many outputs are equal, and the smallest top-2 gap at which one of the others parts ways."""
    gaps = []
    for a, b in zip(map(ids_of, expected), map(ids_of, got), strict=True):
        if a != b:
            at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
            with torch.no_grad():
                top = target(torch.tensor([a[:at]])).logits[0, -1].float().topk(2).values
            gaps.append(float(top[0] - top[1]))
    text = f"{len(expected) - len(gaps)}/{len(expected)}"
    return text if not gaps else f"{text} (gaps ≤ {max(gaps):.2g})"


def ids_of(result: Any) -> list[int]:
    """The first row of ids of either library's result."""
    return (result.sequences if hasattr(result, "sequences") else result)[0].tolist()


if __name__ == "__main__":
    main()
