"""The `specdec` command: its entry point, `generate`, and what becomes of an error."""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from specdec.cli.bench import bench, tune
from specdec.cli.load import load
from specdec.cli.pair import demo, zoo_app
from specdec.cli.request import DEFAULT_NEW_TOKENS, METHODS, read_prediction, read_prompt, read_request
from specdec.cli.show import Printer, print_texts, report, stats_table, write
from specdec.cli.summarize import summarize
from specdec.cli.terminal import (
    BROKEN_PIPE,
    FAILED,
    INTERRUPTED,
    OK,
    USAGE,
    Debug,
    Quiet,
    abandon_stdout,
    fail,
    say,
    stop_on_interrupt,
)
from specdec.cli.transcribe import transcribe
from specdec.errors import OptionError, SpecdecError

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, help="Speculative decoding: the same text, in fewer passes."
)


def main() -> None:
    """The entry point of the `specdec` command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code; errors become one line on stderr, unless --debug is given."""
    debug = "--debug" in arguments
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning(quiet="--quiet" in arguments or "-q" in arguments)
        try:
            code = app(list(arguments), prog_name="specdec", standalone_mode=False)
            sys.stdout.flush()
            if code == INTERRUPTED:  # where a command did not catch it, the parser did, and was silent
                say("interrupted")
            return code if isinstance(code, int) else OK
        except SystemExit as leaving:
            return leaving.code if isinstance(leaving.code, int) else FAILED
        except (KeyboardInterrupt, typer.Abort):
            say("interrupted")
            return INTERRUPTED
        except BrokenPipeError:
            abandon_stdout()
            return BROKEN_PIPE
        except Exception as error:
            if debug:
                traceback.print_exc()
            return fail(*_explain(error))


def _explain(error: Exception) -> tuple[str, int]:
    """One line about an error, and the exit code for it."""
    message = getattr(error, "format_message", None)
    if message is not None:  # the parser's own
        return f"error: {message()}", USAGE
    if isinstance(error, OptionError):
        return f"error: {error}", USAGE
    if isinstance(error, SpecdecError):
        return f"error: {error}", FAILED
    return f"error: {type(error).__name__}: {error} (--debug shows where)", FAILED


def _show_warning(*, quiet: bool) -> Any:
    def show(message: Warning | str, *_: object, **__: object) -> None:
        if not quiet:
            say("warning: " + " ".join(str(message).split()), "yellow")

    return show


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Debug = False,
) -> None:
    """Speculative decoding: the same text, in fewer passes over the model's weights."""
    if version:
        from specdec import __version__

        print(f"specdec {__version__}")
    elif ctx.invoked_subcommand is None:
        print(ctx.get_help())
    else:
        return
    raise typer.Exit


@app.command()
def generate(
    ctx: typer.Context,
    target: Annotated[
        str | None, typer.Argument(help="Hub id, folder, or zoo:NAME (specdec zoo lists them); may come from --config.")
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The text to continue; - reads stdin.")] = None,
    prediction: Annotated[
        str | None, typer.Option(metavar="FILE", help="Text that the answer may resemble, for drafts that copy.")
    ] = None,
    draft_model: Annotated[str | None, typer.Option(help="A smaller model: hub id, folder, or zoo:NAME.")] = None,
    method: Annotated[
        str | None, typer.Option(help=f"{METHODS}. auto: draft if there is a draft model, else suffix.")
    ] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="Most tokens to draft per round.")] = None,
    num_draft_branches: Annotated[
        int | None, typer.Option(help="Let a draft model guess trees: so many nodes go on at every depth.")
    ] = None,
    schedule: Annotated[str | None, typer.Option(help="heuristic, constant, confidence or cost.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help=f"Length limit, {DEFAULT_NEW_TOKENS} if nothing sets one.")
    ] = None,
    sample: Annotated[
        bool | None, typer.Option("--sample/--greedy", help="Draw tokens, or take the likeliest.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Implies --sample, like the next three.")] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    sampling: Annotated[str | None, typer.Option(help="coupled, match, rejection or block.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of sampling; without it a fresh one, which --json tells.")] = None,
    num_return_sequences: Annotated[int | None, typer.Option(help="How many samples.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeatable.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 …; auto, the default, is the checkpoint's.")
    ] = None,
    quantization: Annotated[str | None, typer.Option(help="int8, int8-weight, nf4 or fp4.")] = None,
    device_map: Annotated[str | None, typer.Option(help="cpu, cuda, auto …")] = None,
    max_memory: Annotated[
        list[str] | None, typer.Option(metavar="DEVICE=SIZE", help="Most memory, as in cpu=2GiB; repeatable.")
    ] = None,
    offload: Annotated[str | None, typer.Option(help="cpu or disk: read weights from there in every pass.")] = None,
    offload_folder: Annotated[str | None, typer.Option(help="For weights that must be written again.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the target on the hub.")] = None,
    draft_dtype: Annotated[str | None, typer.Option(help="The same for the draft; by default the target's.")] = None,
    draft_quantization: Annotated[str | None, typer.Option(help="The same for the draft.")] = None,
    draft_revision: Annotated[str | None, typer.Option(help="The same for the draft.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML: target, draft, method and options. Flags win.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other option of generate; repeatable.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="A table of statistics on stderr.")] = False,
    show_draft: Annotated[
        bool, typer.Option("--show-draft", help="Colour what came from the draft; without colours, mark it ⟦so⟧.")
    ] = False,
    stream: Annotated[bool, typer.Option(help="Print text as it comes.")] = True,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with a model.")
    ] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Continue a prompt with TARGET, helped by a draft; the text is TARGET's own."""
    request = read_request(ctx.params)
    text, expected = read_prompt(prompt), read_prediction(prediction, request.method)
    generator = load(request, quiet=quiet)
    live = stream and not json_ and request.options.get("num_return_sequences", 1) == 1
    with stop_on_interrupt() as interrupt:
        call: dict[str, Any] = {**request.options, "stopping_criteria": [interrupt], "prediction": expected}
        if live:
            printer = Printer(Console(), generator.tokenizer, show_draft=show_draft)
            out = printer.follow(generator.stream(text, **call))
        else:
            out = generator.generate(text, **call)
    if json_:
        found = report(out, request, interrupted=interrupt.asked)
        write(Console(), json.dumps(found, ensure_ascii=False) + "\n")
    elif not live:
        print_texts(out.texts or [])
    if stats and out.stats is not None:
        Console(stderr=True).print(stats_table(out.stats, interrupted=interrupt.asked))
    return INTERRUPTED if interrupt.asked else OK


app.command()(demo)
app.command()(bench)
app.command()(tune)
app.command()(summarize)
app.command()(transcribe)
app.add_typer(zoo_app, name="zoo")
