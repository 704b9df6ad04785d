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
DraftModel = Annotated[str | None, typer.Option(help="A smaller model: hub id, folder, or zoo:NAME.")]
Method = Annotated[
    str | None,
    typer.Option(
        help=f"{METHODS}. auto: draft if there is a draft model, else {COPYING[0]}. hybrid: the draft model and "
        f"{COPYING[0]}; hybrid:{COPYING[-1]}: the draft model and {COPYING[-1]}.",
        autocompletion=one_of(["auto", "draft", *WORDS, "hybrid", *(f"hybrid:{word}" for word in COPYING), "none"]),
    ),
]
DraftTokens = Annotated[int | None, typer.Option(help="Most tokens to draft per round.")]
ScheduleName = Annotated[
    str | None, typer.Option(help=f"One of {', '.join(SCHEDULES)}.", autocompletion=one_of(SCHEDULES))
]

# How tokens are chosen.
MaxNewTokens = Annotated[int | None, typer.Option(help=f"Length limit, {DEFAULT_NEW_TOKENS} if nothing sets one.")]
Sample = Annotated[bool | None, typer.Option("--sample/--greedy", help="Draw tokens, or take the likeliest.")]
TopK = Annotated[int | None, typer.Option()]
TopP = Annotated[float | None, typer.Option()]

# How models are loaded.
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16 …; auto, the default, is the checkpoint's, but float32 for float16 on a CPU.",
        autocompletion=one_of(DTYPES),
    ),
]
Backend = Annotated[
    str | None, typer.Option(help=f"What passes run on: {', '.join(BACKENDS)}.", autocompletion=one_of(BACKENDS))
]
ExactnessName = Annotated[
    str | None,
    typer.Option(
        "--exactness",
        help="strict: the text of plain decoding, bit for bit, in any dtype.",
        autocompletion=one_of(EXACTNESS),
    ),
]
Quantization = Annotated[
    str | None, typer.Option(help=f"One of {', '.join(QUANTIZATIONS)}.", autocompletion=one_of(QUANTIZATIONS))
]
GgufFile = Annotated[str | None, typer.Option(metavar="NAME", help="A GGUF file in the folder or on the hub.")]
DeviceMap = Annotated[str | None, typer.Option(help="cpu, cuda, auto …")]
Offload = Annotated[
    str | None,
    typer.Option(
        help=f"{' or '.join(OFFLOADS)}: read weights from there in every pass.", autocompletion=one_of(OFFLOADS)
    ),
]
TpPlan = Annotated[
    str | None, typer.Option(metavar="auto", help="Share the target among the processes that torchrun started.")
]
OffloadFolder = Annotated[str | None, typer.Option(help="For weights that must be written again.")]
RemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with a model.")]

# What all else shares.
ConfigFile = Annotated[Path | None, typer.Option(help="YAML: target, draft, method and options. Flags win.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other option of generate; repeatable.")
]
Stats = Annotated[bool, typer.Option("--stats", help="A table of statistics on stderr.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no warnings on stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
