"""What `custom_generate=` brings to `model.generate` and to a pipeline that exists: interleaved, texts compared.

    python benchmarks/hook.py                        # the package's pairs: code, and speech
    python benchmarks/hook.py --tokens 64 --repeats 5

Every ratio is the median over cases of the ratio of median seconds. transformers' assisted decoding runs with the
schedule of its original report (5 tokens, +2/−1).
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping
from typing import Any

import soundfile
import torch
from measure import Watch, interleaved, ratio, read_prompts, table
from transformers import AutoModelForCausalLM, AutoModelForSpeechSeq2Seq, AutoProcessor, AutoTokenizer, pipeline

from specdec import custom_generate, zoo


def models(name: str, kind: Any) -> tuple[Any, Any, Any]:
    """Target, draft, and the draft again with the settings of the original report."""
    pair = zoo.pair(name)
    target, draft = (kind.from_pretrained(folder, dtype=torch.float32).eval() for folder in (pair.target, pair.draft))
    helper = copy.deepcopy(draft)
    helper.generation_config.num_assistant_tokens = 5
    helper.generation_config.num_assistant_tokens_schedule = "heuristic"
    helper.generation_config.assistant_confidence_threshold = 0.0
    return target, draft, helper


def text_systems(tokens: int) -> dict[str, Callable[[str], Any]]:
    """`pipeline("text-generation")`, greedy, one prompt at a time."""
    target, draft, helper = models("python-code", AutoModelForCausalLM)
    tokenizer = AutoTokenizer.from_pretrained(zoo.pair("python-code").target)
    pipe = pipeline("text-generation", target, tokenizer=tokenizer, device="cpu")
    common = {"max_new_tokens": tokens, "do_sample": False}

    def run(**more: Any) -> Callable[[str], Any]:
        return lambda prompt: pipe(prompt, **common, **more)

    return {
        "transformers": run(),
        "transformers, assisted": run(assistant_model=helper),
        "custom_generate, plain": run(custom_generate=custom_generate()),
        "custom_generate, suffix": run(custom_generate=custom_generate("suffix", schedule="cost")),
        "custom_generate, model": run(custom_generate=custom_generate(draft, schedule="cost")),
        "custom_generate, model, packed": run(custom_generate=custom_generate(draft, schedule="cost", gear="packed")),
    }


def speech_systems() -> dict[str, Callable[[dict[str, Any]], Any]]:
    """`pipeline("automatic-speech-recognition")`, greedy, window after window."""
    target, draft, helper = models("speech", AutoModelForSpeechSeq2Seq)
    processor = AutoProcessor.from_pretrained(zoo.pair("speech").target)
    parts = {"tokenizer": processor.tokenizer, "feature_extractor": processor.feature_extractor}
    pipe = pipeline("automatic-speech-recognition", target, **parts, device="cpu")

    def run(**more: Any) -> Callable[[dict[str, Any]], Any]:
        return lambda sound: pipe(dict(sound), generate_kwargs={"num_beams": 1, **more})

    return {
        "transformers": run(),
        "transformers, assisted": run(assistant_model=helper),
        "custom_generate, plain": run(custom_generate=custom_generate()),
        "custom_generate, model": run(custom_generate=custom_generate(draft, schedule="cost")),
    }


def report(title: str, systems: Mapping[str, Callable[[Any], Any]], cases: list[Any], repeats: int) -> None:
    """One table."""
    watch = Watch()
    texts = {name: [run(case) for case in cases] for name, run in systems.items()}  # warm-up
    seconds = interleaved(systems, cases, repeats, watch)
    first, assisted, *_ = systems
    rows = []
    for name in systems:
        same = sum(a == b for a, b in zip(texts[name], texts[first], strict=True))
        ratios = [f"{ratio(seconds[other], seconds[name]):.2f}x" for other in (first, assisted)]
        rows.append([name, *ratios, f"{same}/{len(cases)}"])
    print(f"\n{title}, {len(cases)} cases\n")
    print(table(["system", "vs generate", "vs assisted", "same text"], rows))
    print(f"\n{watch.verdict()}", flush=True)


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=6, help="prompts")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per prompt")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    report("text-generation", text_systems(args.tokens), read_prompts(None, args.count), args.repeats)
    sounds = [soundfile.read(path, dtype="float32") for path, _ in zoo.recordings()]
    recordings = [{"raw": samples, "sampling_rate": rate} for samples, rate in sounds]
    report("automatic-speech-recognition", speech_systems(), recordings, args.repeats)


if __name__ == "__main__":
    main()
