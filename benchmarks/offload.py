"""A target on disk: accelerate's own offloading beside ours, plain and assisted, cold and warm, interleaved.

    python benchmarks/offload.py                       # 316 M random weights, bfloat16, SYNTHETIC draft
    python benchmarks/offload.py --passes              # seconds of single passes over 1, 16, 64, 256 tokens instead
    python benchmarks/offload.py --passes --prefetch   # and those of accelerate's hooks behind a prefetch thread
    python benchmarks/offload.py --memory 400 --branches 8

The weights are random, but the head is a permutation of the embedding, so that texts have wide margins and bfloat16
rounding cannot part them. Cold: the files' pages are dropped from the page cache (`posix_fadvise`) before every target
pass, and the dropping is not counted. Outputs are compared with the text of the same model in memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model
from measure import Watch, read_prompts, table
from prefetch import prefetch
from synthetic import SyntheticAssistant, chances, random_target
from synthetic_draft import Oracle, SyntheticDraft, passes_of
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec import LanguageModel, SpecGenerator
from specdec.models.loading.streamed_layers import stream
from specdec.models.loading.weight_files import find
from specdec.options.bundled_models import pair

PLAIN = "accelerate plain"
MAPPED = "accelerate plain, from the checkpoint"
WEIGHTS = 9  # of a layer, which a prefetch thread is ahead
ASSISTED = "transformers assisted [synthetic]"
ASSISTED_MAPPED = "transformers assisted, from the checkpoint [synthetic]"


class Cold:
    """Drops a model's files from the page cache before each of its passes, while `on`; counts the seconds it takes."""

    on = False
    seconds = 0.0

    def watch(self, model: Any, folder: Path) -> Any:
        """The model, which will find its files cold."""
        files = [*folder.glob("*.dat"), *folder.glob("*.safetensors")]
        model.register_forward_pre_hook(lambda *_: self._drop(files))
        return model

    def _drop(self, files: list[Path]) -> None:
        if not self.on:
            return
        began = time.perf_counter()
        for path in files:
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        self.seconds += time.perf_counter() - began


def make_target(folder: Path, layers: int, dtype: torch.dtype) -> None:
    """Saves random weights of width 1,024 with the vocabulary of the package's pair."""
    width = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_hidden_layers": layers}
    random_target(dtype, vocab_size=4096, **width).save_pretrained(folder)


def out_of_file(model: Any) -> Any:
    """The model with what is in memory copied: transformers maps the file, and mapped pages are not dropped."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.clone()
    return model.eval()


def models(folder: Path, args: Namespace, cold: Cold) -> dict[str, Any]:
    """The target with its layers on disk in three ways: accelerate's own files, accelerate on the checkpoint, streamed.

    What is not a layer stays in memory: transformers' assisted generation fails where the embedding is away.
    """
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places["model.layers"] = "disk"

    def own(name: str) -> Any:
        model = out_of_file(AutoModelForCausalLM.from_pretrained(folder, dtype="auto"))
        return dispatch_model(model, places, offload_dir=folder / name)

    def mapped() -> Any:
        return out_of_file(AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map=places))

    streamed = mapped()
    stream(streamed, find(streamed), max_memory=args.memory and args.memory * 2**20)
    found = {"own": (own("own"), folder / "own"), "mapped": (mapped(), folder), "streamed": (streamed, folder)}
    if args.prefetch:
        found["own, prefetched"] = prefetch(own("own2"), WEIGHTS), folder / "own2"
        found["mapped, prefetched"] = prefetch(mapped(), WEIGHTS), folder
    os.sync()  # pages that wait to be written cannot be dropped
    return {name: cold.watch(*pair) for name, pair in found.items()}


def systems(found: dict[str, Any], prompts: list[Tensor], texts: list[list[int]], args: Namespace) -> dict[str, Any]:
    """From the number of a prompt and a number of tokens to its text, by name."""
    draft = LanguageModel(AutoModelForCausalLM.from_pretrained(pair().draft, dtype=torch.float32).eval())
    work = passes_of(draft)
    helper, synthetic = SyntheticAssistant(4096, work).eval(), SyntheticDraft(chances(), work)
    new = [text[ids.shape[1] :] for text, ids in zip(texts, prompts, strict=True)]
    oracles = [Oracle([text], chances(), 4096, seed=case) for case, text in enumerate(new)]
    common = {"do_sample": False, "pad_token_id": 0}

    def reference(model: Any, **options: Any) -> Callable[[int, int], Any]:
        def run(case: int, tokens: int) -> Any:
            ids = prompts[case]
            helper.oracle, helper.begins = oracles[case], ids.shape[1]
            how = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "max_new_tokens": tokens}
            return model.generate(ids, **how, **common, **options)

        return run

    def ours(model: Any, draft: Any = None, **options: Any) -> Callable[[int, int], Any]:
        generator = SpecGenerator(model, draft, prefix_cache=False)

        def run(case: int, tokens: int) -> Any:
            synthetic.oracle = oracles[case]
            return generator.generate(prompts[case], eos_token_id=[], max_new_tokens=tokens, **common, **options)

        return run

    streamed = found["streamed"]
    cost = {"schedule": "cost", "num_assistant_tokens": 32}
    return {
        PLAIN: reference(found["own"]),
        MAPPED: reference(found["mapped"]),
        ASSISTED: reference(found["own"], assistant_model=helper),
        ASSISTED_MAPPED: reference(found["mapped"], assistant_model=helper),
        "specdec plain, accelerate's hooks": ours(found["own"]),
        "specdec plain, streamed": ours(streamed),
        "specdec chain, cost [synthetic]": ours(streamed, synthetic, **cost, num_assistant_branches=1),
        "specdec tree, cost [synthetic]": ours(streamed, synthetic, **cost),
        **{
            f"specdec tree of {16 * branches} [synthetic]": ours(
                streamed, synthetic, schedule="constant", num_assistant_tokens=16, num_assistant_branches=branches
            )
            for branches in args.branches
        },
    }


def compare(args: Namespace, folder: Path, cold: Cold) -> None:
    """Runs everything in turn and prints a table for warm and one for cold files."""
    tokenizer = AutoTokenizer.from_pretrained(pair().target)
    prompts = [tokenizer(p, return_tensors="pt").input_ids for p in read_prompts(None, args.count)]
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    truth = SpecGenerator(whole, prefix_cache=False)
    texts = [
        truth.generate(ids, max_new_tokens=args.tokens, eos_token_id=[], pad_token_id=0).sequences[0].tolist()
        for ids in prompts
    ]
    del whole, truth
    found = models(folder, args, cold)
    for cold.on in (False, True):
        runs, watch = systems(found, prompts, texts, args), Watch()  # new ones: the cost rule has not seen the others
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        stats: dict[str, list[Any]] = {name: [] for name in runs}
        same = dict.fromkeys(runs, 0)
        for turn in range(args.repeats * len(prompts)):
            case, names = turn % len(prompts), list(runs)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                watch.look()
                tokens = args.plain if "plain" in name else args.tokens
                cold.seconds, began = 0.0, time.perf_counter()
                out = runs[name](case, tokens)
                seconds[name].append((time.perf_counter() - began - cold.seconds) / tokens)
                ids = (out.sequences if hasattr(out, "sequences") else out)[0].tolist()
                same[name] += ids == texts[case][: len(ids)] and len(ids) == prompts[case].shape[1] + tokens
                stats[name].append(getattr(out, "stats", None))
        print(f"\n{'cold' if cold.on else 'warm'}, {args.tokens} new tokens\n")
        print(table(HEADER, [_row(name, seconds, stats[name], same[name]) for name in runs]))
        print(f"\n{watch.verdict()}", flush=True)


HEADER = (
    *("system", "ms per token", "vs accelerate", "vs accelerate, checkpoint", "vs assisted"),
    *("vs assisted, checkpoint", "weight passes per token", "same text"),
)


def _row(name: str, seconds: dict[str, list[float]], stats: list[Any], same: int) -> list[str]:
    def ratio(other: str) -> str:
        return f"{statistics.median(a / b for a, b in zip(seconds[other], seconds[name], strict=True)):.2f}x"

    passes = [s.target_passes_per_token for s in stats if s is not None]
    shown = f"{statistics.mean(passes):.3f}" if passes else ""
    milliseconds = f"{1e3 * statistics.median(seconds[name]):.0f}"
    ratios = [ratio(other) for other in (PLAIN, MAPPED, ASSISTED, ASSISTED_MAPPED)]
    return [name, milliseconds, *ratios, shown, f"{same}/{len(seconds[name])}"]


@torch.no_grad()
def passes(args: Namespace, folder: Path, cold: Cold) -> None:
    """Seconds of a pass without a cache, by number of tokens, of every way of offloading, and in memory."""
    found = models(folder, args, cold)
    found["in memory"] = out_of_file(AutoModelForCausalLM.from_pretrained(folder, dtype="auto"))
    widths, watch = args.widths, Watch()
    seconds: dict[tuple[str, bool, int], list[float]] = {}
    for _ in range(args.repeats):
        for width in widths:
            ids = torch.randint(0, 4096, (1, width))
            for cold.on in (False, True):
                for name, model in found.items():
                    watch.look()
                    cold.seconds, began = 0.0, time.perf_counter()
                    model(input_ids=ids, use_cache=False)
                    taken = time.perf_counter() - began - cold.seconds
                    seconds.setdefault((name, cold.on, width), []).append(taken)
    rows = [
        [
            f"{name}, {'cold' if on else 'warm'}",
            *(f"{min(seconds[name, on, w]):.3f} / {statistics.median(seconds[name, on, w]):.3f}" for w in widths),
        ]
        for name in found
        for on in (False, True)
        if (name, on) != ("in memory", True)
    ]
    print("\nseconds of a pass: least / median\n")
    print(table(["", *(f"{w} tokens" for w in widths)], rows))
    print(f"\n{watch.verdict()}")


def main() -> None:
    """Makes the target in a temporary folder and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24, help="of 12.9 M weights each")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--count", type=int, default=2, help="prompts")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens per prompt")
    parser.add_argument("--plain", type=int, help="fewer of them for systems without a draft, whose passes are alike")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--branches", type=int, nargs="*", default=[4, 16], help="of trees that are 16 deep")
    parser.add_argument("--memory", type=int, help="MiB that the streamed target may take (default: no layer stays)")
    parser.add_argument("--prefetch", action="store_true", help="accelerate's hooks behind a thread too, with --passes")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 16, 64, 256], help="tokens of single passes")
    parser.add_argument("--passes", action="store_true", help="single passes instead of texts")
    args = parser.parse_args()
    args.plain = args.plain or args.tokens
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.dtype}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_target(folder, args.layers, getattr(torch, args.dtype))
        (passes if args.passes else compare)(args, folder, Cold())


if __name__ == "__main__":
    main()
