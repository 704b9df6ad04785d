"""What becomes of each generative class of transformers: the table of `docs/reference/models.md`, made by trying them.

    python -m docs.make.families             # minutes; needs the extra `test` and a C++ compiler
    python -m docs.make.families CLASS …     # these lines alone

Each class is built tiny and random, and its texts are compared with those of `model.generate`. A test makes the table
again and compares.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from docs.make.compatibility import filled
from tests.families import BACKENDS, Verdict, classes, verdicts
from tests.tiny import threads

PAGE = Path(__file__).parents[1] / "reference" / "models.md"
NAME = "families"
_PROCESSES = 2
_CACHES = {"kv": "", "replay": ", native cache", "none": ", no cache"}


def be_quiet() -> None:
    """Leaves out what tiny models log; for processes that only do this."""
    logging.getLogger("specdec").setLevel(logging.ERROR)
    set_verbosity_error()
    disable_progress_bar()


def tried(names: Iterable[str]) -> dict[str, dict[str, Verdict]]:
    """The verdicts of these classes, by name and backend."""
    kinds = classes()
    with warnings.catch_warnings(), threads(1):
        warnings.simplefilter("ignore")
        return {name: verdicts(kinds[name]) for name in names}


def all_tried() -> dict[str, dict[str, Verdict]]:
    """The verdicts of all classes, in two processes."""
    names = list(classes())
    with ProcessPoolExecutor(_PROCESSES, get_context("spawn"), be_quiet) as pool:
        found: dict[str, dict[str, Verdict]] = {}
        for part in pool.map(tried, [names[start::_PROCESSES] for start in range(_PROCESSES)]):
            found |= part
    return {name: found[name] for name in names}


def lines(found: Mapping[str, Mapping[str, Verdict]]) -> dict[str, str]:
    """What the table says of each class: the cells before its name."""
    return {name: " | ".join(_cells(name, *by_backend.values())) for name, by_backend in found.items()}


def lines_of(page: str) -> dict[str, str]:
    """What the table in a page says of each class."""
    part = page.partition(f"<!-- made: {NAME} -->")[2].partition("<!-- /made -->")[0]
    rows = re.findall(r"^\| (.*) \| ((?:`\w+`[, ]*)+) \|$", part, re.MULTILINE)
    return {name: cells for cells, names in rows for name in re.findall(r"\w+", names)}


def with_table(page: str, rows: Mapping[str, str]) -> str:
    """The page with a table of these classes; those of one verdict share a row, and most come first."""
    groups: dict[str, list[str]] = {}
    for name in sorted(rows):
        groups.setdefault(rows[name], []).append(f"`{name}`")
    head = [_line(*BACKENDS, "classes"), _line(*["---"] * (len(BACKENDS) + 1))]
    body = [_line(cells, ", ".join(names)) for cells, names in sorted(groups.items(), key=lambda one: -len(one[1]))]
    return filled(page, {NAME: "\n".join([*head, *body])})


def _cells(name: str, *verdicts: Verdict) -> list[str]:
    if verdicts[0].kind.startswith("not ") and len({*verdicts}) == 1:
        verdicts = (verdicts[0], *[Verdict("", "")] * (len(verdicts) - 1))
    return [_cell(name, *verdict) for verdict in verdicts]


def _cell(name: str, kind: str, words: str) -> str:
    if kind in ("equal", "as its forward"):
        return f"{kind}{_CACHES[words]}"
    words = words.replace(f"{name} ", "", 1).replace("|", "\\|").replace("<", "&lt;")
    return f"{kind}: {words}" if words else ""


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    be_quiet()
    page = PAGE.read_text(encoding="utf-8")
    names = sys.argv[1:]
    rows = {**lines_of(page), **lines(tried(names))} if names else lines(all_tried())
    PAGE.write_text(with_table(page, rows), encoding="utf-8")
