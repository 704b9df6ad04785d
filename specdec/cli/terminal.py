"""Exit codes, lines on stderr, spinners and bars, Ctrl-C."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from math import inf
from pathlib import Path
from threading import Event, Thread
from typing import Any

from rich import progress
from rich.console import Console
from rich.table import Column
from rich.text import Text

# MISMATCH: an assisted text differs from the plain text. The last two are 128 + the number of the signal.
OK, FAILED, USAGE, MISMATCH, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 3, 130, 141
_SECONDS = 10.0  # from one line of progress to the next
_STDERR = 2  # the file descriptor
_OPTION = re.compile(r"`(\w+)=(?:True|'?(\w*)'?)`")

EXAMPLES = {
    "batch": "specdec batch prompts.txt answers.jsonl --model zoo:python-code --max-new-tokens 32",
    "bench": "specdec bench zoo:python-code --draft zoo:python-code --count 2 --max-new-tokens 32 --out bench-demo",
    "chat": "specdec chat HuggingFaceTB/SmolLM2-1.7B-Instruct --draft HuggingFaceTB/SmolLM2-135M-Instruct",
    "demo": "specdec demo --sample --seed 3",
    "doctor": "specdec doctor zoo:python-code",
    "generate": "specdec generate zoo:python-code -p 'def mean(values):' --show-draft --stats",
    "pack": "specdec pack zoo:python-code packed --quantization int8-weight",
    "serve": "specdec serve --demo",
    "summarize": "specdec summarize --demo --stats",
    "transcribe": "specdec transcribe --demo --format srt --output-dir subtitles",
    "zoo": "specdec zoo",
}
"""An example for the help of each command; all but the example of `chat` work offline."""


def fail(message: str, code: int) -> int:
    """Prints the error in one red line; returns the exit code."""
    say(" ".join(message.split()), "red")
    return code


def in_flags(message: str) -> str:
    """The message with an option in Python's words, `name=` or `name='value'`, as a flag."""
    return _OPTION.sub(lambda option: f"--{option[1].replace('_', '-')} {option[2] or ''}".rstrip(), message)


def say(message: str, style: str = "") -> None:
    """Prints a line on stderr, without markup or wrapping."""
    Console(stderr=True).print(message, style=style, markup=False, highlight=False, soft_wrap=True)


def remark(message: str, style: str = "") -> None:
    """Prints a line on stderr unless the command is to be quiet."""
    if not is_quiet():
        say(message, style)


def is_quiet() -> bool:
    """Whether nothing but errors and results is printed."""
    return _Notes.quiet


def hush() -> None:
    """Prints no progress, no notes and no warnings any more, until the context of `notes` ends."""
    _Notes.quiet = True
    logging.getLogger("specdec").setLevel(logging.NOTSET)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as 1:02:03 or 2:03."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}" if minutes >= 60 else f"{minutes}:{second:02}"


class _Notes(logging.Handler):
    """Prints the library's log as lines on stderr, each once; `later` holds the lines while a text is printed.

    A record with the attribute `doing` says what the `bar` of loading waits for.
    """

    quiet = False
    later: list[str] | None = None
    bar: Bar | None = None

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if _Notes.bar is not None and (doing := getattr(record, "doing", "")):
            _Notes.bar(0, 0, doing)
        line = f"note: {in_flags(record.getMessage())}"
        if line in self._lines:
            return
        self._lines.add(line)
        if _Notes.later is None:
            remark(line, "dim")
        else:
            _Notes.later.append(line)


@contextmanager
def notes_after() -> Iterator[None]:
    """Prints the notes of the context at its end, not in the middle of its text."""
    _Notes.later = lines = list[str]()
    try:
        yield
    finally:
        _Notes.later = None
        for line in lines:
            remark(line, "dim")


@contextmanager
def notes() -> Iterator[None]:
    """Prints the library's log from INFO on within the context, unless `hush` is called in it."""
    log = logging.getLogger("specdec")
    before, level, propagates = log.handlers[:], log.level, log.propagate
    log.addHandler(_Notes())
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        _Notes.quiet = False
        log.handlers, log.propagate = before, propagates
        log.setLevel(level)


def abandon_stdout() -> None:
    """Discards all further output, also the exiting interpreter's: stdout has lost its reader."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def libraries_silenced() -> Iterator[None]:
    """Discards what C libraries write on stderr by themselves, such as mpg123's notes; Python's lines appear."""
    before, screen = sys.stderr, os.dup(_STDERR)
    with Path(os.devnull).open("w") as nowhere, os.fdopen(screen, "w", buffering=1, errors="replace") as out:
        os.dup2(nowhere.fileno(), _STDERR)
        if before is sys.__stderr__:
            sys.stderr = out
        try:
            yield
        finally:
            os.dup2(screen, _STDERR)
            sys.stderr = before


@contextmanager
def loading(message: str, *, quiet: bool = False, downloads: bool = False) -> Iterator[None]:
    """Shows progress on stderr: a spinner, a bar for loading, the hub's bars for downloads; nothing if quiet."""
    quiet = quiet or is_quiet()
    if quiet:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # a hub that cannot be reached is one error
    if not downloads:
        with _weights(message, quiet=quiet):
            yield
        return
    Console(stderr=True, quiet=quiet).print(message, style="dim", markup=False, highlight=False)
    _hush_transformers()
    try:
        yield
    except KeyboardInterrupt:
        say("downloaded files stay in the cache: run the same command to resume")
        raise


@contextmanager
def _weights(message: str, *, quiet: bool) -> Iterator[None]:
    """A bar over weights that are loaded, rounded or packed; without a terminal a line now and then."""
    with Bar(message, quiet=quiet) as notify:

        def counted(parts: Iterable[Any]) -> Iterator[Any]:
            total = len(parts) if isinstance(parts, Sized) else 0
            for number, part in enumerate(parts, 1):
                yield part
                notify(number, total, message)

        def follow(make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return make(counted(args[0]), *args[1:], **kwargs) if args else make(**kwargs)

        logging = _hush_transformers()
        before, _Notes.bar = logging.set_tqdm_hook(follow), notify
        try:
            yield
        finally:
            logging.set_tqdm_hook(before)
            _Notes.bar = None


def _hush_transformers() -> Any:
    """Silences the log and the bars of transformers; returns its logging module."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return logging


class _TimeLeft(progress.TimeRemainingColumn):
    """The time left; nothing without a total."""

    def render(self, task: progress.Task) -> Text:
        text = super().render(task)
        return text.append(" left") if text else text


class Bar(progress.Progress):
    """A bar on stderr with the time left; without a terminal a line every `_SECONDS`. Call it after each step.

    A new total is another part of the work, with its own pace; with `grows` it is more of the same work. With `stages`
    a line says without a terminal, too, what begins. The bar is there within the context, which may be entered again.
    """

    def __init__(self, doing: str = "", *, quiet: bool = False, grows: bool = False, stages: bool = False) -> None:
        description = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # share and times stay visible beside it
        super().__init__(
            progress.TaskProgressColumn(),
            progress.BarColumn(bar_width=12),
            _TimeLeft(),
            progress.TextColumn("{task.description}", markup=False, table_column=description),
            console=Console(stderr=True, quiet=quiet or is_quiet()),
            speed_estimate_period=inf,
            transient=True,
            expand=True,
        )
        self.disable = not self.console.is_terminal
        self.add_task(doing, total=None)
        self._grows, self._stages, self._over = grows, stages, Event()
        self._began = self._last_line = self.get_time()

    def __call__(self, done: float, total: float, doing: str) -> None:
        """`done` of `total` steps are done, and the next step is `doing`."""
        [task] = self.tasks
        if task.total is None or done < task.completed or not (self._grows or total == task.total):
            self.reset(task.id, completed=-1)  # so that the pace is measured from here, at 0 steps too
        task.total, task.finished_time = total or None, None  # more of the work may have come
        begins = doing != task.description
        self._began = self.get_time() if begins else self._began
        self.update(task.id, completed=done, description=doing)
        if self.console.is_terminal or self.console.quiet or not total:
            return
        if not (begins and self._stages) and self.get_time() - self._last_line < _SECONDS:
            return
        self._last_line, seconds = self.get_time(), task.time_remaining if done < total else None
        say(f"{done / total:.0%}{'' if seconds is None else f', about {duration(seconds)} left'}: {doing}")

    def start(self) -> None:
        super().start()
        self._over = Event()
        if not (self.console.is_terminal or self.console.quiet):
            Thread(target=self._watch, args=(self._over,), daemon=True).start()

    def stop(self) -> None:
        self._over.set()
        super().stop()

    def _watch(self, over: Event) -> None:
        """Prints a line every `_SECONDS` while a step takes longer."""
        while not over.wait(1.0):
            if (now := self.get_time()) - self._last_line >= _SECONDS and (doing := self.tasks[0].description):
                self._last_line = now
                say(f"{doing}: {duration(now - self._began)} so far")


class Interrupt:
    """Ctrl-C within the context as a stopping criterion: the call ends with its next token; a second Ctrl-C raises
    KeyboardInterrupt. `signals` are other signals that count as Ctrl-C, and `notice` is a line for the first of them.
    """

    reason = "interrupted"

    def __init__(self, *signals: int, notice: str = "") -> None:
        self.is_set, self._signals, self._notice = False, (signal.SIGINT, *signals), notice

    def __enter__(self) -> Interrupt:
        self._before = [(number, signal.signal(number, self.set)) for number in self._signals]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> bool:
        return self.is_set

    def set(self, *_: object) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
        if self._notice:
            say(self._notice)
