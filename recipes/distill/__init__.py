"""Trains a draft for any target: `python -m recipes distill TARGET OUT`, or `distill` in Python.

Ctrl-C ends early, and the same command resumes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from shlex import join

from recipes.distill.training import distill
from specdec.bench.prompts import pick_prompts
from specdec.cli.terminal import Bar, Interrupt, loading
from specdec.errors import SpecdecError
from specdec.options.bundled_models import locate

__all__ = ["distill", "main"]
_ALL = 1_000_000  # prompts


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains a draft, or trains it further, and prints its figures on held-out texts."""
    parser = argparse.ArgumentParser("python -m recipes distill", description=__doc__)
    parser.add_argument("target", help="hub id, folder, or zoo:NAME (specdec zoo lists them)")
    parser.add_argument("out", type=Path, help="folder for the draft; a training in it is resumed")
    parser.add_argument("--text", type=Path, action="append", default=[], help="text file; repeatable")
    parser.add_argument(
        "--prompts",
        action="append",
        default=[],
        help="file of prompts whose answers to train on: JSON lines, or paragraphs; repeatable",
    )
    parser.add_argument("--layers", type=int, default=1, help="number of layers of the draft [1]")
    parser.add_argument("--draft-vocabulary", type=int, help="number of tokens that the draft can guess [8192]")
    parser.add_argument("--hours", type=float, help="hours of training; 1 without --steps")
    parser.add_argument("--steps", type=int, help="steps of training")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, windows and samples [0]")
    parser.add_argument("--cache-gib", type=float, default=4.0, help="disk space for the target's outputs, in GiB [4]")
    parser.add_argument("--dtype", default="auto", help="data type of the target's weights [auto]")
    options = vars(parser.parse_args(arguments))
    target, out = options.pop("target"), options.pop("out")
    try:
        prompts = [prompt.text for source in options.pop("prompts") for prompt in pick_prompts(source, _ALL)]
        with loading("", quiet=True), Interrupt() as interrupt, Bar() as notify:
            card = distill(
                locate(target, "target", "TARGET"),
                out,
                prompts=prompts,
                notify=notify,
                is_stopped=lambda: interrupt.is_set,
                **options,
            )
    except SpecdecError as error:
        parser.error(str(error))
    print(f"steps                   {card['steps']} ({card['tokens']:,} tokens, {card['seconds']:.0f} s)")
    if card["loss"] is not None:
        print(f"loss                    {card['loss']:.3f} nats")
    print("agreement by position   " + " ".join(f"{share:.0%}" for share in card["agreement"]))
    print(f"acceptance length       {card['acceptance_length']:.2f} expected")
    print(f"to measure it           {join(['specdec', 'bench', target, '--draft', str(out)])}")
    if interrupt.is_set:
        raise SystemExit(f"the draft in {out} is usable, run the same command to train it further")
