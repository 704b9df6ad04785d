"""The recording of `specdec demo`: `docs/assets/demo.svg`, an animation of what a terminal showed.

    python docs/make/demo.py             # from docs/make/demo.cast
    python docs/make/demo.py --record    # runs the demo first; half a minute on an idle machine

The cast is of asciinema's format, version 2, with nothing but text and colours. Where nothing may move, the picture is
the last screen.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
CAST, PICTURE = HERE / "demo.cast", HERE.parent / "assets" / "demo.svg"
COMMAND = ["specdec", "demo"]
COLUMNS, ROWS = 104, 26
PAUSE, REST = 1.0, 5.0  # seconds: the longest wait that is shown, and how long the last screen stays
CELL, LINE, EDGE = 8.4, 19, 16  # pixels
COLOURS = {"1": "#ffffff", "2": "#8b949e", "32": "#56d364", "34": "#6cb6ff"}  # by the codes that the demo writes
TEXT, GROUND = "#d5dbe3", "#161b22"
LABEL = "A terminal: the bundled target writes a function alone, then with its draft, whose tokens are green; {}"


class Piece(NamedTuple):
    """Text of one colour on one line, and the second at which it appears."""

    seconds: float
    row: int
    column: int
    text: str
    colour: str


def record() -> str:
    """Runs the demo in a terminal of its own and returns the cast."""
    ours, theirs = pty.openpty()
    where = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "specdec", *COMMAND[1:], "--quiet"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=where)
    os.close(theirs)
    events, began = [json.dumps({"version": 2, "width": COLUMNS, "height": ROWS, "idle_time_limit": PAUSE})], None
    waiting = b""
    while chunk := _read(ours):
        began = began or time.monotonic()
        text, waiting = _decoded(waiting + chunk)
        events.append(json.dumps([round(time.monotonic() - began, 3), "o", text], ensure_ascii=False))
    if process.wait():
        raise SystemExit("the demo failed: run `specdec demo`")
    return "\n".join(events) + "\n"


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # how Linux says that the other end is closed
        return b""


def _decoded(chunk: bytes) -> tuple[str, bytes]:
    """The text, and the bytes of a letter that is not complete yet."""
    for end in range(len(chunk), max(len(chunk) - 4, 0), -1):
        try:
            return chunk[:end].decode(), chunk[end:]
        except UnicodeDecodeError:
            continue
    return "", chunk


def pieces(cast: str) -> Iterator[Piece]:
    """What appears where and when; the command stands in the first line."""
    yield Piece(0.0, 0, 0, "$ " + " ".join(COMMAND), COLOURS["1"])
    row, column, colour = 1, 0, TEXT
    seconds = before = 0.0
    for line in cast.splitlines()[1:]:
        at, _, text = json.loads(line)
        seconds, before = seconds + min(at - before, PAUSE), at
        for part in re.split(r"(\x1b\[[\d;]*m|\r?\n)", text):
            if part.startswith("\x1b"):
                code = part[2:-1].split(";")[-1]
                colour = COLOURS.get(code, TEXT)
            elif part in ("\n", "\r\n"):
                row, column = row + 1, 0
            else:
                while part:
                    fits, part = part[: COLUMNS - column], part[COLUMNS - column :]
                    yield Piece(seconds, row, column, fits, colour)
                    column += len(fits)
                    if part:
                        row, column = row + 1, 0


def picture(cast: str) -> str:
    """The animation: pieces appear, and lines move up, at the times of the cast."""
    found = list(pieces(cast))
    length = found[-1].seconds + REST
    moves: dict[int, float] = {}  # lines that have left -> since when
    for piece in found:
        if piece.text.strip():
            moves.setdefault(max(0, piece.row - ROWS + 1), piece.seconds)
    gone = max(moves)
    shown = [piece for piece in found if piece.text.strip()]
    times = sorted({piece.seconds for piece in shown} - {0.0})
    width, height = COLUMNS * CELL + 2 * EDGE, ROWS * LINE + 2 * EDGE
    rules = [
        f"@keyframes t{n}{{0%,{100 * at / length:.2f}%{{opacity:0}}{100 * at / length + 0.01:.2f}%{{opacity:1}}}}"
        f".t{n}{{animation-name:t{n}}}"
        for n, at in enumerate(times)
    ]
    steps = "".join(f"{100 * at / length:.2f}%{{transform:translateY({-LINE * by}px)}}" for by, at in moves.items())
    rules.append(f"@keyframes up{{{steps}}}")
    body = [
        f'<text x="{EDGE + piece.column * CELL:.1f}" y="{EDGE + piece.row * LINE + 14}" fill="{piece.colour}"'
        f' textLength="{len(piece.text) * CELL:.1f}"'
        + (f' class="t{times.index(piece.seconds)}"' if piece.seconds else "")
        + f">{escape(piece.text)}</text>"
        for piece in shown
    ]
    style = (
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre}"
        f".up{{transform:translateY({-LINE * gone}px)}}"
        "@media (prefers-reduced-motion:no-preference){"
        f"text,.up{{animation-duration:{length:.2f}s;animation-iteration-count:infinite;animation-timing-function:step-end}}"
        f".up{{animation-name:up}}{''.join(rules)}}}"
    )
    label = escape(LABEL.format(found[-1].text.strip()))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
        f'height="{height}" role="img" aria-label="{label}">\n<style>{style}</style>\n'
        f'<rect width="100%" height="100%" rx="8" fill="{GROUND}"/>\n'
        f'<clipPath id="screen"><rect width="100%" y="{EDGE}" height="{ROWS * LINE + 4}"/></clipPath>\n'
        f'<g clip-path="url(#screen)"><g class="up">\n' + "\n".join(body) + "\n</g></g>\n</svg>\n"
    )


def main() -> None:
    """Writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="run the demo again")
    if parser.parse_args().record:
        CAST.write_text(record(), encoding="utf-8")
    PICTURE.write_text(picture(CAST.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
