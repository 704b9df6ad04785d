"""Flags that several commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

from typer import Argument, Option

from specdec.cli.request import DEFAULT_NEW_TOKENS, DRAFT_FLAGS
from specdec.cli.terminal import hush
from specdec.core.draft_schedules import SCHEDULES
from specdec.options import bundled_models
from specdec.options.drafts import FOLLOWING, SPELLINGS, WORDS
from specdec.options.fields import COPYING
from specdec.options.load import ACTIVATIONS, AUTO, BACKENDS, DTYPES, EXACTNESS, NONE, OFFLOADS, QUANTIZATIONS

Command = Callable[..., int | None]


def one_of(words: Iterable[str]) -> Callable[[str], list[str]]:
    """A shell completion: the `words` that begin with the text so far."""
    choices = [*words]
    return lambda incomplete: [word for word in choices if word.startswith(incomplete)]  # typer needs this name


_PAIRS = [f"zoo:{name}" for name in bundled_models.NAMES]
_DRAFTS = [*WORDS, *_PAIRS, *(f"{word}+{pair}" for word in COPYING for pair in (*_PAIRS, *FOLLOWING)), AUTO, NONE]


def flag(help: str, *names: str, words: Iterable[str] = (), **how: Any) -> Any:
    """A flag that may be left out; by default it has the name of its parameter. The shell completes `words`."""
    return Option(None, *names, help=help, autocompletion=one_of(words) if words else None, **how)


def target(help: str, default: Any = None) -> Any:
    """The argument TARGET of a command; by default it may be left out."""
    return Argument(default, metavar="TARGET", help=help, autocompletion=one_of(_PAIRS))


def takes(*words: str) -> Callable[[Command], Command]:
    """Gives a command the flags of `_shared` that the words of these texts name, and `--debug`; all are in
    `ctx.params`. A command that takes "draft" takes the flags of loading it, too.

    In the help they stand between the command's positional and its keyword parameters, `--debug` behind all. The
    command declares, with their types alone, the flags that it reads by name.
    """
    names = [flag for name in " ".join(words).split() for flag in (name, *(DRAFT_FLAGS if name == "draft" else ()))]

    def decorate(command: Command) -> Command:
        parameters = inspect.signature(command, eval_str=True).parameters
        shared = [SHARED[name] for name in names]

        @wraps(command)
        def run(**params: Any) -> int | None:
            if params.get("quiet"):
                hush()
            return command(**{name: params[name] for name in parameters})

        first = [p for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]
        last = [p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY and name not in names]
        run.__signature__ = inspect.Signature([*first, *shared, *last, SHARED["debug"]])  # type: ignore[attr-defined]
        return run

    return decorate


def _shared(
    *,
    # what drafts, and how much
    draft: str | None = flag(
        f"What drafts: {SPELLINGS}. By default the draft of a zoo: target, else {AUTO}.", words=_DRAFTS
    ),
    draft_dtype: str | None = flag("--dtype of the draft; by default the target's.", words=DTYPES),
    draft_quantization: str | None = flag(
        f"Fewer bits per weight of the draft: auto (default, 4 or 8 where faster), none, {', '.join(QUANTIZATIONS)}.",
        words=(AUTO, NONE, *QUANTIZATIONS),
    ),
    draft_gguf_file: str | None = flag("--gguf-file of the draft.", metavar="NAME"),
    draft_revision: str | None = flag("--revision of the draft."),
    num_draft_tokens: int | None = flag(
        "Tokens to draft per round: the first length of auto and heuristic (5), the length of constant (5), the "
        "limit of confidence (20) and cost (32)."
    ),
    schedule: str | None = flag(f"How much to draft: {', '.join(SCHEDULES)}.", words=SCHEDULES),
    # how tokens are chosen
    max_new_tokens: int | None = flag(
        f"Length limit; {DEFAULT_NEW_TOKENS} if nothing sets one.", "--max-new-tokens", "-n"
    ),
    sample: bool | None = flag("Sample, or take the likeliest token, which is the default.", "--sample/--greedy"),
    temperature: float | None = flag("Sampling temperature; implies --sample."),
    top_k: int | None = flag("Sample from the k likeliest tokens; implies --sample."),
    top_p: float | None = flag("Sample from the likeliest tokens of this total probability; implies --sample."),
    # how models are loaded
    dtype: str | None = flag(
        "Data type of the weights: float32, bfloat16, …; auto (default): the checkpoint's, but float32 instead of "
        "float16 on a CPU, and the fastest for speech.",
        words=DTYPES,
    ),
    quantization: str | None = flag(
        f"Fewer bits per weight: {', '.join(QUANTIZATIONS)}; the last three are bitsandbytes', whose int8 is slow on a "
        "CPU.",
        words=QUANTIZATIONS,
    ),
    gguf_file: str | None = flag("A GGUF file in the folder or hub repository.", metavar="NAME"),
    backend: str | None = flag(f"How passes are run: {', '.join(BACKENDS)}.", words=BACKENDS),
    exactness: str | None = flag("strict: the same text as plain decoding in any dtype, bit for bit.", words=EXACTNESS),
    activations: str | None = flag("float: rows meet packed integers as they are, not in 8 bits.", words=ACTIVATIONS),
    device_map: str | None = flag("Where to load the models: cpu, cuda, auto, …"),
    offload: str | None = flag(
        f"Where the target's weights stay, to be read in every pass: {' or '.join(OFFLOADS)}.", words=OFFLOADS
    ),
    offload_folder: str | None = flag("Where to write weights that cannot be read straight from the checkpoint."),
    trust_remote_code: bool | None = flag("Run the model's own code.", "--trust-remote-code"),
    prefix_cache: bool | None = flag(
        "Continue what earlier prompts have in common with a new one (default), or read every prompt in full.",
        "--prefix-cache/--no-prefix-cache",
    ),
    memory: list[str] | None = flag(
        "File or folder of text that a draft that copies looks up, beside earlier requests; repeatable; on: "
        "earlier requests alone; off: neither.",
        metavar="PATH",
    ),
    # other flags
    config: Path | None = flag("YAML file of target, draft, loading and options; flags win."),
    set_: list[str] | None = flag("Any other option of generate; repeatable.", "--set", metavar="KEY=VALUE"),
    json_: bool = Option(False, "--json", help="Print one JSON object on stdout."),
    stats: bool = Option(False, "--stats", help="Print statistics on stderr."),
    quiet: bool = Option(False, "--quiet", "-q", help="Print no progress and no warnings."),
    debug: bool = Option(False, "--debug", help="Show the traceback of an error."),
) -> None:
    """The shared flags, as a command declares its own."""


SHARED = inspect.signature(_shared, eval_str=True).parameters
