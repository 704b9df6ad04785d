"""`specdec doctor`: examines the machine, the installation and a pair; each bad finding has a remedy."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import chain
from math import ceil
from pathlib import Path
from shlex import join
from time import perf_counter as clock
from typing import TYPE_CHECKING, Any, Literal

import typer
from packaging.requirements import Requirement
from rich.console import Console
from rich.style import Style
from typer import Option

from specdec.cli import flags
from specdec.cli.request import CommandRequest, read_request
from specdec.cli.show import PROMPT, write, write_json
from specdec.cli.terminal import FAILED, OK, Bar, loading
from specdec.options.drafts import read_draft
from specdec.options.load import NONE

if TYPE_CHECKING:
    from specdec.bench.tuner import Trial
    from specdec.core.drafts import Draft
    from specdec.generator.generator import SpecGenerator
    from specdec.models import LanguageModel

State = Literal["good", "note", "bad"]
_DISTRIBUTION = "specdec-runtime"
_EXTRAS = {
    "audio": "recordings in any format",
    "harness": "lm-evaluation-harness",
    "parquet": "Parquet input of specdec batch",
    "quant": "INT8, NF4 and FP4 of bitsandbytes",
    "serve": "specdec serve",
    "structured": "answers in a form: JSON schemas, expressions, grammars",
}
"""Extras of the package, and what they add."""
_SECONDS = 60.0  # for a pair
_MORE = 1.5  # times the seconds that lacked: with more time, all answers are longer
_FIGURES = ("weights", "draft", "ms", "speedup", "speedups", "first_token", "different")
_BUSY = "measure again on a quiet machine: other programs use its cores"
_MARKS = {"good": ("✓", Style(color="green")), "note": ("·", PROMPT), "bad": ("✗", Style(color="red", bold=True))}
_WIDTH = 16  # columns of a name


@dataclass(frozen=True)
class Finding:
    """One line of the examination: the part of a section, its state in words, and the remedy where it is not good.

    What was measured has `figures`.
    """

    section: str
    name: str
    text: str
    state: State = "good"
    remedy: str | None = None
    figures: Mapping[str, Any] | None = None


def machine() -> Iterator[Finding]:
    import torch

    from specdec.bench.machine import FEWER_THREADS, memory_bandwidth, provenance, waiting_threads
    from specdec.kernels import page_state
    from specdec.models import free_bytes

    finding, facts, waiting = partial(Finding, "machine"), provenance(), waiting_threads()
    yield finding("processor", f"{facts['processor']}: {facts['cores']} cores, {facts['threads']} threads")
    yield finding("instructions", " ".join(facts["flags"]) or "unknown", "note")
    if waiting is None:
        yield finding("threads", f"torch uses {facts['threads']}, which do not wait for cores")
    else:
        yield finding("threads", waiting, "note", FEWER_THREADS)
    free = free_bytes(torch.device("cpu")) / 2**30
    yield finding("memory", f"{facts['memory_gib']} GiB, {free:.1f} free; read at {memory_bandwidth() / 1e9:.0f} GB/s")
    yield finding("pages of weights", page_state(), "note")
    if (name := facts["accelerator"]) is not None:
        free, whole = (size / 2**30 for size in torch.cuda.mem_get_info())
        yield finding("accelerator", f"{name}: {whole:.1f} GiB, {free:.1f} free")
    elif shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists():
        remedy = "pip install torch, without a CPU build's index or constraints"
        yield finding("accelerator", "installed, but this torch does not see it", "bad", remedy)
    else:
        yield finding("accelerator", "none: models run on the processor", "note")


def installation() -> Iterator[Finding]:
    from specdec import kernels
    from specdec.models import packed_weights

    finding, needed = partial(Finding, "installation"), [Requirement(text) for text in _requirements()]
    core = [package for package in needed if package.marker is None]
    there = ", ".join(f"{package.name} {_version(package.name) or 'missing'}" for package in core)
    if wrong := [str(package) for package in core if _lacks(package)]:
        yield finding("packages", f"{there}: others were tested", "bad", f"pip install {' '.join(map(repr, wrong))}")
    else:
        yield finding("packages", there)
    kernels.try_again()
    if (missing := kernels.lack()) is None:
        yield finding("kernels", f"of our own, built for this processor in {kernels.folder()}")
        yield finding("packed weights", packed_weights(), "note")
    else:
        yield finding("kernels", f"none, so passes stay torch's: {missing.reason}", "bad", missing.way_out or None)
    for extra, brings in _EXTRAS.items():
        packages = [package for package in needed if package.marker and package.marker.evaluate({"extra": extra})]
        if lacking := [package.name for package in packages if _lacks(package)]:
            yield finding(
                f"[{extra}]",
                f"{brings}: no {', '.join(lacking)}",
                "note",
                f"pip install -c constraints.txt -e '.[{extra}]', in a checkout",
            )
        elif packages:  # an older installation lacks this extra
            yield finding(f"[{extra}]", brings)


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
    release = _version(needed.name)
    return release is None or not needed.specifier.contains(release, prereleases=True)


def check_models(generator: SpecGenerator) -> Iterator[Finding]:
    """Target and draft, their backends, and whether they fit."""
    finding, draft, target = partial(Finding, "models"), generator.draft, generator.target
    for role, model in (("target", target), *(("draft", model) for model in (draft.models if draft else ()))):
        kind, weights = type(model.model).__name__, f"{model.weight_bytes / 2**20:.0f} MiB of weights"
        yield finding(role, f"{kind}, {model.num_layers} layers, {model.weight_kind}, {weights}")
        state: State = "good" if model.backend == "packed" else "note"
        yield finding(f"{role}'s backend", f"{model.backend}: {_why_backend(model)}", state)
    if target.capability.cache_kind != "kv":
        yield finding("cache", f"{target.capability.reason}: guesses cost more here", "note")
    if draft is None:
        yield finding("draft", "none", "note", "name one: --draft MODEL, or --draft suffix for text that copies")
    else:
        yield _fit(draft, generator)


def _why_backend(model: LanguageModel) -> str:
    """Why a model was loaded with its backend."""
    from specdec import kernels
    from specdec.models.backends.packed_layers import why_not_packed

    if model.backend == "packed":
        return "short passes over packed weights are faster on this processor, which was measured"
    if unpackable := why_not_packed(model.model):
        return f"it {unpackable}"
    return str(kernels.lack() or "packed weights were not faster on this processor, or there are few of them")


def _fit(draft: Draft, generator: SpecGenerator) -> Finding:
    """How the draft's guesses reach the target; a pair that does not fit fails to load."""
    from specdec.proposers import HybridDraft, ModelDraft, TextBridge

    finding, draft = partial(Finding, "models", "fit"), draft.inner if isinstance(draft, HybridDraft) else draft
    if not draft.models:
        return finding(f"{draft.kind} reads the text alone and fits any target")
    if isinstance(draft, ModelDraft):
        widths = (model.vocab_size for model in (generator.target, *draft.models))
        words = len(generator.tokenizer) if generator.tokenizer is not None else min(widths)
        return finding(f"one vocabulary of {words:,} tokens: guesses are checked as they are")
    if isinstance(draft, TextBridge):
        words = "another tokenizer: guesses travel as text, which costs time"
        return finding(words, "note", "a draft with the target's tokenizer, if there is one")
    return finding("guesses are checked as they are")


def tune(request: CommandRequest, prompts: str | None, seconds: float) -> Iterator[Finding]:
    """Tries the target with its drafts, then in fewer bits, for so long; the best command, and why."""
    from specdec.bench.machine import waiting_threads
    from specdec.bench.parts import Mode
    from specdec.bench.tuner import Skipped, Trial, Tuner, drafts_to_try

    bar, trials, chats, failed, began = Bar(stages=True), list[Trial](), False, False, clock()
    missing = dict[str, float]()  # weights for which time lacked, and how many seconds they would have taken
    drafts = drafts_to_try(request.draft or "none")
    tuner = Tuner(request.target, drafts, Mode(**request.loading), began + seconds, prompts, bar)
    events = tuner.run()
    while True:
        with bar:
            event = next(events, None)
        match event:
            case None:
                break
            case Skipped(mode, why, failed=True):
                failed = True
                yield Finding("models", "failure", why, "bad")
            case Skipped(mode, why):
                weights = next((_weights(trial) for trial in trials if trial.mode == mode), mode.label)
                label = _label(event.draft) if event.draft else "all drafts"
                missing |= {mode.label: event.seconds} if event.seconds else {}
                yield Finding(weights, label, why, "note")
            case Trial():
                trials.append(event)
                yield _trial(event)
            case generator:
                yield from check_models(generator)
                if generator.tokenizer is None or generator.target.model.main_input_name != "input_ids":
                    words = "measured for models that read text alone: see specdec transcribe --stats"
                    yield Finding("models", "speed", words, "note")
                    return
                chats = bool(generator.tokenizer.chat_template)
                del generator, event  # its memory is needed for other modes
    if trials or not failed:  # first, as it says what the advice is worth
        busy = tuner.watch.busy or waiting_threads() is not None
        yield Finding("best", "machine", tuner.watch.verdict(), "note", _BUSY if busy else None)
    if missing:
        enough = clock() - began + _MORE * sum(missing.values())
        remedy = f"--seconds {10 * ceil(enough / 10)}"
        yield Finding("best", "time", f"too little for {', '.join(missing)}", "note", remedy)
    if {trial.draft for trial in trials} - {NONE}:
        yield from _advice(request, trials, tuner.num_prompts, chats=chats)
        yield from _compared(trials)


def _trial(trial: Trial) -> Finding:
    """A draft's line in the table of its mode."""
    words = f"{trial.ms:.1f} ms per token, first token {trial.first_token:.2f} s"
    if trial.draft != "none":
        kinds = ", ".join(f"{kind} {ratio:.2f}×" for kind, ratio in trial.speedups.items())
        words += f"; {trial.speedup:.2f}×" + (f" ({kinds})" if len(trial.speedups) > 1 else "")
        words += "" if trial.pays else f", it does not pay: {trial.reason}"
    figures = {name: getattr(trial, name) for name in _FIGURES} | {"answers": len(trial.answers)}
    state: State = "good" if trial.pays else "note"
    return Finding(_weights(trial), _label(trial.draft), words, state, figures=figures)


def _weights(trial: Trial) -> str:
    """The heading of a mode."""
    return f"{trial.weights} weights"


def _label(draft: str) -> str:
    """The spelling of a draft; a model without its name, which may be long."""
    name = read_draft(draft)
    if name.model is not None:
        return f"model and {name.word}" if name.copies else "model alone"
    return "no draft" if draft == NONE else draft


def _advice(request: CommandRequest, trials: Sequence[Trial], prompts: int, *, chats: bool) -> Iterator[Finding]:
    """The fastest command, and the fastest for the weights as they were named, where fewer bits are faster still.

    `prompts`: how many there were.
    """
    from specdec.bench.tuner import best, comparable

    trials = comparable(trials)
    plain, fastest = trials[0], best(trials)[0]
    groups = {"command": trials}
    if fastest.mode != plain.mode:
        groups["same weights"] = [trial for trial in trials if trial.mode == plain.mode]
    for name, group in groups.items():
        trial, *others = best(group)
        count = len(trial.answers)
        of = f"{count} of {prompts}" if count < prompts else str(count)
        words = f"{trial.ms:.1f} ms per token on {of} prompt{'s' * (of != '1')}, "
        if trial is plain:
            words += "and no draft that was measured is faster"
        else:
            words += f"{plain.ms / trial.ms:.2f}× as fast as {plain.weights} weights without a draft"
        if trial.mode != plain.mode:
            words += "; fewer bits write other texts"
        equals = [
            _label(other.draft) if other.mode == trial.mode else f"{_label(other.draft)} with {_weights(other)}"
            for other in others
        ]
        if equals and trial is not plain:
            words += f"; {', '.join(equals)}: as fast, but for noise"
        yield Finding("best", name, command(request, trial, chats=chats), remedy=words)


def command(request: CommandRequest, trial: Trial, *, chats: bool) -> str:
    """The command that runs what was tried; chat and generate have all of these flags."""
    loading = trial.mode.model_dump(exclude_defaults=True)
    loading |= {f"draft_{name}": value for name, value in loading.pop("draft_options", {}).items()}
    words = ["specdec", "chat" if chats else "generate", request.target, "--draft", trial.draft]
    for name, value in loading.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return join(words if chats else [*words, "-p", "YOUR PROMPT"])


def _compared(trials: Sequence[Trial]) -> Iterator[Finding]:
    """Whether drafts left texts as they were, where the target promises it and elsewhere."""
    drafted = [trial for trial in trials if trial.draft != "none"]
    if drafted and not any(trial.different for trial in drafted):
        yield Finding("best", "texts", "the same with the drafts and without")
    for promised in (True, False):
        group = [trial for trial in drafted if (trial.exactness in ("exact", "strict")) == promised]
        different = sum(trial.different for trial in group)
        words = f"{different} of {sum(len(trial.answers) for trial in group)} part"
        if different and promised:
            yield Finding("best", "texts", f"{words}, which is a bug", "bad", "please report it")
        elif different:
            remedy = "--exactness strict, or --dtype float32, makes them the same"
            yield Finding("best", "texts", f"{words} at a near-tie", "note", remedy)


@flags.takes("draft dtype quantization gguf_file backend exactness device_map trust_remote_code json_ quiet")
def doctor(
    ctx: typer.Context,
    target: str | None = flags.target("Model to examine: hub id, folder, GGUF file, or zoo:NAME."),
    prompts: str | None = flags.flag(
        "Your prompts: a text file, one in each paragraph, or JSON lines; by default three kinds of text."
    ),
    seconds: float = Option(
        _SECONDS, min=0.1, help="Time for the models, loading included; each draft answers in a few words even later."
    ),
    *,
    json_: bool,
) -> int:
    """Find the fastest setting of a pair, and examine the machine.

    Prints install commands for missing parts. Tries TARGET without a draft, with copies of the text, and with the
    draft model and copies, as it is and in fewer bits, and prints the fastest command.

    Exit code 1: something is wrong; see the line with ✗.
    """
    findings = list[Finding]()
    request = None if target is None else read_request(ctx.params)
    with loading("looking at the machine"):
        from specdec.bench.parts import Mode
        from specdec.bench.prompts import pick_prompts

        if request is not None:  # names are checked before anything takes time
            Mode(**request.loading).check(request.target, read_draft(request.draft or "none").model)
        if request is not None and prompts is not None:
            pick_prompts(prompts, 1)
    here = _watched(chain(machine(), installation()))
    for finding in chain(here, () if request is None else tune(request, prompts, seconds)):
        if not json_:
            _show(finding, headed=not findings or findings[-1].section != finding.section)
        findings.append(finding)
    if json_:
        write_json({"findings": [asdict(finding) for finding in findings]})
    return FAILED if any(finding.state == "bad" for finding in findings) else OK


def _watched(findings: Iterator[Finding]) -> Iterator[Finding]:
    """Findings of the machine as they come, under a spinner."""
    while True:
        with loading("looking at the machine"):
            finding = next(findings, None)
        if finding is None:
            return
        yield finding


def _show(finding: Finding, *, headed: bool) -> None:
    out = Console()
    mark, style = _MARKS[finding.state]
    if headed:
        write(out, f"{finding.section}\n", Style(bold=True))
    write(out, f"  {mark} ", style)
    write(out, f"{finding.name:<{_WIDTH}} {finding.text}\n")
    if finding.remedy is not None:
        write(out, f"    {'':<{_WIDTH}} → {finding.remedy}\n", PROMPT)
