"""The command line: `specdec demo`, `specdec generate`, `specdec zoo`. Stdout is data, stderr is everything else.

Exit codes: 0 ok, 1 runtime error, 2 usage, 3 the assisted text differs from the plain one, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table

from specdec.errors import OptionError, UnsupportedError

if TYPE_CHECKING:
    from specdec.generator import SpecGenerator
    from specdec.output import Generation
    from specdec.types import Stats
    from specdec.zoo.demo import Duel

OK, FAILED, USAGE, MISMATCH, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 3, 130, 141
DEFAULT_NEW_TOKENS = 128
METHODS = "auto, draft, ngram, suffix, early_exit:N, hybrid or none"

# Flag of `generate` -> option of the library.
FLAGS = {
    "num_draft_tokens": "num_assistant_tokens",
    "schedule": "schedule",
    "max_new_tokens": "max_new_tokens",
    "sample": "do_sample",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "sampling": "sampling",
    "seed": "seed",
    "num_return_sequences": "num_return_sequences",
    "stop": "stop_strings",
}
SAMPLING_FLAGS = ("temperature", "top_k", "top_p", "sampling")
# Options that name a draft of their own, and so take the place of --method.
DRAFT_OPTIONS = ("prompt_lookup_num_tokens", "assistant_early_exit")
CALL_ONLY = (*DRAFT_OPTIONS, "max_matching_ngram_size")
LATER_STRATEGIES = {"sample_and_rank": "sample-and-rank"}
STRATEGY_OPTIONS = ("strategy", "num_samples", "ranking")
LOADED = ("target", "draft", "method")

ACCEPTED, TARGET, PROMPT = Style(color="green"), Style(), Style(dim=True)
MARKS = "⟦{}⟧"
# A model may write escape sequences; a terminal must not obey them.
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, help="Speculative decoding: the same text, in fewer passes."
)
zoo_app = typer.Typer(help="The models that come with the package, and the recipe that made them.")
app.add_typer(zoo_app, name="zoo")

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no warnings on stderr.")]


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
            return code if isinstance(code, int) else OK
        except SystemExit as leaving:
            return leaving.code if isinstance(leaving.code, int) else FAILED
        except (KeyboardInterrupt, typer.Abort):
            return _fail("interrupted", INTERRUPTED)
        except BrokenPipeError:
            _abandon_stdout()
            return BROKEN_PIPE
        except Exception as error:
            if debug:
                traceback.print_exc()
            return _fail(*_explain(error))


def _abandon_stdout() -> None:
    """The reader has left: nothing more may be written, not even by the interpreter on its way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _explain(error: Exception) -> tuple[str, int]:
    """One line about an error, and the exit code for it."""
    message = getattr(error, "format_message", None)
    if message is not None:  # the parser's own
        return f"error: {message()}", USAGE
    if isinstance(error, OptionError):
        return f"error: {error}", USAGE
    if type(error).__module__.startswith("specdec"):
        return f"error: {error}", FAILED
    return f"error: {type(error).__name__}: {error} (--debug shows where)", FAILED


def _fail(message: str, code: int) -> int:
    _say(" ".join(message.split()), "red" if code != INTERRUPTED else "")
    return code


def _say(message: str, style: str = "") -> None:
    Console(stderr=True).print(message, style=style, markup=False, highlight=False, soft_wrap=True)


def _show_warning(*, quiet: bool) -> Any:
    def show(message: Warning | str, *_: object, **__: object) -> None:
        if not quiet:
            _say("warning: " + " ".join(str(message).split()), "yellow")

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


# ------------------------------------------------------------------------------------------------------------ generate


@app.command()
def generate(
    ctx: typer.Context,
    target: Annotated[
        str | None, typer.Argument(help="Hub id, folder, or zoo:python-code; may come from --config.")
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The text to continue; - reads stdin.")] = None,
    draft_model: Annotated[
        str | None, typer.Option(help="A smaller model: hub id, folder, or zoo:python-code.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help=f"{METHODS}. auto: draft if there is a draft model, else suffix.")
    ] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="Most tokens to draft per round.")] = None,
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
    device_map: Annotated[str | None, typer.Option(help="cpu, cuda, auto …")] = None,
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
    text = read_prompt(prompt)
    generator = load(request, quiet=quiet)
    printer = _printer(generator, request, ctx.params)
    with stop_on_interrupt() as interrupt:
        out = generator.generate(text, streamer=printer, stopping_criteria=[interrupt], **request.options)
    if printer is not None:
        printer.finish(out.stats)
    elif json_:
        print(json.dumps(report(out, request, interrupted=interrupt.asked), ensure_ascii=False))
    else:
        print_texts(out.texts or [])
    if stats and out.stats is not None:
        Console(stderr=True).print(stats_table(out.stats, interrupted=interrupt.asked))
    return _fail("interrupted", INTERRUPTED) if interrupt.asked else OK


@dataclass(frozen=True)
class Request:
    """What `generate` was asked to do, by flags and file: what to load, and the options of the call."""

    target: str
    draft: Any
    method: str
    options: dict[str, Any]
    loading: dict[str, Any]

    @property
    def draft_model(self) -> str | None:
        """The draft's model, where the method has one."""
        if self.method not in ("draft", "hybrid"):
            return None
        return str(self.draft[1] if isinstance(self.draft, tuple) else self.draft)


def read_request(params: Mapping[str, Any]) -> Request:
    """Flags over the file of --config, checked; raises OptionError before anything is loaded."""
    file = read_config(params["config"])
    target = params["target"] or file.get("target")
    if not target:
        raise OptionError("no target was named: pass TARGET, or a --config file with a `target`")
    if params["json_"] and params["show_draft"]:
        raise OptionError("--show-draft marks text on the screen and --json prints none: leave one of them out")
    options = read_options(params, {n: v for n, v in file.items() if n not in LOADED})
    if params["show_draft"] and options.get("num_return_sequences", 1) > 1:
        raise OptionError("--show-draft shows one text: leave out --num-return-sequences")
    method, draft = choose_draft(params, file, target, options)
    dtype = params["dtype"] or ("float32" if target.startswith("zoo:") else "auto")
    loading = {"dtype": dtype, "device_map": params["device_map"], "trust_remote_code": params["trust_remote_code"]}
    return Request(target, draft, method, options, loading)


def read_config(path: Path | None) -> dict[str, Any]:
    """The keys of a --config file; empty without one."""
    if path is None:
        return {}
    from specdec.config import REFUSED, Options, read_yaml

    file = read_yaml(path)
    known = {*LOADED, *Options.model_fields, *REFUSED, *CALL_ONLY, *STRATEGY_OPTIONS, "num_assistant_tokens_schedule"}
    if unknown := [name for name in file if name not in known]:
        raise OptionError(f"{path} has unknown keys: {', '.join(unknown)}")
    for name in LOADED:
        if not isinstance(file.get(name, ""), str):
            raise OptionError.of(name, f"text in {path}", file[name])
    return file


def read_options(params: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the call: flags and --set over the file's, with a length limit, and a seed for sampling."""
    from specdec.config import resolve

    flags = {name: params[flag] for flag, name in FLAGS.items() if params[flag] not in (None, [], ())}
    drawing = [flag for flag in SAMPLING_FLAGS if params[flag] is not None]
    if drawing and params["sample"] is False:
        raise OptionError(f"--{drawing[0].replace('_', '-')} is about sampling and --greedy forbids it: leave one out")
    if drawing:
        flags["do_sample"] = True
    extra = read_settings(params["set_"] or [])
    if both := sorted(flags.keys() & extra.keys()):
        raise OptionError(f"`{both[0]}` was set by its flag and by --set: pass one of them")
    options = _over(file, {**flags, **extra})
    refuse_later_strategies(options)
    if "max_new_tokens" not in options and "max_length" not in options:
        options["max_new_tokens"] = DEFAULT_NEW_TOKENS
    if resolve({n: v for n, v in options.items() if n not in CALL_ONLY}, {}).samples:
        options.setdefault("seed", secrets.randbits(32))
    return options


def _over(file: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` over `file`; what contradicts a given option by another name gives way, and null unsets."""
    rivals = [{"max_new_tokens", "max_length"}, {"schedule", "num_assistant_tokens_schedule"}]
    gone = {name for pair in rivals if pair & given.keys() for name in pair}
    if given.get("do_sample") is False:
        gone |= {"temperature", "top_k", "top_p", "sampling", "seed", "num_return_sequences"}
    merged = {**{n: v for n, v in file.items() if n not in gone}, **given}
    return {name: value for name, value in merged.items() if value is not None}


def read_settings(settings: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` pairs of --set, their values read as YAML."""
    import yaml

    found = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not name or not equals:
            raise OptionError.of("--set", "KEY=VALUE", setting)
        try:
            found[name.strip().replace("-", "_")] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise OptionError.of("--set", "KEY=VALUE with a value in YAML", setting) from None
    return found


def refuse_later_strategies(options: Mapping[str, Any]) -> None:
    """Raises UnsupportedError for a strategy of a later release, rather than decode in another way."""
    strategy = options.get("strategy")
    if strategy in LATER_STRATEGIES:
        raise UnsupportedError(
            f"{LATER_STRATEGIES[strategy]} is not available yet: leave out `strategy`, `num_samples` and "
            "`ranking`, and draw several texts with `num_return_sequences`"
        )


def choose_draft(
    params: Mapping[str, Any], file: Mapping[str, Any], target: str, options: Mapping[str, Any]
) -> tuple[str, Any]:
    """The method, and the draft as SpecGenerator takes it."""
    if own := [name for name in DRAFT_OPTIONS if name in options]:
        if params["method"] or params["draft_model"]:
            raise OptionError(f"`{own[0]}` names a draft, and so do --method and --draft-model: pass one of them")
        return own[0], None
    modelled = ("auto", "draft", "hybrid")
    from_file = file.get("method", "auto")
    if params["draft_model"] and from_file not in modelled:
        from_file = "auto"
    method: str = params["method"] or from_file
    model = params["draft_model"] or file.get("draft")
    if method not in modelled:
        if params["draft_model"]:
            raise OptionError(f"--method {method} uses no draft model: leave out --draft-model, or pass --method draft")
        return method, _draft_without_model(method)
    if model is None and target.startswith("zoo:"):
        model = target
    if model is None and method == "auto":
        return "suffix", "suffix"
    if model is None:
        raise OptionError(f"--method {method} needs a draft model: pass --draft-model")
    model = locate(model, "draft")
    return ("hybrid", ("suffix", model)) if method == "hybrid" else ("draft", model)


def _draft_without_model(method: str) -> str | None:
    layers = method.removeprefix("early_exit:")
    if method in ("ngram", "suffix") or (layers != method and layers.isdecimal()):
        return method
    if method == "none":
        return None
    raise OptionError.of("--method", METHODS, method)


def locate(name: str, role: str) -> str:
    """A model's folder where it comes with the package (`zoo:NAME`), else its id or folder as given."""
    if not name.startswith("zoo:"):
        return name
    from specdec import zoo

    return str(getattr(zoo.pair(name.removeprefix("zoo:")), role))


def read_prompt(prompt: str | None) -> str:
    """The prompt as given, or all of stdin."""
    if prompt is None:
        raise OptionError("no prompt was given: pass -p TEXT, or -p - to read stdin")
    return sys.stdin.read() if prompt == "-" else prompt


def load(request: Request, *, quiet: bool) -> SpecGenerator:
    """The generator, with a sign of life on stderr while its models are loaded."""
    target = locate(request.target, "target")
    models = [target, *([request.draft_model] if request.draft_model else [])]
    downloads = not all(Path(model).exists() for model in models)
    with loading(f"loading {request.target}", quiet=quiet, downloads=downloads):
        from specdec.generator import SpecGenerator

        return SpecGenerator.from_pretrained(target, request.draft, **request.loading)


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


# -------------------------------------------------------------------------------------------------------------- output


def write(out: Console, text: str, style: Style = TARGET) -> None:
    """Text as it is: no wrapping, no markup; on a terminal with its style, elsewhere byte for byte."""
    try:
        if out.is_terminal:
            segments = Segments([Segment(text.translate(CONTROLS), style)])
            out.print(segments, end="", crop=False, no_wrap=True, overflow="ignore")
        else:
            out.file.write(text)
        out.file.flush()
    except BrokenPipeError:
        _abandon_stdout()
        raise typer.Exit(BROKEN_PIPE) from None  # the parser would make it an error


def has_colours(out: Console) -> bool:
    """Whether colours reach the reader."""
    return out.color_system is not None and not out.no_color


class Printer:
    """A streamer that writes one row's text as it becomes certain, and can tell the draft's tokens from the target's.

    All tokens of a round but the last were accepted from the draft. The last is the target's own, except in the round
    that ends the text; so it waits until the next round, or the statistics, say which.
    """

    def __init__(self, out: Console, tokenizer: Any, *, show_draft: bool, marks: bool = True) -> None:
        from specdec.output import Detokenizer

        self._out, self._pieces = out, Detokenizer(tokenizer)
        self._show = show_draft
        self._marks = marks and not has_colours(out)
        self._waiting: list[int] | None = None  # None until the prompt has come
        self._accepted = 0

    def put(self, ids: Any) -> None:
        """Takes the prompt, then every round's tokens."""
        if self._waiting is None:
            self._waiting = []
            return
        tokens: list[int] = ids.tolist()
        if not self._show:
            self._write(tokens)
            return
        self._write(self._waiting)
        self._write(tokens[:-1], accepted=True)
        self._accepted += len(tokens) - 1
        self._waiting = tokens[-1:]

    def end(self) -> None:
        """Part of a streamer; the text is not over before `finish`."""

    def finish(self, stats: Stats | None) -> None:
        """The last token, whatever the tokenizer held back, and a line end."""
        accepted = stats is not None and stats.num_accepted_draft_tokens > self._accepted
        self._write(self._waiting or [], accepted=self._show and accepted, last=True)
        write(self._out, "\n")

    def _write(self, ids: Sequence[int], *, accepted: bool = False, last: bool = False) -> None:
        text = self._pieces.push(ids, last=last) if ids or last else ""
        if text and accepted and self._marks:
            text = MARKS.format(text)
        write(self._out, text, ACCEPTED if accepted else TARGET)


def _printer(generator: SpecGenerator, request: Request, params: Mapping[str, Any]) -> Printer | None:
    """The streamer for the screen, where a single text is to appear piece by piece."""
    several = request.options.get("num_return_sequences", 1) > 1
    if params["json_"] or several or not (params["stream"] or params["show_draft"]) or generator.tokenizer is None:
        return None
    return Printer(Console(), generator.tokenizer, show_draft=params["show_draft"])


def print_texts(texts: Sequence[str]) -> None:
    """One text as it is; several under numbered headings."""
    out = Console()
    for number, text in enumerate(texts, 1):
        if len(texts) > 1:
            write(out, f"── {number}/{len(texts)} ──\n", PROMPT)
        write(out, f"{text}\n")


def report(out: Generation, request: Request, *, interrupted: bool) -> dict[str, Any]:
    """What --json prints."""
    from specdec.zoo.demo import new_tokens

    stats = out.stats
    if stats is None:
        raise OptionError("the result has no statistics")
    settings = {"target": request.target, "draft": _draft_name(request.draft), "method": request.method}
    return {
        "texts": out.texts,
        "token_ids": new_tokens(out),
        "finish_reasons": finish_reasons(stats, interrupted=interrupted),
        "interrupted": interrupted,
        "stats": stats_fields(stats),
        "settings": {**settings, **request.loading, "options": request.options, **stats.settings},
        "versions": versions(),
    }


def finish_reasons(stats: Stats, *, interrupted: bool) -> list[str]:
    """Why every row ended; Ctrl-C is the only criterion of this command."""
    return ["interrupted" if interrupted and reason == "criteria" else reason for reason in stats.finish_reasons]


def _draft_name(draft: Any) -> str | None:
    return " + ".join(draft) if isinstance(draft, tuple) else draft


def stats_fields(stats: Stats) -> dict[str, Any]:
    """Statistics by name: counts, rates, and seconds."""
    names = (
        *("num_new_tokens", "num_target_passes", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"),
        *("mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "target_passes_per_token"),
        *("weight_passes_per_token", "tokens_per_second", "seconds", "draft_seconds", "verify_seconds"),
        *("select_seconds", "other_seconds", "per_step_drafted", "per_step_accepted"),
    )
    values = {name: getattr(stats, name) for name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def versions() -> dict[str, str]:
    """What ran."""
    import torch
    import transformers

    from specdec import __version__

    return {
        "specdec": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def stats_table(stats: Stats, *, interrupted: bool = False) -> Table:
    """What --stats prints."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim")
    table.add_row("new tokens", str(stats.num_new_tokens), ", ".join(finish_reasons(stats, interrupted=interrupted)))
    table.add_row("tokens per second", f"{stats.tokens_per_second:.1f}", f"in {stats.seconds:.2f} s")
    table.add_row("target passes", str(stats.num_target_passes), f"{stats.target_passes_per_token:.2f} per token")
    if stats.num_spec_steps:
        rate = f"{stats.draft_acceptance_rate:.0%} of {stats.num_draft_tokens} drafted"
        table.add_row("accepted", str(stats.num_accepted_draft_tokens), rate)
        table.add_row("mean acceptance length", f"{stats.mean_acceptance_length:.2f}", f"{stats.num_spec_steps} steps")
        table.add_row("acceptance histogram", "", " ".join(map(str, stats.acceptance_histogram)))
    for name in ("draft", "verify", "select", "other"):
        seconds = getattr(stats, f"{name}_seconds")
        table.add_row(f"{name} time", f"{seconds:.3f} s", f"{seconds / (stats.seconds or 1):.0%}")
    table.add_row("settings", "", ", ".join(f"{name} {value}" for name, value in stats.settings.items()))
    return table


# ---------------------------------------------------------------------------------------------------------------- demo


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Chooses the prompt, and the text if sampling.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of the continuation.")] = DEFAULT_NEW_TOKENS,
    sample: Annotated[bool, typer.Option("--sample/--greedy", help="Draw tokens, or take the likeliest.")] = False,
    temperature: Annotated[float | None, typer.Option(help="Implies --sample.")] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Watch the package's own small pair write code, and see what the draft brings."""
    from specdec import zoo

    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": sample or temperature is not None}
    if options["do_sample"]:
        options |= {"seed": seed, "temperature": temperature}
    pair = zoo.pair()
    out = Console()
    with loading(f"loading zoo:{pair.name}", quiet=quiet):
        from specdec.zoo.demo import duel, load, prompt

        assisted, plain = load(pair)
        text = prompt(seed)
    write(out, text, PROMPT)
    printer = Printer(out, assisted.tokenizer, show_draft=True, marks=False)
    printer.finish(assisted.generate(text, streamer=printer, **options).stats)
    if has_colours(out):
        write(out, "\n")
        for words, style in (
            ("■ prompt  ", PROMPT),
            ("■ accepted from the draft  ", ACCEPTED),
            ("■ the target's own\n", TARGET),
        ):
            write(out, words, style)
    with Console(stderr=True, quiet=quiet).status("measuring plain and assisted decoding in turn"):
        result = duel(assisted, plain, text, **options)
    write(out, f"\n{verdict(result)}\n")
    return _mismatch(result, assisted.tokenizer) if result.difference else OK


def verdict(duel: Duel) -> str:
    """The one line of statistics."""
    stats = duel.assisted.stats
    length = stats.mean_acceptance_length if stats is not None else 1.0
    return " · ".join(
        (
            f"plain {median(duel.plain_rates):.0f} tokens/s",
            f"assisted {median(duel.assisted_rates):.0f} tokens/s",
            comparison(duel.speedup),
            f"mean acceptance length {length:.2f}",
            f"identical: {'no' if duel.difference else 'yes'}",
        )
    )


def comparison(speedup: float) -> str:
    """The speedup in words."""
    if speedup < 0.98:
        return f"assistance is slower here ({speedup:.2f}×)"
    return f"{speedup:.2f}× faster" if speedup > 1.02 else f"about as fast ({speedup:.2f}×)"


def _mismatch(duel: Duel, tokenizer: Any) -> int:
    """Says where the two texts part."""
    if duel.difference is None:
        return OK
    position, *tokens = duel.difference
    plain, assisted = ("nothing" if t is None else f"{t} {tokenizer.decode([t])!r}" for t in tokens)
    return _fail(f"error: mismatch at new token {position}: plain wrote {plain}, assisted {assisted}", MISMATCH)


# ----------------------------------------------------------------------------------------------------------------- zoo


@zoo_app.callback(invoke_without_command=True)
def zoo(ctx: typer.Context, debug: Debug = False) -> None:
    """Print what comes with the package: names, sizes, and how good the models are."""
    if ctx.invoked_subcommand is not None:
        return
    from specdec import zoo as models

    for name in models.NAMES:
        pair = models.pair(name)
        print(f"zoo:{name}")
        for role, folder in (("target", pair.target), ("draft", pair.draft)):
            size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
            print(f"  {role:<24} {size / 1e6:.1f} MB  {folder}")
        for key, value in pair.card.items():
            print(f"  {key.replace('_', ' '):<24} {_plain(value)}")


def _plain(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else value if isinstance(value, str) else json.dumps(value)


@zoo_app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def train(ctx: typer.Context) -> None:
    """Run the recipe that made the package's pair: specdec zoo train OUT; --help lists its options."""
    from specdec.zoo import train as recipe

    arguments, sys.argv = sys.argv, ["specdec zoo train", *(a for a in ctx.args if a != "--debug")]
    try:
        recipe.main()
    finally:
        sys.argv = arguments


if __name__ == "__main__":
    main()
