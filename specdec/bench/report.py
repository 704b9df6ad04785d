"""Writes a run's results: `results.json`, a CSV table, PNG plots, and one self-contained HTML page."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

from specdec.bench.plots import Plot, group_plots
from specdec.bench.results import Results, as_csv, backends

_PAGE = Path(__file__).parent / "report.html.j2"
_FEW = 6  # groups that are shown unfolded


def write_report(found: Results, folder: Path) -> Path:
    """Writes all files into `folder`; returns the page's path."""
    plots = [group_plots(group, f"group-{n}") for n, group in enumerate(found["groups"], 1)]
    (folder / "results.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "results.csv").write_text(as_csv(found), encoding="utf-8")
    for plot in chain.from_iterable(plots):
        (folder / f"{plot.name}.png").write_bytes(plot.png)
    page = folder / "report.html"
    page.write_text(as_html(found, plots), encoding="utf-8")
    return page


def as_html(found: Results, plots: list[list[Plot]]) -> str:
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
