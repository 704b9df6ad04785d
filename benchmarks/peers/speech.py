"""Whisper in several engines, in turn on the same recording, from samples to text: one table.

    python benchmarks/peers/speech.py TALK*.flac --said TALK.txt --target WHISPER \\
        --ct2 CT2 --python faster-whisper=FW/bin/python \\
        --openvino OV --openvino-int8 OV_INT8 --python openvino=OV_VENV/bin/python

The recordings are heard as one, in English, with timestamps and without a second try at another temperature; greedy, or
with `--beams`. Each engine is a process of its own, which is stopped while another works. Ratios are those of medians.
"other words" is the word error rate beside the text of the first system, "word error" beside what is said; "MB" the
most memory that was resident. An engine whose model is not named is left out. "as it comes" has no option but the
model's name.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from worker import Answers, Worker, serve

RATE = 16_000
Hear = Callable[[Any], str]
"""From samples `[length]`, 16,000 a second, to their text."""


def specdec(task: dict[str, Any], draft: str = "auto", **how: str) -> Hear:
    """This package, loaded with the options `how`."""
    from specdec import Transcriber

    transcriber = Transcriber.from_pretrained(task["target"], draft, **how)
    call = {"language": "en", "task": "transcribe", "do_sample": False, "num_beams": task["beams"]}
    return lambda sound: transcriber(sound, return_timestamps=True, generate_kwargs=dict(call))["text"]


def transformers(task: dict[str, Any]) -> Hear:
    """transformers' pipeline, window by window."""
    import torch
    from transformers import pipeline

    hear = pipeline("automatic-speech-recognition", model=task["target"], dtype=torch.float32)
    call = {"language": "en", "task": "transcribe", "do_sample": False, "num_beams": task["beams"]}
    return lambda sound: hear(sound.copy(), return_timestamps=True, generate_kwargs=dict(call))["text"]


def faster_whisper(task: dict[str, Any], kind: str) -> Hear:
    """faster-whisper, with the threads that the other engines have."""
    from faster_whisper import WhisperModel

    threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
    model = WhisperModel(task["ct2"], device="cpu", compute_type=kind, cpu_threads=threads)
    call = {"language": "en", "beam_size": task["beams"], "temperature": 0.0, "condition_on_previous_text": False}
    return lambda sound: "".join(segment.text for segment in model.transcribe(sound, **call)[0])


def openvino(task: dict[str, Any], folder: str, **how: Any) -> Hear:
    """OpenVINO GenAI's Whisper pipeline over the model in this folder."""
    import openvino_genai

    if threads := os.environ.get("OMP_NUM_THREADS"):
        how["INFERENCE_NUM_THREADS"] = int(threads)
    hear = openvino_genai.WhisperPipeline(task[folder], "CPU", **how)
    call = {"language": "<|en|>", "task": "transcribe", "return_timestamps": True}
    if task["beams"] > 1:
        call["num_beams"] = task["beams"]
    return lambda sound: hear.generate(sound.tolist(), **call).texts[0]


# By name: the engine, its distribution, the model that it needs, and how it starts.
SYSTEMS: dict[str, tuple[str, str, str, Callable[[dict[str, Any]], Hear]]] = {
    "specdec, as it comes": ("specdec", "torch", "target", specdec),
    "specdec, no draft": ("specdec", "torch", "target", partial(specdec, draft="none")),
    "specdec, float32": ("specdec", "torch", "target", partial(specdec, draft="none", dtype="float32")),
    "specdec, float32, suffix": ("specdec", "torch", "target", partial(specdec, draft="suffix", dtype="float32")),
    "transformers": ("transformers", "transformers", "target", transformers),
    "faster-whisper": ("faster-whisper", "faster-whisper", "ct2", partial(faster_whisper, kind="float32")),
    "faster-whisper, int8": ("faster-whisper", "faster-whisper", "ct2", partial(faster_whisper, kind="int8")),
    "OpenVINO GenAI": (
        *("openvino", "openvino-genai", "openvino"),
        partial(openvino, folder="openvino", INFERENCE_PRECISION_HINT="f32"),
    ),
    "OpenVINO GenAI, int8": ("openvino", "openvino-genai", "openvino_int8", partial(openvino, folder="openvino_int8")),
}


class System(Worker):
    """One system; `texts` and `seconds` have one entry per call."""

    def __init__(self, python: str, **task: Any) -> None:
        super().__init__(python, __file__, "--work", **task)
        self.texts: list[str] = []
        self.seconds: list[float] = []
        self.megabytes = 0.0

    def __call__(self) -> None:
        """Hears the recording once."""
        answer = self.ask()
        self.texts.append(answer["text"])
        self.seconds.append(answer["seconds"])
        self.megabytes = answer["megabytes"]


def work(task: dict[str, Any]) -> tuple[str, Answers]:
    """The system that the task names, which hears the recording for every line."""
    import numpy as np

    _, distribution, _, start = SYSTEMS[task["system"]]
    hear, sound = start(task), np.load(task["sound"])

    def answer(_: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        text = hear(sound)
        seconds = time.perf_counter() - began
        status = Path("/proc/self/status").read_text()  # `ru_maxrss` counts the process that started this one too
        return {"text": text, "seconds": seconds, "megabytes": int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024}

    return f"{distribution} {version(distribution)}", answer


def words(text: str) -> str:
    """Small letters and digits alone."""
    return " ".join(re.findall(r"\w+", text.lower()))


def arguments() -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("audio", nargs="+", help="recordings, heard as one")
    parser.add_argument("--target", required=True, help="folder or hub id of a Whisper")
    parser.add_argument("--ct2", help="the same from ct2-transformers-converter")
    parser.add_argument("--openvino", help="the same from optimum-cli")
    parser.add_argument("--openvino-int8", help="the same from optimum-cli with --weight-format int8")
    parser.add_argument("--said", type=Path, help="file of the words that are said")
    parser.add_argument("--beams", type=int, default=1)
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH", help="interpreter of an engine")
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    """Starts all systems, gives them turns, prints the table."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import numpy as np
    from jiwer import wer
    from measure import Watch, table

    from specdec.pipelines.speech.audio import read_audio

    args, watch = arguments(), Watch()
    pythons = dict(entry.split("=", 1) for entry in args.python)
    sound = np.concatenate([read_audio(file, RATE).samples for file in args.audio]).astype(np.float32)
    workers: dict[str, System] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/sound.npy", sound)
        models = {name: getattr(args, name) for name in ("target", "ct2", "openvino", "openvino_int8")}
        try:
            for name in args.only:
                engine, _, needs, _ = SYSTEMS[name]
                if models[needs] is None:
                    continue
                task = {"system": name, "sound": f"{folder}/sound.npy", "beams": args.beams, **models}
                try:
                    worker = System(pythons.get(engine, sys.executable), **task)
                    workers[name] = worker
                    worker()  # does not count
                    worker.texts.clear()
                    worker.seconds.clear()
                except (RuntimeError, OSError) as error:
                    failed[name] = str(error)
                    if worker := workers.pop(name, None):
                        worker.end()
            for turn in range(args.repeats if workers else 0):
                names = list(workers)
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    watch.look()
                    workers[name]()
        finally:
            for worker in workers.values():
                worker.end()
    if not workers:
        sys.exit(f"no system ran: {failed}")
    first = next(iter(workers.values())).texts[0]
    said = args.said and args.said.read_text()
    middle = {name: statistics.median(worker.seconds) for name, worker in workers.items()}
    rows = [
        [
            name,
            f"{middle[name]:.2f}",
            f"{min(worker.seconds):.2f} to {max(worker.seconds):.2f}",
            f"{middle['transformers'] / middle[name]:.2f}x" if "transformers" in middle else "",
            f"{wer(words(first), words(worker.texts[0])):.1%}",
            f"{wer(words(said), words(worker.texts[0])):.1%}" if said else "",
            f"{worker.megabytes:.0f}",
        ]
        for name, worker in workers.items()
    ]
    print(f"{len(sound) / RATE:.0f} s of sound, {args.repeats} repeats, ", end="")
    print(", ".join(dict.fromkeys(worker.version for worker in workers.values())), end="\n\n")
    print(table(["system", "seconds", "range", "over transformers", "other words", "word error", "MB"], rows))
    for name, error in failed.items():
        print(f"\n{name} did not run: {error}")
    print(f"\n{watch.verdict()}", flush=True)


if __name__ == "__main__":
    serve(work) if sys.argv[1:] == ["--work"] else main()
