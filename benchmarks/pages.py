"""Summaries of long pages by a decoder, in parts, beside transformers on the same prompts: one table, in turn.

    python benchmarks/pages.py docs/guides/speech.md --target TARGET [--draft DRAFT]

The parts of a page are summarized, and their summaries again; transformers reads the same prompts, one after another,
and writes at most as many tokens. Seconds are those of the first call, without kept prefixes; models are loaded before.
ROUGE-1 and ROUGE-L (F-measures, by the package rouge-score) hold each summary against the prompt that it sums up.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
from measure import Watch, table
from transformers import AutoModelForCausalLM

from specdec import SpecGenerator
from specdec.pipelines import Summarizer

GREEDY = {"do_sample": False, "repetition_penalty": 1.0}


class Recorder:
    """A summarizer whose prompts and summaries, as ids, are kept: pairs of them in `pairs`."""

    def __init__(self, summarizer: Summarizer) -> None:
        self.summarizer, self.pairs = summarizer, list[tuple[list[int], list[int]]]()
        self._generate = summarizer.generator.generate
        summarizer.generator.generate = self._recorded  # type: ignore[method-assign]

    def _recorded(self, prompts: Any, **options: Any) -> Any:
        out = self._generate(prompts, **options)
        self.pairs += zip(prompts, out.new_tokens(), strict=True)
        return out

    def __call__(self, page: str, most: int) -> list[list[int]]:
        self.pairs.clear()
        self.summarizer.summarize([page], max_new_tokens=most, **GREEDY)
        return [[*ids] for _, ids in self.pairs]


def write(model: Any, pairs: list[tuple[list[int], list[int]]], most: int) -> list[list[int]]:
    """What transformers writes after the prompt of each pair."""
    texts = []
    for prompt, _ in pairs:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, **GREEDY)
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def rouge(texts: list[list[int]], prompts: list[list[int]], tokenizer: Any) -> str:
    """The mean F-measures of ROUGE-1 and ROUGE-L of texts beside their prompts."""
    from rouge_score.rouge_scorer import RougeScorer

    kinds = ["rouge1", "rougeL"]
    scorer, decode = RougeScorer(kinds), partial(tokenizer.decode, skip_special_tokens=True)
    scores = [scorer.score(decode(prompt), decode(text)) for prompt, text in zip(prompts, texts, strict=True)]
    return ", ".join(f"{fmean(score[kind].fmeasure for score in scores):.3f}" for kind in kinds)


def main() -> None:
    """Measures all pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--part", type=int, default=640, help="tokens of a part, its prompt included")
    parser.add_argument("--tokens", type=int, default=60, help="new tokens of a part, at most")
    args = parser.parse_args()
    plain = SpecGenerator.from_pretrained(args.target, "none", dtype=args.dtype, prefix_cache=False)
    drafted = SpecGenerator(plain.target, args.draft, tokenizer=plain.tokenizer, prefix_cache=False)
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=getattr(torch, args.dtype)).eval()
    drafts = {f"specdec, draft {args.draft}": drafted, "specdec, no draft": plain}
    ours = {name: Recorder(Summarizer(generator, chunk_tokens=args.part)) for name, generator in drafts.items()}
    watch, seconds, texts = Watch(), dict[str, list[float]](), dict[str, list[list[int]]]()
    read = list[list[int]]()
    for file in args.pages:
        page = file.read_text("utf-8")
        systems: dict[str, Any] = {name: partial(recorder, page, args.tokens) for name, recorder in ours.items()}
        prompts = ours["specdec, no draft"].pairs  # filled before they are read
        systems["transformers"] = partial(write, model, prompts, args.tokens)
        for name, run in systems.items():
            watch.look()
            began = perf_counter()
            texts.setdefault(name, []).extend(run())
            seconds.setdefault(name, []).append(perf_counter() - began)
        read += [prompt for prompt, _ in prompts]
    rows = []
    for name, times in seconds.items():
        ratio = median(a / b for a, b in zip(seconds["transformers"], times, strict=True))
        same = sum(map(list.__eq__, texts[name], texts["specdec, no draft"]))
        scores = rouge(texts[name], read, plain.tokenizer)
        rows.append([name, f"{median(times):.1f}", f"{ratio:.2f}x", f"{same}/{len(texts[name])}", scores])
    print(table(["system", "seconds", "over transformers", "same texts", "ROUGE-1, ROUGE-L"], rows))
    print(f"\n{watch.verdict()}")


if __name__ == "__main__":
    main()
