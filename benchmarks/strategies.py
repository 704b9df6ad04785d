"""Every strategy beside transformers and with drafts, in one interleaved run on the package's pair.

    python benchmarks/strategies.py
    python benchmarks/strategies.py --only "beam search" --dtype bfloat16 --length 512

Per strategy: transformers where it still has it, specdec without a draft, and with drafts. "vs plain" is the time
without a draft over the time with it; "passes" are target passes over those of plain decoding.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import transformers
from measure import Watch, interleaved, ratio, read_prompts, table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec import LanguageModel, SpecGenerator
from specdec.options.bundled_models import pair
from specdec.options.load import BACKENDS

# name -> (options of both libraries, of specdec alone, whether transformers has it)
STRATEGIES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "greedy": ({"do_sample": False}, {}, True),
    "sample": ({"do_sample": True, "top_k": 50, "top_p": 0.9}, {"seed": 1}, True),
    "beam search": ({"do_sample": False, "num_beams": 4}, {}, True),
    "beam sample": ({"do_sample": True, "num_beams": 4}, {"seed": 1}, True),
    "group beam search": (
        {"do_sample": False, "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {},
        False,
    ),
    "contrastive search": ({"do_sample": False, "penalty_alpha": 0.6, "top_k": 4}, {}, False),
    "sample-and-rank": ({"do_sample": True, "top_k": 40}, {"num_samples": 16, "seed": 1}, True),
}
NO_DRAFT = {"contrastive search"}
TRANSFORMERS = {"sample-and-rank": {"num_return_sequences": 16}}  # it draws them, but ranks nothing


def loaded(path: str, args: argparse.Namespace) -> LanguageModel:
    """A model of specdec's own in the backend that was asked for."""
    return SpecGenerator.from_pretrained(path, dtype=args.dtype, backend=args.backend).target


def build(args: argparse.Namespace, strategy: str) -> dict[str, Callable[[Tensor], Any]]:
    """The systems by name, each from prompt ids `[1, length]` to its result."""
    theirs = AutoModelForCausalLM.from_pretrained(pair().target, dtype=getattr(torch, args.dtype)).eval()
    target, draft = (loaded(str(path), args) for path in (pair().target, pair().draft))
    shared, own, known = STRATEGIES[strategy]

    def ours(draft: Any, **options: Any) -> Callable[[Tensor], Any]:
        generator = SpecGenerator(target, draft, prefix_cache=False)
        common = {"max_new_tokens": args.tokens, "eos_token_id": [], "pad_token_id": 0}
        return lambda ids: generator.generate(ids, **common, **shared, **own, **options)

    systems: dict[str, Callable[[Tensor], Any]] = {}
    if known:
        more = {
            "max_new_tokens": args.tokens,
            "eos_token_id": None,
            "pad_token_id": 0,
            **TRANSFORMERS.get(strategy, {}),
        }
        systems["transformers"] = lambda ids: theirs.generate(
            ids, attention_mask=torch.ones_like(ids), **more, **shared
        )
    systems["specdec plain"] = ours(None)
    if strategy not in NO_DRAFT:
        systems["specdec model, constant 3"] = ours(draft, schedule="constant", num_assistant_tokens=3)
        if "num_beams" not in shared:
            tree = {"num_assistant_tokens": 3, "num_assistant_branches": 3}
            systems["specdec model, constant 3, trees"] = ours(draft, schedule="constant", **tree)
            systems["specdec model, cost, chains"] = ours(draft, schedule="cost", num_assistant_branches=1)
        else:
            wide = {"num_assistant_tokens": 6, "num_assistant_branches": 32}
            systems["specdec model, constant 6, 32 branches"] = ours(draft, schedule="constant", **wide)
        systems["specdec model, cost"] = ours(draft, schedule="cost")
        systems["specdec suffix, cost"] = ours("suffix", schedule="cost")
    return systems


def report(args: argparse.Namespace, strategy: str, prompts: list[Tensor]) -> None:
    """One strategy's table."""
    watch = Watch()
    systems = build(args, strategy)
    outputs: dict[str, list[Any]] = {}
    seconds = interleaved(systems, prompts, args.repeats, watch, outputs, warm_up=True)
    plain = "specdec plain"
    rows = []
    for name in systems:
        per_token = statistics.median(statistics.median(s) for s in seconds[name]) / args.tokens
        against = f"{ratio(seconds['transformers'], seconds[name]):.2f}x" if "transformers" in systems else ""
        cells = [name, f"{1e3 * per_token:.2f}", against, f"{ratio(seconds[plain], seconds[name]):.2f}x"]
        if name != "transformers":
            passes, bare = (sum(o.stats.num_target_passes for o in outputs[n]) for n in (name, plain))
            alike = sum(
                a.sequences.tolist() == b.sequences.tolist() for a, b in zip(outputs[name], outputs[plain], strict=True)
            )
            cells += [f"{passes / bare:.0%}", f"{alike}/{len(outputs[plain])}"]
        rows.append([*cells, *[""] * (6 - len(cells))])
    print(f"\n{strategy}, {args.dtype}\n")
    print(table(["system", "ms per token", "vs transformers", "vs plain", "passes", "same as plain"], rows))
    print(f"\n{watch.verdict()}", flush=True)


def main() -> None:
    """Runs the strategies that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=STRATEGIES, action="append")
    parser.add_argument("--count", type=int, default=4, help="prompts")
    parser.add_argument("--length", type=int, default=512, help="tokens of a prompt, at most")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens per prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--backend", choices=BACKENDS, default="packed", help="what specdec's passes run on")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(pair().target)
    texts = read_prompts(None, 4 * args.count)
    together = ["\n\n".join(texts[4 * i : 4 * i + 4]) for i in range(args.count)]
    prompts = [tokenizer(text, return_tensors="pt").input_ids[:, : args.length] for text in together]
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads, ",
        end="",
    )
    print(f"{len(prompts)} prompts of {statistics.median(p.shape[1] for p in prompts):.0f} tokens, {args.tokens} new")
    for strategy in args.only or STRATEGIES:
        report(args, strategy, prompts)


if __name__ == "__main__":
    main()
