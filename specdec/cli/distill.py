"""`specdec distill`: trains a draft for a target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec.cli import flags
from specdec.cli.request import loading_flags, locate
from specdec.cli.terminal import INTERRUPTED, OK, counting, loading, say, stop_on_interrupt

_ALL = 1_000_000  # prompts


def distill(
    ctx: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="Hub id, folder, or zoo:NAME (specdec zoo lists them).")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the draft; a training in it is resumed.")],
    text: Annotated[list[Path] | None, typer.Option(help="Text file to train on; repeatable.")] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="File of prompts whose answers to train on: JSON lines, or paragraphs; repeatable."),
    ] = None,
    audio: Annotated[
        list[Path] | None,
        typer.Option(help="Recordings for a Whisper TARGET: files, folders, .txt lists of files; with --kind layers."),
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            help="eagle3: a head that reads the target's hidden states. layers: copies of some of its layers."
        ),
    ] = "eagle3",
    layers: Annotated[
        int | None, typer.Option(help="Number of layers of the draft (1 for eagle3, 2 for layers).")
    ] = None,
    draft_vocabulary: Annotated[
        int | None, typer.Option(help="Number of tokens that the draft can guess (8192).")
    ] = None,
    hours: Annotated[float | None, typer.Option(help="Hours of training; 1 without --steps.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of training.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, windows and samples.")] = 0,
    cache_gib: Annotated[
        float, typer.Option(help="Disk space in GiB for the target's outputs, computed once; twice that with --audio.")
    ] = 4.0,
    dtype: flags.Dtype = None,
    device_map: flags.DeviceMap = None,
    trust_remote_code: flags.RemoteCode = False,
    quiet: flags.Quiet = False,
    debug: flags.Debug = False,
) -> int:
    """Train a draft model or head for TARGET. Ctrl-C ends early; the same command resumes."""
    from specdec.bench.prompts import read_prompts
    from specdec.distill.distill import distill

    asked = [prompt.text for source in prompts or [] for prompt in read_prompts(source, _ALL)]
    with loading("", quiet=True), stop_on_interrupt() as interrupt, counting(quiet=quiet) as notify:
        card = distill(
            locate(target, "target", "TARGET"),
            out,
            text=text or [],
            prompts=asked,
            audio=audio or [],
            kind=kind,
            layers=layers,
            draft_vocabulary=draft_vocabulary,
            hours=hours,
            steps=steps,
            seed=seed,
            cache_gib=cache_gib,
            notify=notify,
            is_stopped=lambda: interrupt.asked,
            **loading_flags(ctx.params),
        )
    for line in report(card):
        print(line)
    if interrupt.asked:
        say(f"interrupted: the draft in {out} is usable, run the same command to train it further")
        return INTERRUPTED
    return OK


def report(card: Mapping[str, Any]) -> Iterator[str]:
    """The figures of a draft on held-out texts."""
    yield f"steps                   {card['steps']} ({card['tokens']:,} tokens, {card['seconds']:.0f} s)"
    if card["loss"] is not None:
        yield f"loss                    {card['loss']:.3f} nats"
    yield "agreement by position   " + " ".join(f"{share:.0%}" for share in card["agreement"])
    yield f"acceptance length       {card['acceptance_length']:.2f} expected, {card['tokens_per_pass']:.2f} in decoding"
    plain, assisted = card["plain_ms_per_token"], card["assisted_ms_per_token"]
    verdict = f"{card['speedup']:.2f}×" if card["speedup"] > 1 else f"{card['speedup']:.2f}×, it does not pay"
    yield f"ms per token            {plain:.1f} plain, {assisted:.1f} with the draft: {verdict}"
