"""Pipelines beside transformers on the same models: plain, assisted, and their assisted modes, in one interleaved run.

    python benchmarks/pipelines.py speech                     # the package's pair; needs espeak-ng, or --audio
    python benchmarks/pipelines.py speech --target WHISPER --draft DISTILLED --audio talk.flac
    python benchmarks/pipelines.py recordings --target WHISPER --audio talk*.flac --dtype float32 --beams 5
    python benchmarks/pipelines.py summaries                  # the package's pair on functions it never saw
    python benchmarks/pipelines.py summaries --target my-t5 --draft my-small-t5 --texts articles.jsonl

Seconds are those of decoding, the encoder included, tokenizer and feature extractor not; rows named "pipeline", and all
of "recordings", go from samples to text, with `Transcriber` and transformers' pipeline. "Without the encoder" is what
is left of them. Every ratio is the median over cases of the ratio of median seconds. A kind of pipeline is a function
from the arguments to its `Bench`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from measure import Encoders, Watch, assistant, interleaved, ratio, read_prompts, table
from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoProcessor, AutoTokenizer, pipeline

from specdec import SpecGenerator, Transcriber
from specdec.options.bundled_models import locate
from specdec.options.load import BACKENDS
from specdec.pipelines.speech.audio import read_audio

sys.path.append(str(Path(__file__).parents[1]))
from recipes.functions import held_out_examples

PLAIN, ASSISTED = "specdec plain", "transformers assisted"
GREEDY = {"do_sample": False, "num_beams": 1}
System = Callable[[Any], Any]


@dataclass(frozen=True)
class Bench:
    """What is compared: cases, systems from a case to its result, and the text of a result."""

    cases: list[Any]
    systems: dict[str, System]
    text_of: Callable[[Any], str]
    encoders: Encoders


def load(kind: Any, args: argparse.Namespace) -> list[Any]:
    """The target and, where one is named, the draft."""
    dtype = getattr(torch, args.dtype)
    return [kind.from_pretrained(name, dtype=dtype).eval() for name in (args.target, args.draft) if name is not None]


def generators(target: Any, args: argparse.Namespace) -> dict[str, SpecGenerator]:
    """Plain decoding, and each way to draft."""

    def generator(draft: Any = None, **options: Any) -> SpecGenerator:
        return SpecGenerator(target, draft, backend=args.backend, prefix_cache=False, **options)

    found = {PLAIN: generator(), "specdec suffix, cost": generator("suffix", schedule="cost")}
    if args.draft is not None:
        named = SpecGenerator.from_pretrained(args.target, args.draft, dtype=args.dtype, backend=args.backend).draft
        assert named is not None
        draft = named.models[0]  # as it is loaded by its name: with the vocabulary that it comes with
        found["specdec model, heuristic"] = generator(draft)
        found["specdec model, cost"] = generator(draft, schedule="cost")
        found["specdec hybrid, cost"] = generator(("suffix", draft), schedule="cost")
    return found


def language(target: Any) -> dict[str, str]:
    """The options of a multilingual Whisper, whose language need not be detected."""
    return {"language": "en", "task": "transcribe"} if target.generation_config.is_multilingual else {}


def long_enough(cases: Iterator[Any], plain: System, args: argparse.Namespace) -> list[Any]:
    """The first `--count` cases for which the target writes at least `--least` tokens."""
    return list(islice((c for c in cases if plain(c).stats.num_new_tokens >= args.least), args.count))


def summaries(args: argparse.Namespace) -> Bench:
    """Texts, each read at once and as far as the target reads, by an encoder-decoder and its drafts."""
    target, *drafts = load(AutoModelForSeq2SeqLM, args)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    tasks = getattr(target.config, "task_specific_params", None) or {}
    prefix = tasks.get("summarization", {}).get("prefix", "")
    texts = [e.source for e in held_out_examples()] if args.texts is None else read_prompts(args.texts, 4 * args.count)
    options = {**GREEDY, "max_new_tokens": args.tokens}

    def theirs(**more: Any) -> System:
        return lambda ids: target.generate(ids, attention_mask=torch.ones_like(ids), **options, **more)

    def ours(generator: SpecGenerator) -> System:
        return lambda ids: generator.generate(ids, **options)

    systems = {"transformers greedy": theirs()}
    for draft in drafts:
        systems[ASSISTED] = theirs(assistant_model=assistant(draft))
    systems["transformers prompt lookup"] = theirs(prompt_lookup_num_tokens=10)
    encoders, own = Encoders(target), generators(target, args)
    systems |= {name: ours(generator) for name, generator in own.items()}
    read = (
        tokenizer(prefix + text, truncation=True, return_tensors="pt").input_ids[:, : args.length] for text in texts
    )
    return Bench(
        long_enough(read, systems[PLAIN], args),
        systems,
        lambda result: tokenizer.decode(getattr(result, "sequences", result)[0], skip_special_tokens=True),
        encoders,
    )


def speech(args: argparse.Namespace) -> Bench:
    """Windows of speech, each read at once, by a Whisper and its drafts."""
    target, *drafts = load(AutoModelForSpeechSeq2Seq, args)
    processor = AutoProcessor.from_pretrained(args.target)
    extractor, tokenizer = processor.feature_extractor, processor.tokenizer
    rate = extractor.sampling_rate
    asked = language(target)
    if asked:
        tokenizer.set_prefix_tokens(**asked)
    prompt = torch.tensor([tokenizer.prefix_tokens])
    room = target.config.max_target_positions - prompt.shape[1]

    def features(case: np.ndarray) -> torch.Tensor:
        return extractor(case, sampling_rate=rate, return_tensors="pt").input_features.to(target.dtype)

    def theirs(**more: Any) -> System:
        return lambda case: target.generate(case.features, **GREEDY, **asked, **more)

    def ours(generator: SpecGenerator) -> System:
        return lambda case: generator.generate(
            input_features=case.features, decoder_input_ids=prompt, max_new_tokens=room, **GREEDY
        )

    encoders, own = Encoders(target), generators(target, args)
    systems = {"transformers greedy": theirs()}
    for draft in drafts:
        systems[ASSISTED] = theirs(assistant_model=assistant(draft))
    systems |= {name: ours(generator) for name, generator in own.items()}
    parts = {"tokenizer": tokenizer, "feature_extractor": extractor}
    reference = pipeline("automatic-speech-recognition", model=target, **parts)
    how = {**GREEDY, **asked}
    systems["pipeline: transformers greedy"] = lambda case: reference(case.samples.copy(), generate_kwargs=dict(how))
    for name in (PLAIN, "specdec model, cost"):
        if name in own:
            transcriber = Transcriber(own[name], **parts)
            systems[f"pipeline: {name}"] = lambda case, transcriber=transcriber: transcriber(
                case.samples, generate_kwargs=dict(how)
            )
    heard = (Sound(samples, features(samples)) for samples in windows(args, rate, extractor.chunk_length))

    def text_of(result: Any) -> str:
        found = getattr(result, "sequences", result)
        text = found["text"] if isinstance(found, dict) else tokenizer.decode(found[0], skip_special_tokens=True)
        return str(text).strip()

    return Bench(long_enough(heard, systems[PLAIN], args), systems, text_of, encoders)


def recordings(args: argparse.Namespace) -> Bench:
    """The recordings as one long one, with timestamps, from samples to text."""
    target = load(AutoModelForSpeechSeq2Seq, args)[0]
    processor = AutoProcessor.from_pretrained(args.target)
    parts = {"tokenizer": processor.tokenizer, "feature_extractor": processor.feature_extractor}
    rate = processor.feature_extractor.sampling_rate
    case = np.concatenate([read_audio(str(file), rate).samples for file in args.audio])
    how = {"do_sample": False, "num_beams": args.beams, **language(target)}
    reference = pipeline("automatic-speech-recognition", model=target, **parts)
    systems: dict[str, System] = {
        "transformers": lambda case: reference(case.copy(), return_timestamps=True, generate_kwargs=dict(how))
    }
    encoders, own = Encoders(target), generators(target, args)
    for name, generator in own.items():
        if args.beams == 1 or name == PLAIN:
            transcriber = Transcriber(generator, **parts)
            systems[name] = lambda case, transcriber=transcriber: transcriber(
                case, return_timestamps=True, generate_kwargs=dict(how)
            )
    print(f"{len(case) / rate:.0f} s of sound, {args.beams} beams, backend {args.backend}")
    return Bench([case], systems, lambda result: str(result["text"]).strip(), encoders)


@dataclass(frozen=True)
class Sound:
    """A window: its samples, and what the models hear."""

    samples: np.ndarray
    features: torch.Tensor


def windows(args: argparse.Namespace, rate: int, seconds: int) -> Iterator[np.ndarray]:
    """The recordings cut into windows, or held-out sentences of the speech recipe, as espeak-ng reads them."""
    if args.audio is None:
        from recipes import speech_scores

        yield from speech_scores.windows_of(
            [speech_scores.speak(line) for line in speech_scores.lines("sentences", 8 * args.count)], seconds
        )
        return
    for file in args.audio:
        samples = read_audio(str(file), rate).samples
        yield from (samples[at : at + seconds * rate] for at in range(0, len(samples), seconds * rate))


def report(bench: Bench, repeats: int) -> None:
    """Runs all systems in turn and prints one table."""
    watch = Watch()
    results: dict[str, list[Any]] = {name: [] for name in bench.systems}
    encoding: dict[str, list[float]] = {name: [] for name in bench.systems}
    for run in bench.systems.values():
        run(bench.cases[0])

    def recorded(name: str) -> Callable[[Any], None]:
        def run(case: Any) -> None:
            before = bench.encoders.seconds
            results[name].append(bench.systems[name](case))
            encoding[name].append(bench.encoders.seconds - before)

        return run

    seconds = interleaved({name: recorded(name) for name in bench.systems}, bench.cases, repeats, watch)
    count = len(bench.cases)
    decoding = {
        name: [[s - e for s, e in zip(own, encoding[name][c::count], strict=True)] for c, own in enumerate(cases)]
        for name, cases in seconds.items()
    }
    assisted = next((n for n in (ASSISTED, "transformers prompt lookup") if n in bench.systems), "transformers")
    rows = []
    for name, found in results.items():
        stats = [out.stats for out in found if hasattr(out, "stats")]
        alike = sum(bench.text_of(a) == bench.text_of(b) for a, b in zip(found, results[PLAIN], strict=True))
        rows.append(
            [
                name,
                f"{1e3 * statistics.median(map(statistics.median, seconds[name])):.0f}",
                f"{ratio(seconds[PLAIN], seconds[name]):.2f}x",
                f"{ratio(seconds[assisted], seconds[name]):.2f}x" if assisted in seconds else "",
                f"{1e3 * statistics.median(map(statistics.median, decoding[name])):.0f}",
                f"{ratio(decoding[PLAIN], decoding[name]):.2f}x",
                f"{statistics.mean(s.mean_acceptance_length for s in stats):.2f}" if stats else "",
                f"{statistics.mean(s.target_passes_per_token for s in stats):.2f}" if stats else "",
                f"{alike}/{len(found)}",
            ]
        )
    new = statistics.median(out.stats.num_new_tokens for out in results[PLAIN])
    print(f"\n{len(bench.cases)} cases, {new:.0f} new tokens in the median\n")
    header = [
        "system",
        "ms per case",
        "vs specdec plain",
        f"vs {assisted}",
        "ms without the encoder",
        "of it, vs plain",
    ]
    print(table([*header, "mean acceptance length", "passes per token", "same text as plain"], rows))
    print(f"\n{watch.verdict()}", flush=True)


# kind: what it makes of the arguments, the pair it is measured on by default, and the least tokens of a case.
KINDS: dict[str, tuple[Callable[[argparse.Namespace], Bench], str, int]] = {
    "speech": (speech, "zoo:speech", 60),
    "recordings": (recordings, "zoo:speech", 0),
    "summaries": (summaries, "zoo:python-summary", 24),
}


def main() -> None:
    """Runs the kind of pipeline that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--target", help="folder or hub id (default: the package's own pair)")
    parser.add_argument("--draft", help="a smaller model; without it, text drafts alone")
    parser.add_argument("--texts", type=Path, help="text file or JSON lines (default: functions held out in training)")
    parser.add_argument("--audio", type=Path, nargs="+", help="recordings (default: held-out sentences by espeak-ng)")
    parser.add_argument("--beams", type=int, default=1, help="of recordings")
    parser.add_argument("--count", type=int, default=8, help="texts, or windows of sound")
    parser.add_argument(
        "--least", type=int, help="tokens that the target writes of a case (default: 60 for windows, 24 for texts)"
    )
    parser.add_argument("--length", type=int, default=512, help="tokens of a text that are read, at most")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per text, at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--backend", choices=BACKENDS, default="packed", help="what specdec's passes run on")
    args = parser.parse_args()
    make, own, least = KINDS[args.kind]
    if args.target is None:
        args.target, args.draft = locate(own, "target"), args.draft or locate(own, "draft")
    if args.least is None:
        args.least = least
    if args.kind == "recordings" and not args.audio:
        parser.error("recordings needs --audio")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, ", end="")
    print(f"{torch.get_num_threads()} threads, {args.kind}, {args.dtype}")
    bench = make(args)
    if not bench.cases:
        parser.error(f"no case makes the target write {args.least} tokens: lower --least")
    report(bench, args.repeats)


if __name__ == "__main__":
    main()
