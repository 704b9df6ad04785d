"""The flags that several commands share; what a flag defaults to stands in the command."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer

from specdec.cli.request import COPYING, DEFAULT_NEW_TOKENS, METHODS, WORDS
from specdec.core.draft_schedules import SCHEDULES
from specdec.options.load import BACKENDS, DTYPES, EXACTNESS, OFFLOADS, QUANTIZATIONS


def one_of(words: Iterable[str]) -> Callable[[str], list[str]]:
    """A shell completion: the `words` that begin with what was typed."""
    known = [*words]
    return lambda incomplete: [word for word in known if word.startswith(incomplete)]  # typer needs this name


def own_pairs(incomplete: str) -> list[str]:
    """Completes the name of a pair, of the package or of this user; the shell completes files."""
    from specdec.options import bundled_models

    return one_of(f"zoo:{name}" for name in bundled_models.folders())(incomplete)


# What drafts, and how much.
DraftModel = Annotated[str | None, typer.Option(help="Draft model: hub id, folder, or zoo:NAME.")]
Method = Annotated[
    str | None,
    typer.Option(
        help=f"How to draft: {METHODS}. auto: with the draft model if one is named, else {COPYING[0]}. hybrid: "
        f"{COPYING[0]} and the draft model; hybrid:{COPYING[-1]}: {COPYING[-1]} and the draft model.",
        autocompletion=one_of(["auto", "draft", *WORDS, "hybrid", *(f"hybrid:{word}" for word in COPYING), "none"]),
    ),
]
DraftTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens to draft per round: the first length of auto and heuristic (5), the length of constant (5), the "
        "limit of confidence (20) and cost (32)."
    ),
]
ScheduleName = Annotated[
    str | None, typer.Option(help=f"How much to draft: {', '.join(SCHEDULES)}.", autocompletion=one_of(SCHEDULES))
]

# How tokens are chosen.
MaxNewTokens = Annotated[int | None, typer.Option(help=f"Length limit; {DEFAULT_NEW_TOKENS} if nothing sets one.")]
Sample = Annotated[bool | None, typer.Option("--sample/--greedy", help="Sample, or take the likeliest token.")]
TopK = Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens; implies --sample.")]
TopP = Annotated[
    float | None, typer.Option(help="Sample from the likeliest tokens of this total probability; implies --sample.")
]

# How models are loaded.
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Data type of the weights: float32, bfloat16, …; auto (default): the checkpoint's, but float32 instead of "
        "float16 on a CPU.",
        autocompletion=one_of(DTYPES),
    ),
]
Backend = Annotated[
    str | None, typer.Option(help=f"How passes are run: {', '.join(BACKENDS)}.", autocompletion=one_of(BACKENDS))
]
ExactnessName = Annotated[
    str | None,
    typer.Option(
        "--exactness",
        help="strict: the same text as plain decoding in any dtype, bit for bit.",
        autocompletion=one_of(EXACTNESS),
    ),
]
Quantization = Annotated[
    str | None,
    typer.Option(help=f"Fewer bits per weight: {', '.join(QUANTIZATIONS)}.", autocompletion=one_of(QUANTIZATIONS)),
]
GgufFile = Annotated[str | None, typer.Option(metavar="NAME", help="A GGUF file in the folder or hub repository.")]
DeviceMap = Annotated[str | None, typer.Option(help="Where to load the models: cpu, cuda, auto, …")]
Offload = Annotated[
    str | None,
    typer.Option(
        help=f"Where the target's weights stay, to be read in every pass: {' or '.join(OFFLOADS)}.",
        autocompletion=one_of(OFFLOADS),
    ),
]
TpPlan = Annotated[
    str | None, typer.Option(metavar="auto", help="Share the target among the processes that torchrun started.")
]
OffloadFolder = Annotated[
    str | None, typer.Option(help="Where to write weights that cannot be read straight from the checkpoint.")
]
RemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")]

# What all else shares.
ConfigFile = Annotated[Path | None, typer.Option(help="YAML file of target, draft, method and options; flags win.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other option of generate; repeatable.")
]
Stats = Annotated[bool, typer.Option("--stats", help="Print statistics on stderr.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no warnings.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
