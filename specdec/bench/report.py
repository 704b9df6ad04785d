"""Writes a run's results: `results.json`, a CSV table, plots by matplotlib, and one self-contained HTML page."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.bench.figures import PredictedSpeedup
from specdec.bench.results import Results, as_csv, backends

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PAGE = Path(__file__).parent / "report.html.j2"
_FEW = 6  # groups that are shown unfolded

INK, RULE = "#1c2126", "#c8ced5"  # the page replaces them by its own
THEMED = {INK: "var(--ink)", RULE: "var(--rule)"}
# Okabe and Ito's palette, which colour-blind readers can distinguish; lines also differ by marker.
SERIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8d7f5c", "#7a78c9")
MARKERS = "os^Dv*PX"
REST = "#8b95a3"
STATES = {"faster": SERIES[0], "slower": SERIES[4], "same": REST, "unknown": REST}
# Part of the time -> label and colour.
SPLIT = {
    "draft": ("the draft's passes", SERIES[1]),
    "verify": ("the target's passes", SERIES[0]),
    "select": ("choosing tokens", SERIES[6]),
    "overhead": ("all else", REST),
}
CAPTIONS = {
    "speedup": "Speedup over plain decoding, with 95% intervals; grey where it may be chance",
    "categories": "Speedup by category of prompts, each draft with its fastest schedule",
    "acceptance": "Accepted share by position in the draft (chains only; constant lengths show every draft)",
    "sweep": "Speedup by constant draft length: measured, and predicted from acceptance and cost",
    "split": "Where the milliseconds of a token go",
}
WIDTH = 8.2  # inches
_ROW = 0.29  # inches of a bar
_LONGEST = 46  # characters of a label
_ENOUGH = 5  # rounds that drafted a position, for it to be shown


def write_report(found: Results, folder: Path) -> Path:
    """Writes all files into `folder`; returns the page's path."""
    plots = [group_plots(group, f"group-{n}") for n, group in enumerate(found["groups"], 1)]
    (folder / "results.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "results.csv").write_text(as_csv(found), encoding="utf-8")
    for plot in chain.from_iterable(plots):
        (folder / f"{plot.name}.png").write_bytes(plot.png)
    page = folder / "report.html"
    page.write_text(report_html(found, plots), encoding="utf-8")
    return page


def report_html(found: Results, plots: list[list[Plot]]) -> str:
    """The page, with the plots of every group."""
    import yaml
    from jinja2 import Environment, StrictUndefined

    groups = list(zip(found["groups"], plots, strict=True))
    suite = yaml.safe_dump(found["suite"], sort_keys=False, allow_unicode=True)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number, "backends": backends}
    page = environment.from_string(_PAGE.read_text(encoding="utf-8"))
    return page.render(found=found, groups=groups, unfolded=len(groups) <= _FEW, suite=suite)


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A figure with `digits` decimals, or a dash for None."""
    return "–" if value is None else f"{value:.{digits}f}{unit}"


@dataclass(frozen=True)
class Plot:
    """One plot in both formats."""

    name: str
    caption: str
    png: bytes
    svg: str


def group_plots(group: Results, stem: str) -> list[Plot]:
    """The plots of one group for which it has data."""
    systems = group["systems"]
    cells = [system for system in systems if system["speedup"]]
    best = leaders(cells)
    kinds = best if any(len(system["categories"]) > 1 for system in best) else []
    tall = _ROW * (1.2 + len(kinds)) * len(kinds[0]["categories"]) / 1.4 + 1.1 if kinds else 0.0
    chains = leaders([system for system in cells if system["acceptance_by_position"]])
    plots: list[tuple[str, float, Callable[[Axes, Any], None], list[Results]]] = [
        ("speedup", _ROW * len(cells) + 0.9, _speedups, cells),
        ("categories", tall, _categories, kinds),
        ("acceptance", 3.1, _acceptance, chains),
        ("sweep", 3.3, _sweep, group["sweeps"]),
        ("split", _ROW * len(systems) + 1.2, _split, systems),
    ]
    return [
        draw_plot(f"{stem}-{name}", CAPTIONS[name], height, draw, data) for name, height, draw, data in plots if data
    ]


def leaders(cells: Sequence[Results]) -> list[Results]:
    """The fastest cell of each draft."""
    drafts = dict.fromkeys(cell["draft"] for cell in cells)
    of_draft = ([cell for cell in cells if cell["draft"] == draft] for draft in drafts)
    return [max(own, key=lambda cell: float(cell["speedup"]["value"])) for own in of_draft]


def draw_plot(name: str, caption: str, height: float, draw: Callable[[Axes, Any], None], data: Any) -> Plot:
    """A plot of this height in inches, drawn without global state."""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {
        "font.size": 9,
        "text.parse_math": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "svg.hashsalt": name,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
        **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), RULE),
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure.add_subplot(), data)
        return Plot(name, caption, _saved(figure, "png"), themed(_saved(figure, "svg").decode()))


def _saved(figure: Figure, kind: str) -> bytes:
    out = io.BytesIO()
    how: dict[str, Any] = {"facecolor": "white", "dpi": 150} if kind == "png" else {"transparent": True}
    figure.savefig(out, format=kind, metadata={"Date": None} if kind == "svg" else None, **how)
    return out.getvalue()


def themed(svg: str) -> str:
    """The SVG as an element of the page: without prologue or size, in the page's colours."""
    svg = svg[svg.index("<svg") :]
    for colour, variable in THEMED.items():
        svg = svg.replace(colour, variable)
    tag, bracket, rest = svg.partition(">")
    return re.sub(r' (width|height)="[^"]*"', "", tag) + bracket + rest


def short(label: str) -> str:
    """The first and last characters of a long label."""
    if len(label) <= _LONGEST:
        return label
    head = _LONGEST // 2
    return f"{label[:head]}…{label[head + 1 - _LONGEST :]}"


def _named(axes: Axes, names: Sequence[str]) -> None:
    """Labels horizontal bars, the first on top."""
    axes.set_yticks(range(len(names)), [short(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def _speedups(axes: Axes, cells: list[Results]) -> None:
    found = [cell["speedup"] for cell in cells]
    values = [s["value"] for s in found]
    ends = [s["value"] if s["high"] is None else s["high"] for s in found]
    axes.barh(range(len(cells)), values, 0.62, color=[STATES[s["state"]] for s in found], edgecolor="white")
    axes.errorbar(values, range(len(cells)), xerr=_spread(found), fmt="none", ecolor=INK, elinewidth=1, capsize=2)
    axes.axvline(1, color=INK, linewidth=1, linestyle=(0, (4, 2)))
    for place, (end, s) in enumerate(zip(ends, found, strict=True)):
        slower = " (slower)" if s["state"] == "slower" else ""
        axes.annotate(
            f"{s['value']:.2f}×{slower}", (max(end, 1), place), (5, 0), textcoords="offset points", va="center"
        )
    _named(axes, [cell["name"] for cell in cells])
    axes.set_xlim(0, 1.2 * max(1.0, *ends))
    axes.set_xlabel("times plain decoding's speed")


def _categories(axes: Axes, cells: list[Results]) -> None:
    names = list(cells[0]["categories"])
    thick = 0.8 / len(cells)
    for n, cell in enumerate(cells):
        places = [i + (n - (len(cells) - 1) / 2) * thick for i in range(len(names))]
        values = [cell["categories"].get(name, 0.0) for name in names]
        axes.barh(places, values, 0.9 * thick, color=SERIES[n % len(SERIES)], label=short(cell["name"]))
    axes.axvline(1, color=INK, linewidth=1, linestyle=(0, (4, 2)))
    _named(axes, names)
    axes.set_xlabel("times plain decoding's speed")
    legend_below(axes, len(cells))


def _acceptance(axes: Axes, cells: list[Results]) -> None:
    from matplotlib.ticker import MaxNLocator

    deepest = 0
    for n, cell in enumerate(cells):
        places = [place for place in cell["acceptance_by_position"] if place["drafted"] >= _ENOUGH]
        shares = [place["accepted"] / place["drafted"] for place in places]
        deepest = max(deepest, len(places))
        if places:  # else the legend would name a draft without a line
            axes.plot(range(1, len(places) + 1), shares, **_style(n, cell["name"]))
    axes.set(
        xlabel="position in the draft",
        ylabel="accepted / drafted there",
        ylim=(0, 1.04),
        xlim=(0.5, max(deepest, 1) + 0.5),
    )
    if not deepest:
        words = f"no position was drafted in {_ENOUGH} rounds"
        axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend_below(axes, len(cells))


def _sweep(axes: Axes, sweeps: list[Results]) -> None:
    for n, sweep in enumerate(sweeps):
        found, style = sweep["measured"], _style(n, sweep["draft"], ", measured")
        axes.errorbar(sweep["k"], [s["value"] for s in found], yerr=_spread(found), capsize=3, **style)
    for n, sweep in enumerate(sweeps):
        if sweep["theory"]:
            theory, lengths = PredictedSpeedup(**sweep["theory"]), range(1, max(sweep["k"]) + 1)
            label = f"{short(sweep['draft'])}, predicted"
            axes.plot(lengths, list(map(theory.speedup, lengths)), "--", color=SERIES[n % len(SERIES)], label=label)
    axes.axhline(1, color=INK, linewidth=1, linestyle=(0, (4, 2)))
    axes.set(xlabel="drafted tokens per round", ylabel="times plain decoding's speed", ylim=(0, None))
    legend_below(axes, 2)


def _spread(found: Sequence[Results]) -> list[list[float]]:
    """Lengths of the intervals below and above the values; 0 without an interval."""
    return [
        [0.0 if s["low"] is None else max(s["value"] - s["low"], 0.0) for s in found],
        [0.0 if s["high"] is None else max(s["high"] - s["value"], 0.0) for s in found],
    ]


def _split(axes: Axes, systems: list[Results]) -> None:
    left = [0.0] * len(systems)
    for part, (name, colour) in SPLIT.items():
        values = [max(system["split_ms_per_token"][part], 0.0) for system in systems]
        axes.barh(range(len(systems)), values, 0.62, left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, values, strict=True)]
    for place, whole in enumerate(left):
        axes.annotate(f"{whole:.2f}", (whole, place), (4, 0), textcoords="offset points", va="center")
    _named(axes, [system["name"] for system in systems])
    axes.set_xlim(0, 1.12 * max(left))
    axes.set_xlabel("milliseconds per new token")
    legend_below(axes, len(SPLIT))


def legend_below(axes: Axes, count: int) -> None:
    axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=min(count, 4), fontsize=8)


def _style(n: int, name: str, ending: str = "") -> dict[str, Any]:
    """How the `n`-th line is drawn and labelled."""
    marker = {"marker": MARKERS[n % len(MARKERS)], "markersize": 4}
    return {"color": SERIES[n % len(SERIES)], "label": f"{short(name)}{ending}", **marker}
