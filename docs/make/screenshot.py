"""The picture of the server's page, `docs/assets/server.png`: `python docs/make/screenshot.py`.

Needs the extras `test` and `serve`, and Debian's `chromium`. The model is the bundled pair.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from shutil import which

from PIL import Image
from playwright.sync_api import expect, sync_playwright

PICTURE = Path(__file__).parents[1] / "assets" / "server.png"
PROMPT = "for name in names:\n"
TOKENS = 64
WINDOW = {"width": 1120, "height": 700}
MOST, COLOURS = 150_000, 256  # bytes and colours of the picture
UNUSED = ("quic", "background-networking", "component-update", "sync")  # parts of the browser


@contextmanager
def serving() -> Iterator[str]:
    """The address of `specdec serve --demo`."""
    command = [sys.executable, "-m", "specdec", "serve", "--demo", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                yield found[0]
                return
        raise SystemExit("the server does not start: run `specdec serve --demo`")
    finally:
        process.terminate()
        process.wait(60)


def main() -> None:
    """Saves the page after an answer, as a PNG of few colours."""
    flags = ["--no-sandbox", "--disable-gpu", "--no-first-run", *(f"--disable-{part}" for part in UNUSED)]
    with serving() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=which("chromium"), args=flags)
        page = browser.new_page(viewport=WINDOW, color_scheme="light")
        page.goto(url)
        expect(page.locator("#state")).to_have_text("ready")
        page.select_option("#model", "python-code")
        page.fill("#prompt", PROMPT)
        page.fill("[name=max_tokens]", str(TOKENS))
        page.click("#send")
        expect(page.locator("#measure")).to_be_enabled(timeout=120_000)
        shot = page.screenshot()
        browser.close()
    Image.open(BytesIO(shot)).convert("RGB").quantize(COLOURS).save(PICTURE, optimize=True)
    assert PICTURE.stat().st_size < MOST, f"{PICTURE} has {PICTURE.stat().st_size:,} bytes"


if __name__ == "__main__":
    main()
