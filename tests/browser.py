"""A real browser for tests of pages; they are skipped where there is none."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
    BROWSER is None or find_spec("playwright") is None,
    reason="there is no chromium or no playwright: apt install chromium, and the extra `test`",
)


@contextmanager
def launched(*flags: str) -> Iterator[Any]:
    """Debian's chromium without a window, as playwright has it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", *flags])
        yield opened
        opened.close()
