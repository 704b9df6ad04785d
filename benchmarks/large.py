"""A target of 1.7 billion parameters with a SYNTHETIC draft of 135 million, in turn with transformers.

    python benchmarks/large.py --json benchmarks/results/large.json    # 20 minutes and 20 GiB of memory

The shapes are those of SmolLM2-1.7B and SmolLM2-135M, the weights random: passes cost what those of the real models
cost. The synthetic draft knows the text, is right at each position with a given chance, and pays for every guess with a
pass of the small model (in 8 bits beside a target in 8 bits), also where it guesses for transformers. What a
real pair gains depends on how often its draft is right, which `specdec bench` measures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import Watch, interleaved, table
from synthetic import SyntheticAssistant, random_target
from synthetic_draft import DraftPass, Oracle, SyntheticDraft, passes_of
from transformers import AutoModelForCausalLM

from specdec import SpecGenerator
from specdec.bench.machine import memory_bandwidth, provenance

VOCAB = 49152
TARGET = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32}
DRAFT = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
RIGHT = (0.6, 0.8)  # how often the draft's guess is the target's token
PROMPT = [list(range(start, start + 64)) for start in (3, 1003)]
WEIGHTS = {"bfloat16": None, "int8-weight": "int8-weight"}  # specdec's; both compute in bfloat16

Run = Callable[[int], Any]
"""From the number of a prompt to its text."""


def packed(folder: Path, quantization: str | None) -> SpecGenerator:
    """The model of a folder with packed weights."""
    how = {"dtype": "bfloat16", "quantization": quantization, "backend": "packed"}
    return SpecGenerator.from_pretrained(folder, prefix_cache=False, **how)


def oracles(text: list[int], prompt: int) -> dict[float, Oracle]:
    """What a draft knows of a text, for every chance to be right."""
    return {right: Oracle([text], [right], VOCAB, seed=prompt) for right in RIGHT}


def transformers(folder: Path, known: list[dict[float, Oracle]], work: DraftPass, tokens: int) -> dict[str, Run]:
    """Greedy decoding, and its assisted generation with each draft."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    helper = SyntheticAssistant(VOCAB, work).eval()

    def run(case: int, right: float | None) -> Any:
        ids = torch.tensor([PROMPT[case]])
        more: dict[str, Any] = {}
        if right is not None:
            helper.oracle, helper.begins, more = known[case][right], ids.shape[1], {"assistant_model": helper}
        how = {"do_sample": False, "max_new_tokens": tokens, "eos_token_id": None, "pad_token_id": 0}
        return model.generate(ids, attention_mask=torch.ones_like(ids), **how, **more)[0].tolist()

    return _runs("transformers, bfloat16", run)


def specdec(
    plain: SpecGenerator, name: str, known: list[dict[float, Oracle]], work: DraftPass, tokens: int
) -> dict[str, Run]:
    """Plain decoding of these weights, and with each draft, with the default schedule."""
    drafts = {right: SyntheticDraft([right], work) for right in RIGHT}
    assisted = {right: SpecGenerator(plain.target, draft, prefix_cache=False) for right, draft in drafts.items()}

    def run(case: int, right: float | None) -> Any:
        generator = plain
        if right is not None:
            generator, drafts[right].oracle = assisted[right], known[case][right]
        how = {"do_sample": False, "max_new_tokens": tokens, "eos_token_id": [], "pad_token_id": 0}
        return generator.generate([PROMPT[case]], **how).sequences[0].tolist()

    return _runs(f"specdec, {name}", run)


def _runs(name: str, run: Callable[[int, float | None], Any]) -> dict[str, Run]:
    plain: dict[str, Run] = {f"{name}: no draft": lambda case: run(case, None)}
    return plain | {f"{name}: {right:.0%} right": (lambda case, right=right: run(case, right)) for right in RIGHT}


def main() -> None:
    """Makes the models in a temporary folder, measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    watch, systems = Watch(), dict[str, Run]()
    how = {"max_new_tokens": args.tokens, "do_sample": False, "eos_token_id": [], "pad_token_id": 0}
    with tempfile.TemporaryDirectory() as name:
        folder, small = Path(name, "target"), Path(name, "draft")
        random_target(torch.bfloat16, vocab_size=VOCAB, **TARGET).save_pretrained(folder)
        random_target(torch.bfloat16, vocab_size=VOCAB, **DRAFT, num_key_value_heads=3).save_pretrained(small)
        for name, kind in WEIGHTS.items():
            plain, draft = packed(folder, kind), packed(small, kind).target
            texts = [plain.generate([ids], **how).sequences[0].tolist()[len(ids) :] for ids in PROMPT]
            known = [oracles(text, case) for case, text in enumerate(texts)]
            if not systems:
                systems |= transformers(folder, known, passes_of(draft), args.tokens)
            systems |= specdec(plain, name, known, passes_of(draft), args.tokens)
        seconds = interleaved(systems, range(len(PROMPT)), args.repeats, watch, warm_up=True)
        same = {name: [run(case) for case in range(len(PROMPT))] for name, run in systems.items()}
    milliseconds = {
        name: round(1e3 * statistics.median(map(statistics.median, found)) / args.tokens, 1)
        for name, found in seconds.items()
    }
    first = next(iter(systems))
    rows = [
        [name, f"{one}", f"{milliseconds[first] / one:.2f}x", f"{same[name] == same[first]}"]
        for name, one in milliseconds.items()
    ]
    print(table(["system", "ms per token", "over transformers", "the same text"], rows))
    print(f"\n{memory_bandwidth() / 1e9:.0f} GB/s; {watch.verdict()}")
    if args.json:
        machine = {"processor": provenance()["processor"], "threads": torch.get_num_threads()}
        args.json.write_text(json.dumps({**machine, "milliseconds": milliseconds}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
