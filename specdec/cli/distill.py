"""`specdec distill`: trains a draft for a target."""

from __future__ import annotations

from pathlib import Path
from shlex import join

import typer
from typer import Option

from specdec.cli import flags
from specdec.cli.request import passed
from specdec.cli.terminal import INTERRUPTED, OK, Bar, Interrupt, loading, say
from specdec.options.bundled_models import locate

_ALL = 1_000_000  # prompts


@flags.takes("dtype device_map trust_remote_code quiet")
def distill(
    ctx: typer.Context,
    target: str = flags.target("Hub id, folder, or zoo:NAME (specdec zoo lists them).", ...),
    out: Path = Option(..., "--out", "-o", help="Folder for the draft; a training in it is resumed."),
    text: list[Path] | None = Option(None, help="Text file to train on; repeatable."),
    prompts: list[str] | None = Option(
        None, help="File of prompts whose answers to train on: JSON lines, or paragraphs; repeatable."
    ),
    layers: int = Option(1, help="Number of layers of the draft."),
    draft_vocabulary: int | None = Option(None, help="Number of tokens that the draft can guess (8192)."),
    hours: float | None = Option(None, help="Hours of training; 1 without --steps."),
    steps: int | None = Option(None, help="Steps of training."),
    seed: int = Option(0, help="Seed of weights, windows and samples."),
    cache_gib: float = Option(4.0, help="Disk space in GiB for the target's outputs, computed once."),
) -> int:
    """Train a draft, an EAGLE-3 head, for TARGET. Ctrl-C ends early; the same command resumes."""
    from specdec.bench.prompts import pick_prompts
    from specdec.distill.distill import distill

    asked = [prompt.text for source in prompts or [] for prompt in pick_prompts(source, _ALL)]
    with loading("", quiet=True), Interrupt() as interrupt, Bar() as notify:
        card = distill(
            locate(target, "target", "TARGET"),
            out,
            text=text or [],
            prompts=asked,
            layers=layers,
            draft_vocabulary=draft_vocabulary,
            hours=hours,
            steps=steps,
            seed=seed,
            cache_gib=cache_gib,
            notify=notify,
            is_stopped=lambda: interrupt.asked,
            **passed(ctx.params),
        )
    # the figures on held-out texts
    print(f"steps                   {card['steps']} ({card['tokens']:,} tokens, {card['seconds']:.0f} s)")
    if card["loss"] is not None:
        print(f"loss                    {card['loss']:.3f} nats")
    print("agreement by position   " + " ".join(f"{share:.0%}" for share in card["agreement"]))
    print(f"acceptance length       {card['acceptance_length']:.2f} expected")
    print(f"to measure it           {join(['specdec', 'bench', target, '--draft', str(out)])}")
    if interrupt.asked:
        say(f"the draft in {out} is usable, run the same command to train it further")
        return INTERRUPTED
    return OK
