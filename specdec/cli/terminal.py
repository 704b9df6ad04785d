"""Exit codes, lines on stderr, spinners and bars, Ctrl-C."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

# MISMATCH: an assisted text differs from the plain one. The last two are 128 + the number of the signal.
OK, FAILED, USAGE, MISMATCH, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 3, 130, 141

EXAMPLES = {
    "batch": "specdec batch prompts.txt answers.jsonl --model zoo:python-code --max-new-tokens 32",
    "bench": "specdec bench zoo:python-code --draft zoo:python-code --count 2 --max-new-tokens 32 --out bench-demo",
    "chat": "specdec chat HuggingFaceTB/SmolLM2-1.7B-Instruct --draft-model HuggingFaceTB/SmolLM2-135M-Instruct",
    "compile": "specdec compile zoo:python-code --draft-model zoo:python-code",
    "demo": "specdec demo --sample --seed 3",
    "distill": "specdec distill zoo:python-code -o my-draft --text README.md --steps 20",
    "doctor": "specdec doctor zoo:python-code",
    "generate": "specdec generate zoo:python-code -p 'def mean(values):' --show-draft --stats",
    "serve": "specdec serve --demo",
    "summarize": "specdec summarize --demo --stats",
    "transcribe": "specdec transcribe --demo --format srt --output-dir subtitles",
    "zoo": "specdec zoo",
}
"""An example for the help of each command; all but that of `chat` work offline."""


def is_beside(arguments: Sequence[str]) -> bool:
    """Whether another process of the same job does the printing."""
    return os.environ.get("RANK", "0") != "0" and any(one.startswith("--tp-plan") for one in arguments)


def fail(message: str, code: int) -> int:
    """Prints the error in one red line; returns the exit code."""
    say(" ".join(message.split()), "red")
    return code


def say(message: str, style: str = "") -> None:
    """Prints a line on stderr, without markup or wrapping."""
    Console(stderr=True).print(message, style=style, markup=False, highlight=False, soft_wrap=True)


class Heartbeat:
    """Without a terminal: a line on stderr every `seconds`, with the share that is done and the time left.

    A new total starts another part of the work, with its own pace; with `grows` it is more of the same work.
    """

    def __init__(self, *, quiet: bool, seconds: float = 20.0, grows: bool = False) -> None:
        self._silent = quiet or Console(stderr=True).is_terminal
        self._seconds, self._grows = seconds, grows
        self._began = self._last = time.monotonic()
        self._before, self._total = 0.0, -1.0

    def __call__(self, done: float, total: float, doing: str) -> None:
        """Call it after each step; what is done at the first step of a part does not count for the pace."""
        now = time.monotonic()
        if self._total < 0 or (total != self._total and not self._grows):
            self._before, self._total, self._began = done, total, now
        if self._silent or now - self._last < self._seconds or not total:
            return
        self._last = now
        left = self.left(done, total, now)
        say(f"{done / total:.0%}{f', about {left} left' if left else ''}: {doing}")

    def left(self, done: float, total: float, now: float | None = None) -> str | None:
        """The time left at the pace so far; None before the first step."""
        made = done - self._before
        if made <= 0:
            return None
        return duration((total - done) * ((now or time.monotonic()) - self._began) / made)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


class _Notes(logging.Handler):
    """Prints the library's log as lines on stderr; `held` keeps the lines while a text is printed."""

    held: list[str] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        line = f"note: {record.getMessage()}"
        if _Notes.held is None:
            say(line, "dim")
        else:
            _Notes.held.append(line)


@contextmanager
def notes_after() -> Iterator[None]:
    """Prints the notes of the context at its end, not in the middle of its text."""
    held: list[str] = []
    _Notes.held = held
    try:
        yield
    finally:
        _Notes.held = None
        for line in held:
            say(line, "dim")


@contextmanager
def notes(*, quiet: bool) -> Iterator[None]:
    """Prints the library's log from INFO on within the context, nothing if quiet."""
    log, handler = logging.getLogger("specdec"), logging.NullHandler() if quiet else _Notes(logging.INFO)
    before, level, propagates = log.handlers[:], log.level, log.propagate
    log.addHandler(handler)  # without a handler, logging itself prints warnings
    if not quiet:
        log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.handlers, log.propagate = before, propagates
        log.setLevel(level)


def abandon_stdout() -> None:
    """Discards all further output, that of the exiting interpreter too: stdout has lost its reader."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Tries(logging.Filter):
    """Of the hub's tries, which log many lines, one line for the first that fails."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__()
        self._told = quiet

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "thrown while requesting" not in message and not message.startswith("Retrying in"):
            return True
        if not self._told:
            say("the hub does not answer: trying again for up to half a minute", "dim")
        self._told = True
        return False


@contextmanager
def loading(message: str, *, quiet: bool, downloads: bool = False) -> Iterator[None]:
    """A spinner on stderr, a bar while weights are loaded, the hub's own bars for downloads."""
    if quiet:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    hub, tries = logging.getLogger("huggingface_hub.utils._http"), _Tries(quiet=quiet)
    hub.addFilter(tries)
    try:
        if downloads:
            Console(stderr=True, quiet=quiet).print(message, style="dim", markup=False, highlight=False)
            _hush_transformers()
            yield
        else:
            with _weights(message, quiet=quiet):
                yield
    except KeyboardInterrupt:
        if downloads:
            say("downloaded files stay in the cache: run the same command to resume")
        raise
    finally:
        hub.removeFilter(tries)


@contextmanager
def _weights(message: str, *, quiet: bool) -> Iterator[None]:
    """A bar over the weights that transformers loads; without a terminal a line now and then."""
    with counting(message, quiet=quiet) as notify:

        def counted(parts: Iterable[Any]) -> Iterator[Any]:
            total = len(parts) if isinstance(parts, Sized) else 0
            for number, part in enumerate(parts, 1):
                yield part
                notify(number, total, message)

        def follow(make: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            return make(counted(given[0]), *given[1:], **named) if given else make(**named)

        logging = _hush_transformers()
        before = logging.set_tqdm_hook(follow)
        try:
            yield
        finally:
            logging.set_tqdm_hook(before)


def _hush_transformers() -> Any:
    """Silences the log and the bars of transformers; returns its logging module."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return logging


@contextmanager
def counting(doing: str = "", *, quiet: bool, grows: bool = False) -> Iterator[Callable[[float, float, str], None]]:
    """A bar on stderr with the time left, or a line now and then; yields `notify(done, total, doing)`."""
    with progress_bar(Console(stderr=True, quiet=quiet)) as bar:
        task, beat = bar.add_task(doing, total=None), Heartbeat(quiet=quiet, grows=grows)

        def notify(done: float, total: float, doing: str) -> None:
            bar.update(task, completed=done, total=total or None, description=doing)
            beat(done, total, doing)

        yield notify


class _TimeLeft(TimeRemainingColumn):
    """The time left; nothing without a total."""

    def render(self, task: Task) -> Text:
        found = super().render(task)
        return found.append(" left") if found else found


def progress_bar(console: Console) -> Progress:
    """A bar whose share and times stay visible beside a long description."""
    return Progress(
        TaskProgressColumn(),
        BarColumn(bar_width=12),
        _TimeLeft(),
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        expand=True,
    )


class Interrupt:
    """Ctrl-C as a stopping criterion: the call ends with its next token; a second Ctrl-C raises KeyboardInterrupt."""

    reason = "interrupted"

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> bool:
        return self.asked

    def ask(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def stop_on_interrupt() -> Iterator[Interrupt]:
    interrupt = Interrupt()
    before = signal.signal(signal.SIGINT, interrupt.ask)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
