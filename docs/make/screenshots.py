"""Pictures of the report of `specdec bench` and of the server's page: `docs/assets/report.png` and `server.png`.

    python docs/make/screenshots.py            # both, some minutes; or one of them: report, server
    python docs/make/screenshots.py report --folder bench-code     # of a run that is there

Needs the extras `test` and `serve`, and Debian's `chromium`. The models are the bundled pairs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image
from playwright.sync_api import expect, sync_playwright

ASSETS = Path(__file__).parents[1] / "assets"
SPECDEC = [sys.executable, "-m", "specdec"]
BENCH = ["bench", "zoo:python-code", "--draft", "zoo:python-code", "--draft", "suffix", "--count", "8"]
PROMPT = "for name in names:\n"
TOKENS = 64
SIZES = {"report": (1000, 1180), "server": (1120, 700)}
MOST, COLOURS = 150_000, 256  # bytes and colours of a picture
UNUSED = ("quic", "background-networking", "component-update", "sync")  # parts of the browser


def report(folder: Path | None) -> None:
    """The beginning of a report; without a folder the pair is measured first."""
    with TemporaryDirectory() as scratch, page("report") as opened:
        if folder is None:
            folder = Path(scratch) / "bench"
            subprocess.run([*SPECDEC, *BENCH, "--max-new-tokens", "64", "--out", str(folder)], check=True)
        opened.goto((folder / "report.html").absolute().as_uri())
        save(opened, "report")


def server() -> None:
    """The page after an answer."""
    with serving() as url, page("server") as opened:
        opened.goto(url)
        expect(opened.locator("#state")).to_have_text("ready")
        opened.select_option("#model", "python-code")
        opened.fill("#prompt", PROMPT)
        opened.fill("[name=max_tokens]", str(TOKENS))
        opened.click("#send")
        expect(opened.locator("#measure")).to_be_enabled(timeout=120_000)
        save(opened, "server")


@contextmanager
def serving() -> Iterator[str]:
    """The address of `specdec serve --demo`."""
    command = [*SPECDEC, "serve", "--demo", "--port", "0"]
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


@contextmanager
def page(name: str) -> Iterator[Any]:
    """An empty page of the picture's size, in a browser of its own."""
    flags = ["--no-sandbox", "--disable-gpu", "--no-first-run", *(f"--disable-{part}" for part in UNUSED)]
    width, height = SIZES[name]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=which("chromium"), args=flags)
        yield browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
        browser.close()


def save(opened: Any, name: str) -> None:
    """What the window shows, as a PNG of few colours."""
    path = ASSETS / f"{name}.png"
    Image.open(BytesIO(opened.screenshot())).convert("RGB").quantize(COLOURS).save(path, optimize=True)
    assert path.stat().st_size < MOST, f"{path} has {path.stat().st_size:,} bytes"


def main() -> None:
    """Makes what is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="|".join(SIZES), help="both by default")
    parser.add_argument("--folder", type=Path, help="of a run of `specdec bench`")
    args = parser.parse_args()
    names = args.names or SIZES
    if "report" in names:
        report(args.folder)
    if "server" in names:
        server()


if __name__ == "__main__":
    main()
