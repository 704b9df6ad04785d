"""What a measured server came to: figures per load, in words, as JSON, and as a page like the other reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.bench.figures import percentiles
from specdec.bench.machine import provenance
from specdec.bench.plots import SERIES, Plot, draw_plot, legend_below
from specdec.bench.remote import Measured, Workload
from specdec.bench.report import render

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Results = dict[str, Any]


def remote_results(workload: Workload, measured: Sequence[Measured]) -> Results:
    """Everything that the page shows, as plain values; the key is not among them."""
    asked = {name: value for name, value in asdict(workload).items() if name not in ("key", "prompts", "loads")}
    loads = [_figures(one) for one in measured]
    return {
        "name": f"{workload.model} at {workload.url}",
        "workload": {**asked, "prompts": len(workload.prompts)},
        "loads": loads,
        "summary": _summary(loads),
        "machine": provenance(),
    }


def _summary(loads: Sequence[Results]) -> list[str]:
    """What a reader must know, in sentences."""
    served = [load for load in loads if not load["plain"] and load["tokens_per_second"]]
    plain = {(load["concurrency"], load["rate"]): load["tokens_per_second"] for load in loads if load["plain"]}
    said = []
    if served:
        best = max(served, key=lambda load: load["tokens_per_second"])
        said.append(
            f"At most {best['tokens_per_second']:.0f} tokens a second, with {best['label']}; half of the answers begin "
            f"within {best['first_token_ms']['p50']:.0f} ms there."
        )
    ratios = [
        f"{load['tokens_per_second'] / alone:.2f}× with {load['label']}"
        for load in served
        if (alone := plain.get((load["concurrency"], load["rate"])))
    ]
    if ratios:
        said.append(f"Tokens per second over those without the draft: {', '.join(ratios)}.")
    errors, asked = (sum(load[name] for load in loads) for name in ("errors", "requests"))
    said.append(f"{errors} of {asked} requests FAILED." if errors else f"All {asked} requests were answered.")
    return said


def _figures(measured: Measured) -> Results:
    sound = [answer for answer in measured.answers if answer.error is None and answer.pieces]
    tokens = sum(answer.tokens for answer in sound)
    gaps = [b - a for answer in sound for a, b in zip(answer.pieces, answer.pieces[1:], strict=False)]
    each = [(a.pieces[-1] - a.pieces[0]) / (a.tokens - 1) for a in sound if a.tokens > 1]
    errors = [answer.error for answer in measured.answers if answer.error is not None]
    return {
        "label": measured.load.label,
        **asdict(measured.load),
        "requests": len(measured.answers),
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "seconds": measured.seconds,
        "requests_per_second": len(sound) / measured.seconds,
        "tokens_per_second": tokens / measured.seconds,
        "first_token_ms": _ms([a.pieces[0] - a.began for a in sound]),
        "between_pieces_ms": _ms(gaps),
        "per_token_ms": _ms(each),
        "request_ms": _ms([a.ended - a.began for a in sound]),
        "mean_acceptance_length": 1 + measured.accepted / measured.drafts if measured.drafts else None,
        "draft_acceptance_rate": measured.accepted / measured.drafted if measured.drafted else None,
    }


def _ms(seconds: Sequence[float]) -> dict[str, float] | None:
    return percentiles([1e3 * value for value in seconds])


def remote_lines(found: Results) -> list[str]:
    """The outcome as text, a line for each load."""
    width = max(len(load["label"]) for load in found["loads"])
    lines = [found["name"]]
    for load in found["loads"]:
        first, each = (load[name] or {} for name in ("first_token_ms", "per_token_ms"))
        words = [
            f"{load['requests_per_second']:6.2f} requests/s",
            f"{load['tokens_per_second']:8.1f} tokens/s",
            f"first token {first.get('p50', 0):.0f} ms (p99 {first.get('p99', 0):.0f})",
            f"{each.get('p50', 0):.2f} ms per token (p99 {each.get('p99', 0):.2f})",
        ]
        if load["mean_acceptance_length"] is not None:
            words.append(f"acceptance length {load['mean_acceptance_length']:.2f}")
        if load["errors"]:
            words.append(f"{load['errors']} ERRORS")
        lines.append(f"  {load['label']:<{width}}  {'  '.join(words)}")
    return lines


def write_remote_report(found: Results, folder: Path) -> Path:
    """Writes `results.json`, pictures and the page into `folder`; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    plots = _plots(found["loads"])
    for plot in plots:
        (folder / f"{plot.name}.png").write_bytes(plot.png)
    page = folder / "report.html"
    page.write_text(render("remote.html.j2", found=found, plots=plots), encoding="utf-8")
    return page


def _plots(loads: Sequence[Results]) -> list[Plot]:
    found = []
    for axis, words in (("concurrency", "requests at a time"), ("rate", "requests a second")):
        own = [load for load in loads if load[axis] is not None]
        if len({load[axis] for load in own}) > 1:
            caption = f"Tokens per second, and milliseconds to the first token, by {words}"
            found.append(draw_plot(f"by-{axis}", caption, 3.2, _by_load, (own, axis, words), panels=2))
    return found


def _by_load(speed: Axes, first: Axes, data: tuple[Sequence[Results], str, str]) -> None:
    from matplotlib.ticker import MaxNLocator

    loads, axis, words = data
    for number, plain in enumerate((False, True)):
        own = sorted((load for load in loads if load["plain"] is plain), key=lambda load: load[axis])
        if not own:
            continue
        name, at = "plain" if plain else "as served", [load[axis] for load in own]
        speed.plot(at, [load["tokens_per_second"] for load in own], "o-", color=SERIES[number], label=name)
        for percentile, style in (("p50", "o-"), ("p90", "o:")):
            values = [(load["first_token_ms"] or {}).get(percentile, float("nan")) for load in own]
            first.plot(at, values, style, color=SERIES[number], label=f"{name}, {percentile}")
    for axes, label in ((speed, "tokens per second"), (first, "ms to the first token")):
        axes.set_xlabel(words)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=axis == "concurrency"))
    legend_below(first, 4)
