"""The files of a report: every section is there, the page needs nothing else, and its figures are those of the run."""

import csv
import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from specdec.bench import backends, read_suite, results, run, write_report
from specdec.bench.figures import Speedup
from specdec.bench.report import group_plots, number, report_html, short
from tests.bench.fakes import reported

SECTIONS = ("summary", "overview", "settings", "provenance", "definitions")
PLOTS = ("speedup", "categories", "acceptance", "sweep", "split")
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Checks that what is opened is closed, and collects ids, outside addresses and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "srcset") and not (value or "").startswith("#"):
                self.addresses.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def found(folders: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run with a sweep, two categories, two temperatures, and a draft in a backend of its own.

    The last schedule says no length, beside some that do: a report could not put them in order.
    """
    root = tmp_path_factory.mktemp("run")
    target, draft = folders
    (root / "p.jsonl").write_text("".join(f'{{"category": "{c}", "turns": ["{c}{c}xx"]}}\n' for c in ("aa", "bb")))
    schedules = [{"schedule": "constant", "num_assistant_tokens": [1, 3]}, "constant"]
    shared = {"temperatures": [0, 0.7], "prompts": str(root / "p.jsonl"), "max_new_tokens": 12, "repeats": 1}
    mode = {"modes": [{"draft_options": {"backend": "packed"}}]}
    suite = read_suite({"name": "<tiny>", "targets": target, "drafts": draft, "schedules": schedules, **mode, **shared})
    return results(run(suite, root / "out"))


@pytest.fixture(scope="module")
def folder(found: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    assert write_report(found, folder) == folder / "report.html"
    return folder


def test_the_page(found: dict[str, Any], folder: Path) -> None:
    """Sections, pictures and key figures; nothing from outside, nothing undefined, names escaped."""
    html = (folder / "report.html").read_text(encoding="utf-8")
    page = Page(html)
    assert page.open == page.addresses == []
    assert not re.search(r"url\(\s*['\"]?http|@import|<script", html)
    assert set(page.ids) >= {*SECTIONS, *(f"group-{n}-{plot}" for n in (1, 2) for plot in PLOTS)}
    assert "<tiny>" in page.text
    assert "<tiny>" not in html
    assert all(sentence in page.text for sentence in found["summary"])
    for words in ("peak", "p99", "identical", "Theorem 3.8", "flags", "threads"):
        assert words in page.text
    assert found["fingerprint"] in page.text
    assert page.text.count("eager, draft packed") == 6
    assert "nan" not in re.findall(r"[a-z]+", page.text)
    for group in found["groups"]:
        for system in group["systems"]:
            assert f"{system['ms_per_token']:.2f}" in page.text
            assert number(system["token_ms"]["p99"]) in page.text
        assert [backends(system) for system in group["systems"]] == ["eager", *["eager, draft packed"] * 3]
        assert [sweep["k"] for sweep in group["sweeps"]] == [[1, 3]]


def test_every_picture_is_a_file_too(folder: Path) -> None:
    """PNG, as wide as the page."""
    found = {path.name: path.read_bytes() for path in folder.glob("*.png")}
    assert found.keys() == {*(f"group-{n}-{plot}.png" for n in (1, 2) for plot in PLOTS)}
    for content in found.values():
        assert content.startswith(b"\x89PNG")
        assert int.from_bytes(content[16:20], "big") > 1000


def test_the_table(found: dict[str, Any], folder: Path) -> None:
    """One line per system, with the figures of `results.json`."""
    rows = list(csv.DictReader(io.StringIO((folder / "results.csv").read_text())))
    systems = [system for group in found["groups"] for system in group["systems"]]
    assert [row["system"] for row in rows] == [system["name"] for system in systems]
    for row, system in zip(rows, systems, strict=True):
        assert float(row["ms_per_token"]) == system["ms_per_token"]
        assert row["state"] == (system["speedup"]["state"] if system["speedup"] else "")
        assert (row["backend"], row["draft_backend"]) == (system["backend"], system["draft_backend"] or "")
        assert float(row["request_ms_p90"]) == system["request_ms"]["p90"]


def test_the_split_adds_up(found: dict[str, Any]) -> None:
    """Draft, verify, select and overhead are all of a token's milliseconds."""
    for group in found["groups"]:
        for system in group["systems"]:
            assert sum(system["split_ms_per_token"].values()) == pytest.approx(system["ms_per_token"])


def test_what_is_wrong_is_told(found: dict[str, Any]) -> None:
    """A loss in words; differences and failures in sections, with position, tokens and gap; a search's is a dash."""
    plain, one, *_ = found["groups"][0]["systems"]
    loss = {**one, "name": "snail", "speedup": reported(Speedup(0.5, 0.4, 0.6))}
    groups = [{**found["groups"][0], "systems": [plain, loss]}]
    where = {"group": "g", "system": "s", "batch": 1, "repeat": 0, "row": 2}
    mismatches = [
        {**where, "position": 17, "plain": 5, "other": None, "gap": 0.125, "excuse": None},
        {**where, "position": 18, "plain": 5, "other": 6, "gap": None, "excuse": "row-dependent"},
    ]
    failures = [{"group": "g", "system": "s", "error": "OSError: <gone>"}]
    html = report_html({**found, "mismatches": mismatches, "failures": failures, "groups": groups}, [[]])
    page = Page(html)
    assert {"mismatches", "failures"} <= set(page.ids)
    for words in ("17", "ended", "0.1250", "DIFFERS", "OSError: <gone>"):
        assert words in page.text
    assert "<td>–</td><td>row-dependent</td>" in html
    assert "snail: assistance is SLOWER here: 0.50×" in page.text
    assert 'class="slower"' in html


def test_the_plot_of_positions_has_chains_only(found: dict[str, Any]) -> None:
    """A draft whose trees have no positions is not in its legend; its constant length is. (A name without a line.)"""
    plain, one, *_ = found["groups"][0]["systems"]
    tree = {**one, "name": "tree, cost", "draft": "tree", "acceptance_by_position": []}
    fastest = {**one, "name": "fast, cost", "speedup": {**one["speedup"], "value": 99.0}, "acceptance_by_position": []}
    rare = {**one, "name": "rare, cost", "draft": "rare"}
    rare["acceptance_by_position"] = [{"drafted": 1, "tested": 1, "accepted": 1}]
    group = {**found["groups"][0], "systems": [plain, one, tree, fastest, rare], "sweeps": []}
    [svg] = [plot.svg for plot in group_plots(group, "g") if plot.name == "g-acceptance"]
    assert f"<!-- {short(one['name'])} -->" in svg
    assert all(name not in svg for name in ("tree, cost", "fast, cost", "rare, cost"))
    none = group_plots({**group, "systems": [plain, rare]}, "g")
    assert any("no position was drafted in 5 rounds" in plot.svg for plot in none)
