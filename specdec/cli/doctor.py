"""`specdec doctor`: examines the machine, the installation and a pair; each bad finding has a remedy."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from statistics import median
from time import perf_counter as clock
from typing import TYPE_CHECKING, Any, Literal

import typer
from packaging.requirements import Requirement
from rich.console import Console
from rich.style import Style
from typer import Option

from specdec.cli import flags
from specdec.cli.request import load_with_spinner, read_request
from specdec.cli.show import PROMPT, write, write_json
from specdec.cli.terminal import FAILED, OK, loading
from specdec.errors import SpecdecError

if TYPE_CHECKING:
    from specdec.bench.duel import Duel
    from specdec.bench.machine import Watch
    from specdec.generator.generator import SpecGenerator
    from specdec.models import LanguageModel

State = Literal["good", "note", "bad"]
_DISTRIBUTION = "specdec-runtime"
_EXTRAS = {
    "audio": "recordings in any format",
    "bench": "reports with plots",
    "gguf": "GGUF files",
    "harness": "lm-evaluation-harness",
    "parquet": "Parquet input of specdec batch",
    "quant": "INT8, NF4 and FP4 of bitsandbytes",
    "serve": "specdec serve",
    "structured": "answers in a form: JSON schemas, expressions, grammars",
}
"""Extras of the package, and what they add."""
_SECONDS = 10.0
_TOKENS = (8, 96)  # least and most new tokens of an estimate's texts
_LEAST = 3  # prompts of an estimate
_TEXTS = 4 * _LEAST  # two plain and two assisted ones per prompt, warm-ups aside
_FASTER = "specdec bench measures with intervals, and compares schedules: --schedule NAME, repeatable"
_SLOWER = "--draft suffix for text that copies, or a smaller draft; specdec bench compares drafts"
_BUSY = "measure again on a quiet machine: other programs use its cores"
_MARKS = {"good": ("✓", Style(color="green")), "note": ("·", PROMPT), "bad": ("✗", Style(color="red", bold=True))}
_WIDTH = 16  # columns of a name


@dataclass(frozen=True)
class Finding:
    """One line of the examination: the part of a section, its state in words, and the remedy where it is not good."""

    section: str
    name: str
    text: str
    state: State = "good"
    remedy: str | None = None


def machine() -> Iterator[Finding]:
    import torch

    from specdec.bench.machine import FEWER_THREADS, memory_bandwidth, provenance, waiting_threads
    from specdec.kernels import page_state
    from specdec.models import free_bytes

    found = provenance()
    yield Finding("machine", "processor", f"{found['processor']}: {found['cores']} cores, {found['threads']} threads")
    yield Finding("machine", "instructions", " ".join(found["flags"]) or "unknown", "note")
    waiting = waiting_threads()
    remedy = None if waiting is None else FEWER_THREADS
    text = waiting or f"torch uses {found['threads']}, which do not wait for cores"
    yield Finding("machine", "threads", text, "good" if waiting is None else "note", remedy)
    free = free_bytes(torch.device("cpu")) / 2**30
    speed = memory_bandwidth() / 1e9
    yield Finding("machine", "memory", f"{found['memory_gib']} GiB, {free:.1f} free; read at {speed:.0f} GB/s")
    yield Finding("machine", "pages of weights", page_state(), "note")
    if (name := found["accelerator"]) is not None:
        free, whole = (size / 2**30 for size in torch.cuda.mem_get_info())
        yield Finding("machine", "accelerator", f"{name}: {whole:.1f} GiB, {free:.1f} free")
    elif shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists():
        remedy = "pip install torch, without a CPU build's index or constraints"
        yield Finding("machine", "accelerator", "installed, but this torch does not see it", "bad", remedy)
    else:
        yield Finding("machine", "accelerator", "none: models run on the processor", "note")


def installation() -> Iterator[Finding]:
    from specdec import kernels
    from specdec.models import compiled_code, packed_weights

    needed = [Requirement(text) for text in _requirements()]
    core = [one for one in needed if one.marker is None]
    wrong = [one for one in core if _lacks(one)]
    found = ", ".join(f"{one.name} {_version(one.name) or 'missing'}" for one in core)
    if wrong:
        remedy = f"pip install {' '.join(repr(str(one)) for one in wrong)}"
        yield Finding("installation", "packages", f"{found}: others were tested", "bad", remedy)
    else:
        yield Finding("installation", "packages", found)
    kernels.try_again()
    missing = kernels.lack()
    if missing is None:
        yield Finding("installation", "kernels", f"of our own, built for this processor in {kernels.folder()}")
        yield Finding("installation", "compiled code", compiled_code(), "note")
        yield Finding("installation", "packed weights", packed_weights(), "note")
    else:
        text = f"none, so passes stay torch's: {missing.reason}"
        yield Finding("installation", "kernels", text, "bad", missing.way_out or None)
    for extra, brings in _EXTRAS.items():
        own = [one for one in needed if one.marker is not None and one.marker.evaluate({"extra": extra})]
        if not own:  # an older installation lacks this extra
            continue
        lacking = [one.name for one in own if _lacks(one)]
        if lacking:
            remedy = f"pip install -e '.[{extra}]'"
            yield Finding("installation", f"[{extra}]", f"{brings}: no {', '.join(lacking)}", "note", remedy)
        else:
            yield Finding("installation", f"[{extra}]", brings)


def _requirements() -> list[str]:
    """The package's requirements; none where it is not installed."""
    try:
        return requires(_DISTRIBUTION) or []
    except PackageNotFoundError:
        return []


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _lacks(needed: Requirement) -> bool:
    """Whether a package is missing, or its version is outside the tested range."""
    found = _version(needed.name)
    return found is None or not needed.specifier.contains(found, prereleases=True)


def check_models(generator: SpecGenerator) -> Iterator[Finding]:
    """Target and draft, their backends, and whether they fit."""
    draft = generator.draft
    parts = [("target", generator.target), *(("draft", one) for one in (draft.models if draft else ()))]
    for role, model in parts:
        kind, dtype = type(model.model).__name__, str(model.dtype).removeprefix("torch.")
        weights = f"{model.weight_bytes / 2**20:.0f} MiB of weights"
        yield Finding("models", role, f"{kind}, {model.num_layers} layers, {dtype}, {weights}")
        yield _backend(role, model)
    if generator.target.capability.cache_kind != "kv":
        yield Finding("models", "cache", f"{generator.target.capability.reason}: guesses cost more here", "note")
    if draft is None:
        remedy = "name one: --draft MODEL, or --draft suffix for text that copies"
        yield Finding("models", "draft", "none", "note", remedy)
    else:
        yield _fit(generator)


def _backend(role: str, model: LanguageModel) -> Finding:
    """The backend that a model was loaded with, and the reason for it."""
    from specdec import kernels
    from specdec.models.backends.compiled import compiling
    from specdec.models.backends.packed_layers import why_not_packed

    remedy: str | None = None
    if model.backend == "compiled":
        reason = "compiled code for it was kept here"
    elif model.backend == "packed":
        reason = "short passes over packed weights are faster on this processor, which was measured"
        later = "after ten seconds of use it is compiled in the background, which specdec compile does now"
        remedy = (compiling(model.ragged.model) if model.ragged is not None else None) or later
    elif unpackable := why_not_packed(model.model):
        reason = f"it {unpackable}"
    else:
        slow = "packed weights were not faster on this processor, or there are few of them"
        reason = str(kernels.lack() or slow)
    state: State = "good" if model.backend in ("compiled", "packed") else "note"
    return Finding("models", f"{role}'s backend", f"{model.backend}: {reason}", state, remedy)


def _fit(generator: SpecGenerator) -> Finding:
    """How the draft's guesses reach the target; a pair that does not fit fails to load."""
    from specdec.proposers import ModelDraft, TextBridge

    draft, target = generator.draft, generator.target
    assert draft is not None
    if not draft.models:
        return Finding("models", "fit", f"{draft!r} reads the text alone and fits any target")
    if isinstance(draft, ModelDraft):
        widths = {model.vocab_size for model in (target, *draft.models)}
        known = len(generator.tokenizer) if generator.tokenizer is not None else min(widths)
        return Finding("models", "fit", f"one vocabulary of {known:,} tokens: guesses are checked as they are")
    if isinstance(draft, TextBridge):
        words = "another tokenizer: guesses travel as text, which costs time"
        return Finding("models", "fit", words, "note", "a draft with the target's tokenizer, if there is one")
    return Finding("models", "fit", "guesses are checked as they are")


def estimate(generator: SpecGenerator, texts: Sequence[str], *, seconds: float = _SECONDS) -> Iterator[Finding]:
    """Decodes `texts` or held-out code for about `seconds`, plain and assisted in turn, greedily."""
    from specdec.bench.duel import prompts
    from specdec.bench.machine import Watch, waiting_threads
    from specdec.generator.generator import SpecGenerator

    if generator.draft is None:
        return
    if generator.tokenizer is None or generator.target.model.main_input_name != "input_ids":
        yield Finding(
            "estimate", "speed", "measured for models that read text alone: see specdec transcribe --stats", "note"
        )
        return
    plain = SpecGenerator(generator.target, tokenizer=generator.tokenizer, prefix_cache=False)
    watch = Watch()
    runs = list(_duels(generator, plain, texts or prompts(), seconds, watch))
    speedup = median(one.speedup for one in runs)
    slow, fast = (median(rates) for rates in zip(*((one.plain_rate, one.assisted_rate) for one in runs), strict=True))
    length = median(one.assisted.stats.mean_acceptance_length for one in runs if one.assisted.stats is not None)
    words = f"{speedup:.2f}x: {slow:.0f} tokens/s plain, {fast:.0f} with the draft, {length:.2f} tokens per round"
    code = "prompt(s) of held-out code (-p 'YOUR PROMPT' measures your own)"
    source = f"{len(runs)} {'of your prompts' if texts else code}, greedy"
    pays = speedup > 1.02 and length > 1.05  # without accepted tokens a gain is chance
    busy = watch.busy or waiting_threads() is not None
    remedy = _BUSY if busy else _FASTER if pays else _SLOWER
    yield Finding("estimate", "speed", f"{words}; {source}", "good" if pays and not busy else "note", remedy)
    yield _compared(generator.target, runs)
    yield Finding("estimate", "machine", watch.verdict(), "note")


def _compared(target: LanguageModel, runs: Sequence[Duel]) -> Finding:
    different = f"{sum(one.difference is not None for one in runs)} of {len(runs)}"
    if all(one.difference is None for one in runs):
        return Finding("estimate", "texts", "the same with the draft and without")
    if target.exactness in ("exact", "strict"):
        return Finding("estimate", "texts", f"{different} differ, which is a bug", "bad", "please report it")
    remedy = "--exactness strict, or --dtype float32, makes them the same"
    return Finding("estimate", "texts", f"{different} part at a near-tie", "note", remedy)


def _duels(
    assisted: SpecGenerator, plain: SpecGenerator, texts: Sequence[str], seconds: float, watch: Watch
) -> Iterator[Duel]:
    """Runs of one prompt after another; texts are so long that a few fit into `seconds`."""
    from specdec.bench.duel import WARM_UP, duel

    options: dict[str, Any] = {"eos_token_id": []}
    first = plain.generate(texts[0], max_new_tokens=WARM_UP, **options)
    began, rate = clock(), first.stats.tokens_per_second if first.stats is not None else 1.0
    tokens = int(min(max(rate * seconds / _TEXTS, _TOKENS[0]), _TOKENS[1]))
    for number, text in enumerate(texts):
        if number and clock() - began > seconds * (1 - 1 / _LEAST):
            break
        yield duel(assisted, plain, text, watch=watch, repeats=2, max_new_tokens=tokens, **options)


@flags.takes(
    "draft dtype quantization gguf_file backend exactness device_map trust_remote_code json_ quiet",
)
def doctor(
    ctx: typer.Context,
    target: str | None = flags.target("Model to examine: hub id, folder, GGUF file, or zoo:NAME."),
    prompt: list[str] | None = Option(
        None, "--prompt", "-p", help="Prompt of the estimate; repeatable; code by default."
    ),
    seconds: float = Option(_SECONDS, min=0.1, help="Approximate duration of the estimate."),
    *,
    json_: bool,
) -> int:
    """Examine the machine, the installation and a pair of models.

    Prints install commands for missing parts, and estimates the pair's speedup.

    Exit code 1: something is wrong; see the line with ✗.
    """
    found: list[Finding] = []
    for finding in _examine(ctx.params):
        if not json_:
            _show(finding, headed=not found or found[-1].section != finding.section)
        found.append(finding)
    if json_:
        write_json({"findings": [asdict(finding) for finding in found]})
    return FAILED if any(finding.state == "bad" for finding in found) else OK


def _examine(params: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields findings one by one, with a spinner before each section."""
    with loading("looking at the machine"):
        here = [*machine(), *installation()]
    yield from here
    if params["target"] is None:
        return
    request = read_request(params)
    try:
        generator: SpecGenerator = load_with_spinner(request, prefix_cache=False)  # every measured run reads its prompt
    except SpecdecError as error:
        yield Finding("models", "loading", " ".join(str(error).split()), "bad")
        return
    yield from check_models(generator)
    with loading(f"decoding for {params['seconds']:.0f} seconds"):
        measured = list(estimate(generator, params["prompt"] or (), seconds=params["seconds"]))
    yield from measured


def _show(finding: Finding, *, headed: bool) -> None:
    out = Console()
    mark, style = _MARKS[finding.state]
    if headed:
        write(out, f"{finding.section}\n", Style(bold=True))
    write(out, f"  {mark} ", style)
    text = finding.text
    if out.is_terminal:  # long texts are indented
        margin = _WIDTH + 5
        text = f"\n{'':<{margin}}".join(textwrap.wrap(text, max(out.width - margin, 30)))
    write(out, f"{finding.name:<{_WIDTH}} {text}\n")
    if finding.remedy is not None:
        write(out, f"    {'':<{_WIDTH}} → {finding.remedy}\n", PROMPT)
