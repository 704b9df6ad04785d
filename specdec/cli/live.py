"""`specdec transcribe` of sound that comes while it runs: standard input, a microphone."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from signal import SIGTERM
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console

from specdec.cli.show import CONTROLS, write
from specdec.cli.terminal import Interrupt, is_quiet, remark
from specdec.errors import OptionError, SpecdecError

if TYPE_CHECKING:
    from specdec.pipelines import Transcriber, Transcription
    from specdec.pipelines.speech.live import Heard

RATE = 16_000  # samples per second of raw sound, unless --rate says otherwise
WHOLE = ("demo", "resume", "chunk_length")  # flags for recordings that are whole
_ERASE = "\r\x1b[K"


def source_of(params: Mapping[str, Any]) -> str | None:
    """The flag that names sound that comes, or None; raises OptionError for other flags that contradict it."""
    sources = [source for source in ("stdin", "microphone") if params[source]]
    if len(sources) > 1:
        raise OptionError("--stdin and --microphone are sound that comes: leave one of them out")
    source = next(iter(sources), None)
    if params["rate"] is not None and source != "stdin":
        raise OptionError("--rate is of the raw sound that --stdin reads: pass --stdin")
    if source is None:
        return None
    if params["files"]:
        raise OptionError(f"--{source} is sound that comes, and files were named besides: leave one of them out")
    if whole := [flag.replace("_", "-") for flag in WHOLE if params[flag]]:
        raise OptionError(f"--{whole[0]} is for whole recordings: leave it out, or --{source}")
    if source == "microphone":
        from specdec.pipelines.speech.sources import microphone_library

        microphone_library()
    return source


def transcribe_live(
    transcriber: Transcriber, options: Mapping[str, Any], params: Mapping[str, Any]
) -> tuple[Transcription, SpecdecError | None]:
    """Shows what is heard, until the sound ends or Ctrl-C; the whole, and the error that ended the sound."""
    from specdec.pipelines.speech.sources import arriving, microphone_library, recorded, streamed

    live, screen = transcriber.live(**options), _Screen(params)
    fault: SpecdecError | None = None
    if params["microphone"]:
        blocks = recorded(microphone_library(), live.rate)
    else:
        stdin = sys.stdin.buffer
        blocks = streamed(getattr(stdin, "raw", stdin), live.rate, params["rate"] or RATE)
    remark("listening; Ctrl-C ends the sound", "dim")
    with Interrupt(SIGTERM) as interrupt:
        try:
            for block in arriving(blocks, lambda: interrupt.is_set):
                live.hear(block)
                while live.is_due and not interrupt.is_set:
                    screen(next(live))
        except SpecdecError as error:
            fault = error
        live.end()
        for heard in live:
            screen(heard)
    screen.close()
    return live.result(), fault


class _Screen:
    """Final text on stdout: in JSON lines with the text that may change, else as plain text, unless it goes elsewhere.

    On terminals a final piece is a line, and the text that may change is the last line.
    """

    def __init__(self, params: Mapping[str, Any]) -> None:
        self._kind = None if params["output_dir"] else params["format"][0]
        self._out, err = Console(), Console(stderr=True)
        self._width = err.width if err.is_terminal and not is_quiet() else 0
        self._text = self._printed = ""

    def __call__(self, heard: Heard) -> None:
        self._line("")
        if self._kind == "json":
            event = {"type": "final" if heard.final else "partial", "text": heard.final or heard.partial}
            write(self._out, json.dumps(event, ensure_ascii=False) + "\n")
        elif self._kind == "text":
            self._text += heard.final
            if piece := self._text.strip()[len(self._printed) :]:
                self._printed += piece
                write(self._out, f"{piece.strip()}\n" if self._out.is_terminal else piece)
        self._line(heard.partial)

    def close(self) -> None:
        """Ends the text."""
        self._line("")
        if self._kind == "text" and not self._out.is_terminal:
            write(self._out, "\n")

    def _line(self, text: str) -> None:
        """The end of a text in place of the terminal's last line."""
        if not self._width:
            return
        text = " ".join(text.split()).translate(CONTROLS)
        while cell_len(text) >= self._width:
            text = text[1:]
        sys.stderr.write(_ERASE + text)
        sys.stderr.flush()
