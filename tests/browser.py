"""A real browser for tests of pages; they are skipped where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@contextmanager
def launched(*flags: str) -> Iterator[Any]:
    """Debian's chromium without a window, as playwright has it."""
    api = pytest.importorskip("playwright.sync_api", reason="the extra `test` is not installed: no playwright")
    if BROWSER is None:
        pytest.skip("there is no chromium: apt install chromium")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", *flags])
        yield opened
        opened.close()
