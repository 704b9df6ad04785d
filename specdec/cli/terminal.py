"""What all commands share: exit codes, lines on stderr, spinners, Ctrl-C, and two flags."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

# 0 ok, 1 runtime error, 2 usage, 3 the assisted text differs from the plain one; the last two as a shell reports them.
OK, FAILED, USAGE, MISMATCH, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 3, 130, 141

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no warnings on stderr.")]


def is_beside(arguments: Sequence[str]) -> bool:
    """Whether another process of the same job says what there is to say."""
    return os.environ.get("RANK", "0") != "0" and any(one.startswith("--tp-plan") for one in arguments)


def fail(message: str, code: int) -> int:
    """Says in one red line what went wrong, and returns the exit code."""
    say(" ".join(message.split()), "red")
    return code


def say(message: str, style: str = "") -> None:
    """A line on stderr, as it is."""
    Console(stderr=True).print(message, style=style, markup=False, highlight=False, soft_wrap=True)


class Heartbeat:
    """Where no bar can be drawn, a line on stderr now and then: how much is done, and about how long the rest takes."""

    def __init__(self, *, quiet: bool, seconds: float = 20.0) -> None:
        self._silent = quiet or Console(stderr=True).is_terminal
        self._seconds = seconds
        self._began = self._last = time.monotonic()
        self._before: float | None = None

    def __call__(self, done: float, total: float, doing: str) -> None:
        """Told of every step; what was done at the first one was done before."""
        now = time.monotonic()
        self._before = done if self._before is None else self._before
        if self._silent or now - self._last < self._seconds or not total:
            return
        self._last, made = now, done - self._before
        left = f", about {duration((total - done) * (now - self._began) / made)} left" if made > 0 else ""
        say(f"{done / total:.0%}{left}: {doing}")


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


class _Notes(logging.Handler):
    """What the library has to say beside warnings, as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"note: {record.getMessage()}", "dim")


@contextmanager
def notes(*, quiet: bool) -> Iterator[None]:
    """Shows the library's own log from INFO on while it is open."""
    log, handler = logging.getLogger("specdec"), _Notes(logging.INFO)
    level = log.level
    if not quiet:
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def abandon_stdout() -> None:
    """The reader has left: nothing more may be written, not even by the interpreter on its way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def loading(message: str, *, quiet: bool, downloads: bool = False) -> Iterator[None]:
    """A spinner on stderr, if that is a terminal; where files may come over the network, the hub's own bars instead."""
    err = Console(stderr=True, quiet=quiet)
    if quiet:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if downloads:
        err.print(message, style="dim", markup=False, highlight=False)
        _hush_transformers()
        yield
        return
    with err.status(message):
        _hush_transformers()
        yield


def _hush_transformers() -> None:
    """No log lines and no weight-loading bars between the data and the progress."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


class Interrupt:
    """Ctrl-C as a stopping criterion: the call ends with the next token and keeps its text; a second Ctrl-C kills."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> bool:
        return self.asked

    def ask(self, *_: object) -> None:
        """The signal handler."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def stop_on_interrupt() -> Iterator[Interrupt]:
    """Hears Ctrl-C while it is open."""
    interrupt = Interrupt()
    before = signal.signal(signal.SIGINT, interrupt.ask)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
