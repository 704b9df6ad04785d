"""The libraries of the `bench` extra, asked for before anything is measured."""

from __future__ import annotations

from importlib.util import find_spec

from specdec.errors import SpecdecError

NAMES = ("scipy", "matplotlib", "jinja2")


def check_extras() -> None:
    """Raises SpecdecError where a library is missing that the statistics or the report need."""
    missing = [name for name in NAMES if find_spec(name) is None]
    if missing:
        raise SpecdecError(f"the benchmark needs {', '.join(missing)}: pip install -e '.[bench]'")
