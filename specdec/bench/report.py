"""Writes what a run came to: `results.json`, a CSV table, PNG plots, and one HTML page that needs nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specdec.bench.plots import Plot, group_plots, temperature_plots
from specdec.bench.results import Results, as_csv, backends

_TEMPLATES = Path(__file__).parent
_FEW = 6  # groups that are all shown unfolded


def write_report(found: Results, folder: Path) -> Path:
    """Writes all files into `folder` and returns the page's path."""
    over = temperature_plots(found["groups"])
    plots = [group_plots(group, f"group-{n}") for n, group in enumerate(found["groups"], 1)]
    (folder / "results.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "results.csv").write_text(as_csv(found), encoding="utf-8")
    for plot in [*over, *(plot for own in plots for plot in own)]:
        (folder / f"{plot.name}.png").write_bytes(plot.png)
    page = folder / "report.html"
    page.write_text(as_html(found, over, plots), encoding="utf-8")
    return page


def as_html(found: Results, over: list[Plot], plots: list[list[Plot]]) -> str:
    """The page: `over` are pictures of the whole, `plots` those of every group."""
    groups = list(zip(found["groups"], plots, strict=True))
    suite = _yaml(found["suite"])
    return render("report.html.j2", found=found, over=over, groups=groups, unfolded=len(groups) <= _FEW, suite=suite)


def render(name: str, **values: Any) -> str:
    """One of the room's templates with these values."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(_TEMPLATES)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = number
    environment.filters["backends"] = backends
    return environment.get_template(name).render(**values)


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A figure with so many digits after the point, or a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def _yaml(suite: Results) -> str:
    import yaml

    text: str = yaml.safe_dump(suite, sort_keys=False, allow_unicode=True)
    return text
