"""Prints text as it streams, finished texts, the table of statistics; makes the JSON report."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from specdec.cli.request import CommandRequest
from specdec.cli.terminal import BROKEN_PIPE, abandon_stdout, in_flags, notes_after, say
from specdec.options.versions import versions

if TYPE_CHECKING:
    from specdec.core.stats import Stats
    from specdec.generator.generation import Event, Generation

ACCEPTED, TARGET, PROMPT = Style(color="green"), Style(), Style(dim=True)
MARKS = "⟦{}⟧"
_FIGURES = (
    *("num_new_tokens", "num_target_passes", "num_draft_rounds", "num_draft_tokens", "num_accepted_draft_tokens"),
    *("mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "target_passes_per_token"),
    *("first_token_seconds", "loading_seconds", "tokens_per_second", "seconds"),
    *("draft_seconds", "verify_seconds", "select_seconds", "other_seconds"),
    *("per_round_drafted", "per_round_accepted", "exactness"),
)
# Escape sequences that a model may write, and a terminal must not obey.
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def write(out: Console, text: str, style: Style = TARGET) -> None:
    """Writes text without wrapping or markup: styled on a terminal, elsewhere byte for byte."""
    try:
        if out.is_terminal:
            segments = Segments([Segment(text.translate(CONTROLS), style)])
            out.print(segments, end="", crop=False, no_wrap=True, overflow="ignore")
        else:
            out.file.write(text)
        out.file.flush()
    except BrokenPipeError:
        abandon_stdout()
        raise typer.Exit(BROKEN_PIPE) from None  # the parser would report a BrokenPipeError


def has_colours(out: Console) -> bool:
    return out.color_system is not None and not out.no_color


class Printer:
    """Writes one row's text as it streams; `show_draft` distinguishes the draft's tokens from the target's.

    `cut_before`: the strings of the call's options. `marks`: the draft's tokens are marked where colours are missing.
    """

    def __init__(
        self, out: Console, tokenizer: Any, *, show_draft: bool, marks: bool = True, cut_before: Sequence[str] = ()
    ) -> None:
        from specdec.generator.tokenizers import Detokenizer

        self._out, self._pieces = out, Detokenizer(tokenizer, cut_before)
        self._show_draft = show_draft
        self._marks = marks and not has_colours(out)

    def follow(self, events: Generator[Event, None, Generation]) -> Generation:
        """Writes a stream and a line end, then the notes made meanwhile; returns the stream's result."""
        with notes_after():
            accepted = False
            while True:
                try:
                    event = next(events)
                except StopIteration as end:
                    if self._show_draft:
                        self._write(self._pieces.push([], last=True), accepted=accepted)
                    write(self._out, "\n")
                    result: Generation = end.value
                    return result
                if self._show_draft:
                    drafts, targets = event.token_ids[: event.accepted], event.token_ids[event.accepted :]
                    self._write(self._pieces.push(drafts), accepted=True)
                    self._write(self._pieces.push(targets))
                    accepted = not targets
                else:
                    self._write(event.text)

    def _write(self, text: str, *, accepted: bool = False) -> None:
        if text and accepted and self._marks:
            text = MARKS.format(text)
        write(self._out, text, ACCEPTED if accepted else TARGET)


def print_text(text: str, heading: str | None) -> None:
    """Prints a text and a line end, under its heading if there is one."""
    out = Console()
    if heading is not None:
        write(out, f"── {heading} ──\n", PROMPT)
    write(out, f"{text}\n")


def report(result: Mapping[str, Any], request: CommandRequest, stats: Stats) -> None:
    """Prints a result as JSON, with statistics, the models, how they were loaded, and the options of decoding."""
    names = {"target": request.target, "draft": request.draft}
    settings = {**names, **request.loading, "options": request.options, **stats.settings}
    write_json({**result, "stats": {name: getattr(stats, name) for name in _FIGURES}, "settings": settings})


def write_json(result: Mapping[str, Any]) -> None:
    """Prints one object, with the versions of the software."""
    write(Console(), json.dumps({**result, "versions": versions()}, ensure_ascii=False) + "\n")


def show_stats(stats: Stats) -> None:
    """Prints the table of --stats on stderr, and a warning where other programs use the cores."""
    say(in_flags(str(stats)))
    warn_if_busy()


def warn_if_busy() -> None:
    """Prints on stderr that torch's threads wait for cores that other programs use, if they do."""
    from specdec.bench.machine import FEWER_THREADS, waiting_threads

    if (waiting := waiting_threads()) is not None:
        say(f"busy machine: {waiting}: {FEWER_THREADS}")
