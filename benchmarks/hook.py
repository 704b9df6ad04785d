"""What `custom_generate=` brings to `model.generate` and to a pipeline that exists: interleaved, texts compared.

    python benchmarks/hook.py                        # the package's pairs: code, and speech
    python benchmarks/hook.py --tokens 64 --repeats 5
    python benchmarks/hook.py --whisper openai/whisper-base --audio talk*.flac

Every ratio is the median over cases of the ratio of median seconds. transformers' assisted decoding runs with the
schedule of its original report (5 tokens, +2/−1).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from measure import Watch, assistant, interleaved, ratio, read_prompts, table
from transformers import AutoModelForCausalLM, AutoModelForSpeechSeq2Seq, AutoProcessor, AutoTokenizer, pipeline

from specdec import custom_generate
from specdec.options import bundled_models
from specdec.pipelines.speech.audio import read_audio

RATE = 16_000  # samples a second that the models hear


def models(name: str, kind: Any) -> tuple[Any, Any, Any]:
    """Target, draft, and the draft again with the settings of the original report."""
    pair = bundled_models.pair(name)
    target, draft = (kind.from_pretrained(folder, dtype=torch.float32).eval() for folder in (pair.target, pair.draft))
    return target, draft, assistant(draft)


def text_systems(tokens: int) -> dict[str, Callable[[str], Any]]:
    """`pipeline("text-generation")`, greedy, one prompt at a time."""
    target, draft, helper = models("python-code", AutoModelForCausalLM)
    tokenizer = AutoTokenizer.from_pretrained(bundled_models.pair("python-code").target)
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
        "custom_generate, model, packed": run(
            custom_generate=custom_generate(draft, schedule="cost", backend="packed")
        ),
    }


def hearing(target: Any, folder: str | Path) -> Callable[..., Callable[[dict[str, Any]], Any]]:
    """`pipeline("automatic-speech-recognition")` of a model, greedy; it makes a system of arguments."""
    processor = AutoProcessor.from_pretrained(folder)
    parts = {"tokenizer": processor.tokenizer, "feature_extractor": processor.feature_extractor}
    pipe = pipeline("automatic-speech-recognition", target, **parts, device="cpu")
    return lambda **more: lambda sound: pipe(dict(sound), generate_kwargs={"num_beams": 1, **more})


def speech_systems() -> dict[str, Callable[[dict[str, Any]], Any]]:
    """The package's pair."""
    target, draft, helper = models("speech", AutoModelForSpeechSeq2Seq)
    run = hearing(target, bundled_models.pair("speech").target)
    return {
        "transformers": run(),
        "transformers, assisted": run(assistant_model=helper),
        "custom_generate, plain": run(custom_generate=custom_generate()),
        "custom_generate, model": run(custom_generate=custom_generate(draft, schedule="cost")),
    }


def whisper_systems(name: str) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """A Whisper model without a smaller one beside it."""
    run = hearing(AutoModelForSpeechSeq2Seq.from_pretrained(name, dtype=torch.float32).eval(), name)
    return {
        "transformers": run(),
        "custom_generate, plain": run(custom_generate=custom_generate()),
        "custom_generate, packed": run(custom_generate=custom_generate(backend="packed")),
        "custom_generate, packed, suffix": run(
            custom_generate=custom_generate("suffix", schedule="cost", backend="packed")
        ),
    }


def report(title: str, systems: Mapping[str, Callable[[Any], Any]], cases: list[Any], repeats: int) -> None:
    """One table."""
    watch = Watch()
    texts = {name: [run(case) for case in cases] for name, run in systems.items()}  # warm-up
    seconds = interleaved(systems, cases, repeats, watch)
    first, *others = systems
    beside = [first, *(name for name in others if name == "transformers, assisted")]
    rows = []
    for name in systems:
        same = sum(a == b for a, b in zip(texts[name], texts[first], strict=True))
        ratios = [f"{ratio(seconds[other], seconds[name]):.2f}x" for other in beside]
        rows.append([name, *ratios, f"{same}/{len(cases)}"])
    print(f"\n{title}, {len(cases)} cases\n")
    print(table(["system", *(f"vs {name}" for name in beside), "same text"], rows))
    print(f"\n{watch.verdict()}", flush=True)


def main() -> None:
    """The tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=6, help="prompts")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--whisper", help="speech alone, with this model instead of the package's")
    parser.add_argument("--audio", nargs="+", help="recordings instead of the package's")
    args = parser.parse_args()
    if args.whisper is None:
        report("text-generation", text_systems(args.tokens), read_prompts(None, args.count), args.repeats)
    systems = speech_systems() if args.whisper is None else whisper_systems(args.whisper)
    files = args.audio or [path for path, _ in bundled_models.recordings()]
    recordings = [{"raw": read_audio(str(file), RATE).samples, "sampling_rate": RATE} for file in files]
    report("automatic-speech-recognition", systems, recordings, args.repeats)


if __name__ == "__main__":
    main()
