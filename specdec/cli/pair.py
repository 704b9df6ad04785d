"""The models of the package: `specdec demo` runs a pair, `specdec zoo` lists them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.style import Style
from typer import Option

from specdec.cli import flags
from specdec.cli.request import DEFAULT_NEW_TOKENS
from specdec.cli.show import ACCEPTED, PROMPT, Printer, has_colours, write
from specdec.cli.terminal import MISMATCH, OK, fail, is_quiet, loading, remark
from specdec.options import bundled_models

if TYPE_CHECKING:
    from specdec.core.stats import Stats

_WIDTH = 40  # characters of the longest bar
_RUNS = 2  # runs of both, in turn
_PROMPTS = 12
HEADING = Style(bold=True)
PHASES = {"target": ("█", Style(color="blue")), "draft": ("▒", ACCEPTED), "all else": ("░", PROMPT)}


@flags.takes("sample temperature quiet")
def demo(
    seed: int = Option(0, help="Seed of the prompt's choice and of sampling."),
    max_new_tokens: int = Option(DEFAULT_NEW_TOKENS, min=1, help="Length of the continuation."),
    *,
    sample: bool | None,
    temperature: float | None,
) -> int:
    """Watch a small model write code without and with its draft. Then see where the time went."""
    how = {"do_sample": sample or temperature is not None, "temperature": temperature, "seed": seed}
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, **how}
    pair = bundled_models.pair()
    out = Console()
    with loading(f"loading zoo:{pair.name}"):
        from specdec.bench.machine import high_load, load_now, waiting_threads
        from specdec.bench.prompts import pick_prompts
        from specdec.bench.samples import differences
        from specdec.generator.generator import SpecGenerator

        assisted = SpecGenerator.from_pretrained(str(pair.target), str(pair.draft), prefix_cache=False)
        plain = SpecGenerator(assisted.target, tokenizer=assisted.tokenizer, prefix_cache=False)
        texts = pick_prompts("code", _PROMPTS)
        text = texts[seed % len(texts)].text
        for generator in (plain, assisted):  # the first passes of a process are slow
            generator.generate(text, **{**options, "max_new_tokens": 1})
    if busy := high_load(load_now()) or waiting_threads():  # now, since decoding may take minutes
        remark(f"busy machine: {busy}: other programs take the cores, and the figures below mean little")
    for heading, generator in (("the target alone", plain), ("the target and its draft", assisted)):
        write(out, f"── {heading} ──\n", HEADING)
        write(out, text, PROMPT)
        Printer(out, generator.tokenizer, show_draft=True, marks=False).follow(generator.stream(text, **options))
        write(out, "\n")
    if has_colours(out):
        write(out, "■ prompt  ", PROMPT)
        write(out, "■ accepted from the draft  ", ACCEPTED)
        write(out, "■ the target's own\n\n")
    with Console(stderr=True, quiet=is_quiet()).status("measuring both in turn"):
        outs = [generator.generate(text, **options) for generator in (plain, assisted) * _RUNS]
    runs = [out.stats for out in outs if out.stats is not None]
    _show_time(out, dict(zip(("alone", "with draft"), runs[-2:], strict=True)))
    plain_rate, rate = (stats.tokens_per_second for stats in runs[-2:])
    pairs = ((alone.new_tokens(), drafted.new_tokens()) for alone, drafted in zip(outs[::2], outs[1::2], strict=True))
    difference = next((each for pair in pairs for each in differences(*pair)), None)
    rates = f"plain {plain_rate:.0f} tokens/s · assisted {rate:.0f} tokens/s"
    length = f"mean acceptance length {runs[-1].mean_acceptance_length:.2f}"
    rounds = f"{runs[-1].num_draft_rounds} of {runs[-1].num_target_passes} passes over guesses"
    same = f"{length}, {rounds} · identical: {'no' if difference else 'yes'}"
    verdict = f"{comparison(rate / plain_rate)}{' on a busy machine' if busy else ''}"
    write(out, f"\n{rates} · {verdict} · {same}\n")
    if difference is None:
        return OK
    _, position, *tokens = difference
    wrote = ("nothing" if t is None else f"{t} {assisted.tokenizer.decode([t])!r}" for t in tokens)
    words = ", assisted ".join(wrote)
    return fail(f"error: mismatch at new token {position}: plain wrote {words}", MISMATCH)


def _show_time(out: Console, runs: Mapping[str, Stats]) -> None:
    """A bar for plain and for assisted decoding, as long as they took, in phases."""
    longest = max(stats.seconds for stats in runs.values()) or 1.0
    write(out, "where the time went\n", HEADING)
    for name, stats in runs.items():
        write(out, f"  {name:<11}")
        phases = (stats.verify_seconds, stats.draft_seconds, stats.select_seconds + stats.other_seconds)
        for (mark, style), seconds in zip(PHASES.values(), phases, strict=True):
            write(out, mark * round(_WIDTH * seconds / longest), style)
        write(out, f" {stats.seconds:.2f} s, {stats.num_target_passes} passes of the target\n")
    write(out, f"{'':13}")
    for phase, (mark, style) in PHASES.items():
        write(out, f"{mark} {phase}  ", style)
    write(out, "\n")


def comparison(speedup: float) -> str:
    if speedup < 0.98:
        return f"assistance is slower here ({speedup:.2f}×)"
    return f"{speedup:.2f}× faster" if speedup > 1.02 else f"about as fast ({speedup:.2f}×)"


@flags.takes()
def zoo() -> None:
    """List the bundled models with their cards."""
    for name in bundled_models.NAMES:
        pair = bundled_models.pair(name)
        print(f"zoo:{name}")
        for role, folder in (("target", pair.target), ("draft", pair.draft)):
            size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
            print(f"  {role:<24} {size / 1e6:.1f} MB  {folder}")
        for key, value in pair.card.items():
            text = f"{value:,}" if isinstance(value, int) else value if isinstance(value, str) else json.dumps(value)
            print(f"  {key.replace('_', ' '):<24} {text}")
