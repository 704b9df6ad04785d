"""`specdec chat`: a conversation in the terminal, or one message a line from a pipe."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console
from typer import Argument, Context

from specdec.cli import flags
from specdec.cli.request import (
    ANSWER_TOKENS,
    DRAFT_OPTIONS,
    CommandRequest,
    are_here,
    load_with_spinner,
    not_utf8,
    read_request,
)
from specdec.cli.show import Printer, show_stats
from specdec.cli.terminal import OK, Interrupt, loading, say
from specdec.errors import OptionError, SpecdecError
from specdec.options.drafts import read_draft
from specdec.options.load import Loading

if TYPE_CHECKING:
    from specdec.core.stats import Stats
    from specdec.generator.generator import SpecGenerator

COMMANDS = "/draft NAME (as --draft: suffix, a model, suffix+MODEL, none, …), /stats, /reset, /help, /quit"


@flags.takes(
    "draft num_draft_tokens schedule sample temperature top_k top_p",
    "dtype quantization gguf_file backend exactness device_map offload offload_folder trust_remote_code prefix_cache",
    "activations memory config set_ stats quiet",
)
def chat(
    ctx: Context,
    target: str | None = Argument(
        None, metavar="TARGET", help="Hub id, folder or GGUF file of a chat model; may come from --config."
    ),
    system: str | None = flags.flag("System message.", metavar="TEXT"),
    max_new_tokens: int | None = flags.flag(
        f"Length limit of an answer; {ANSWER_TOKENS} if nothing sets one.", "--max-new-tokens", "-n"
    ),
    seed: int | None = flags.flag("Seed of sampling; random by default."),
    *,
    stats: bool,
) -> int:
    """Talk to a chat model; the draft's tokens are coloured. Ctrl-C stops an answer, Ctrl-D leaves.

    /draft NAME changes the draft, /stats shows statistics, /reset forgets the conversation, /help lists the commands,
    /quit leaves.
    """
    request = read_request(ctx.params, new_tokens=ANSWER_TOKENS)
    if request.options.get("num_return_sequences", 1) > 1:
        raise OptionError("`num_return_sequences`: a conversation has one answer a turn: leave it out")
    check_template(request)
    talk = Conversation(load_with_spinner(request), request.options, system)
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        with suppress(ImportError):
            __import__("readline")  # edits lines
        say(COMMANDS, "dim")
    while (line := _line(at_terminal=at_terminal)) is not None:
        try:
            if not talk.turn(line):
                break
            if stats and not line.startswith("/"):
                talk.show_stats()
        except SpecdecError as error:
            if not at_terminal:
                raise
            say(f"error: {error}", "red")
    return OK


def check_template(request: CommandRequest) -> None:
    """Raises OptionError for a target without a chat template, before its weights are read."""
    with loading(f"loading the tokenizer of {request.target}"):
        from specdec.generator.tokenizers import tokenizer_beside

        how, _ = Loading.split({name: value for name, value in request.loading.items() if name != "draft_options"})
        tokenizers = (tokenizer_beside(request.target, reads_media=media, **how.beside) for media in (False, True))
        if not any(getattr(tokenizer, "chat_template", None) for tokenizer in tokenizers):
            way_out = "name a chat model, or continue texts with specdec generate"
            raise OptionError(f"`TARGET` {request.target!r} has no chat template: {way_out}")


class Conversation:
    """The messages so far, and the generator and the options of the next answer."""

    def __init__(self, generator: SpecGenerator, options: dict[str, Any], system: str | None) -> None:
        self._generator, self._options = generator, options
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.messages = [*self._first]
        self._stats: Stats | None = None

    def turn(self, line: str) -> bool:
        """Answers a message or obeys a command; False for the command that leaves."""
        command, _, argument = line.partition(" ")
        match command:
            case "/quit":
                return False
            case "/reset":
                self.messages = [*self._first]
            case "/help":
                say(COMMANDS)
            case "/stats":
                self.show_stats()
            case "/draft":
                if not argument.strip():
                    raise OptionError("/draft needs a name, as --draft has: suffix, a model, suffix+MODEL or none")
                self._change_draft(argument.strip())
            case str() if command.startswith("/"):
                raise OptionError(f"{command} is none of the commands {COMMANDS}")
            case _ if line.strip():
                self._answer(line)
        return True

    def show_stats(self) -> None:
        if self._stats is None:
            return say("no answer was written yet")
        show_stats(self._stats)

    def _change_draft(self, draft: str) -> None:
        """Loads the draft of the next answers; raises, and changes nothing, if the draft cannot be used."""
        read_draft(draft, "/draft")
        options = {name: value for name, value in self._options.items() if name not in DRAFT_OPTIONS}
        options["assistant_model"] = draft
        with loading(f"loading {draft}", downloads=not are_here(None, draft)):
            self._generator.submit(messages=[{"role": "user", "content": "-"}], **options)  # checked and not run
        self._options = options

    def _answer(self, message: str) -> None:
        messages = [*self.messages, {"role": "user", "content": message}]
        cut_before = self._generator.options(**self._options).cut_before
        printer = Printer(Console(), self._generator.tokenizer, show_draft=True, marks=False, cut_before=cut_before)
        with Interrupt() as interrupt:
            call = {**self._options, "stopping_criteria": [interrupt]}
            out = printer.follow(self._generator.stream(messages=messages, **call))
        self._stats = out.stats
        self.messages = [*messages, {"role": "assistant", "content": (out.texts or [""])[0]}]


def _line(*, at_terminal: bool) -> str | None:
    """The next line; None at the end. Ctrl-C discards what was typed."""
    while True:
        try:
            line = input("> " if at_terminal else "")
            line.encode()  # raises for bytes that are no text
            return line
        except EOFError:
            return None
        except UnicodeError as error:
            raise not_utf8("standard input", error) from None
        except KeyboardInterrupt:
            if not at_terminal:
                raise
            print()
