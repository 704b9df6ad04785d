"""Pipelines beside transformers on the same models: plain, assisted, and their assisted modes, in one interleaved run.

    python benchmarks/pipelines.py summaries --target my-t5 --draft my-small-t5 --texts articles.jsonl
    python benchmarks/pipelines.py summaries --target my-bart --dtype bfloat16 --tokens 128

Seconds are those of decoding, the encoder included and the tokenizer not. Every ratio is the median over texts of the
ratio of median seconds. A kind of pipeline is a function from the arguments to its `Bench`.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from measure import Watch, interleaved, ratio, read_prompts, table
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from specdec import SpecGenerator

PLAIN, ASSISTED = "specdec plain", "transformers assisted"


@dataclass(frozen=True)
class Bench:
    """What is compared: cases, systems from a case to its result, and what to call the cases."""

    cases: list[Any]
    systems: dict[str, Callable[[Any], Any]]
    what: str


def summaries(args: argparse.Namespace) -> Bench:
    """Texts, each read at once and as far as the target reads, by an encoder-decoder and its drafts."""
    dtype = getattr(torch, args.dtype)
    target, *drafts = (
        AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype).eval()
        for folder in (args.target, args.draft)
        if folder is not None
    )
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    tasks = getattr(target.config, "task_specific_params", None) or {}
    prefix = tasks.get("summarization", {}).get("prefix", "")
    texts = read_prompts(args.texts, args.count)
    cases = [
        tokenizer(prefix + text, truncation=True, return_tensors="pt").input_ids[:, : args.length] for text in texts
    ]
    common = {"max_new_tokens": args.tokens, "do_sample": False, "num_beams": 1}

    def theirs(**options: Any) -> Callable[[Any], Any]:
        return lambda ids: target.generate(ids, attention_mask=torch.ones_like(ids), **common, **options)

    def ours(draft: Any, **options: Any) -> Callable[[Any], Any]:
        generator = SpecGenerator(target, draft, compile=args.compile)
        return lambda ids: generator.generate(ids, **common, **options)

    systems = {"transformers greedy": theirs()}
    for draft in drafts:
        helper = copy.deepcopy(draft)
        helper.generation_config.num_assistant_tokens = 5
        helper.generation_config.num_assistant_tokens_schedule = "heuristic"
        helper.generation_config.assistant_confidence_threshold = 0.0
        systems[ASSISTED] = theirs(assistant_model=helper)
    systems["transformers prompt lookup"] = theirs(prompt_lookup_num_tokens=10)
    systems[PLAIN] = ours(None)
    systems["specdec suffix, cost"] = ours("suffix", schedule="cost")
    for draft in drafts:
        systems["specdec model, cost"] = ours(draft, schedule="cost")
        systems["specdec hybrid, cost"] = ours(("suffix", draft), schedule="cost")
    length = statistics.median(case.shape[1] for case in cases)
    return Bench(cases, systems, f"{len(cases)} texts of {length:.0f} tokens, at most {args.tokens} new")


def report(bench: Bench, repeats: int) -> None:
    """Runs all systems in turn and prints one table."""
    watch = Watch()
    outputs: dict[str, list[Any]] = {name: [] for name in bench.systems}
    for run in bench.systems.values():
        run(bench.cases[0])

    def recorded(name: str) -> Callable[[Any], None]:
        return lambda case: outputs[name].append(bench.systems[name](case))

    seconds = interleaved({name: recorded(name) for name in bench.systems}, bench.cases, repeats, watch)
    assisted = ASSISTED if ASSISTED in bench.systems else "transformers prompt lookup"
    rows = []
    for name, found in outputs.items():
        stats = [out.stats for out in found if hasattr(out, "stats")]
        alike = sum(ids_of(a) == ids_of(b) for a, b in zip(found, outputs[PLAIN], strict=True))
        new = statistics.mean(len(ids_of(out)) - 1 for out in found)
        rows.append(
            [
                name,
                f"{1e3 * statistics.median(map(statistics.median, seconds[name])):.0f}",
                f"{new:.0f}",
                f"{ratio(seconds[PLAIN], seconds[name]):.2f}x",
                f"{ratio(seconds[assisted], seconds[name]):.2f}x",
                f"{statistics.mean(s.mean_acceptance_length for s in stats):.2f}" if stats else "",
                f"{statistics.mean(s.target_passes_per_token for s in stats):.2f}" if stats else "",
                f"{alike}/{len(found)}",
            ]
        )
    header = ["system", "ms per case", "new tokens", "vs specdec plain", f"vs {assisted}"]
    print(f"\n{bench.what}\n")
    print(table([*header, "mean acceptance length", "passes per token", "same as plain"], rows))
    print(f"\n{watch.verdict()}", flush=True)


def ids_of(result: Any) -> list[int]:
    """The first row of ids of either library's result."""
    return (result.sequences if hasattr(result, "sequences") else result)[0].tolist()


KINDS: dict[str, Callable[[argparse.Namespace], Bench]] = {"summaries": summaries}


def main() -> None:
    """Runs the kind of pipeline that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--target", required=True, help="folder or hub id")
    parser.add_argument("--draft", help="a smaller model; without it, text drafts alone")
    parser.add_argument("--texts", type=Path, help="text file or JSON lines (default: held-out code)")
    parser.add_argument("--count", type=int, default=8, help="texts")
    parser.add_argument("--length", type=int, default=512, help="tokens of a text, at most")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per text, at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--compile", action="store_true", help="torch.compile specdec's passes")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, ", end="")
    print(f"{torch.get_num_threads()} threads, {args.kind}, {args.dtype}")
    report(KINDS[args.kind](args), args.repeats)


if __name__ == "__main__":
    main()
