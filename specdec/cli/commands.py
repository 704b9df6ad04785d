"""The `specdec` command: its entry point, `generate`, `pack`, errors and exit codes."""

from __future__ import annotations

import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from signal import SIGTERM
from typing import Any

import typer
from rich.console import Console
from typer import Argument, Option

from specdec.cli import chat as chat_
from specdec.cli import flags
from specdec.cli.batch import batch
from specdec.cli.bench import bench
from specdec.cli.doctor import doctor
from specdec.cli.pair import demo, zoo
from specdec.cli.request import (
    ANSWER_TOKENS,
    DEFAULT_NEW_TOKENS,
    are_here,
    load_with_spinner,
    of_one_answer,
    passed,
    read_prediction,
    read_prompt,
    read_request,
    with_images,
)
from specdec.cli.serve import serve
from specdec.cli.show import Printer, print_text, report, show_stats
from specdec.cli.summarize import summarize
from specdec.cli.terminal import (
    BROKEN_PIPE,
    EXAMPLES,
    FAILED,
    INTERRUPTED,
    OK,
    USAGE,
    Interrupt,
    abandon_stdout,
    fail,
    in_flags,
    loading,
    notes,
    remark,
    say,
)
from specdec.cli.transcribe import transcribe
from specdec.errors import OptionError, SpecdecError
from specdec.options.fields import SAMPLING

LLAMA_CPP = {
    **dict.fromkeys(("-m", "--model"), "the model is the first argument, TARGET"),
    **dict.fromkeys(("-hf", "--hf-repo"), "the hub id is the first argument, with --gguf-file NAME"),
    **dict.fromkeys(("-md", "--model-draft", "--spec-draft-model"), "--draft FILE"),
    **dict.fromkeys(("--draft-max", "--spec-draft-n-max"), "--num-draft-tokens N, or nothing: the default measures"),
    **dict.fromkeys(("-c", "--ctx-size"), "--context N of serve; elsewhere memory grows with the text"),
    **dict.fromkeys(
        ("-t", "--threads", "-tb", "--threads-batch"),
        "OMP_NUM_THREADS=N before the command, as in: OMP_NUM_THREADS=4 specdec",
    ),
    **dict.fromkeys(("-ngl", "--n-gpu-layers"), "--device-map cuda, for all layers"),
    **{"-p": "-p of generate", "-f": '-p "$(cat FILE)" of generate', "-sys": "--system TEXT of generate"},
    **{"--file": '-p "$(cat FILE)" of generate', "--temp": "--temperature", "-s": "--seed", "-cnv": "specdec chat"},
    **{"--min-p": "--set min_p=P", "--repeat-penalty": "--set repetition_penalty=P", "--verbose": "--stats"},
    **dict.fromkeys(("-j", "--json-schema"), "--response-format SCHEMA of generate"),
}
"""What flags of llama.cpp and Ollama are here, for those who pass them to a command that lacks them."""
_WAYS_OUT = {
    "No such command 'run'.": "specdec generate TARGET --chat -p TEXT answers once, specdec chat TARGET talks",
    "Got unexpected extra argument": "a prompt follows -p, a draft --draft, and a text with spaces is in quotes",
}
"""What to do after errors of the parser, by the beginning of their texts."""

app = typer.Typer(
    pretty_exceptions_enable=False, rich_markup_mode=None, help="Speculative decoding: the same text in fewer passes."
)


def main() -> None:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the caller closed it
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code; an error is one line on stderr, after its traceback with --debug."""
    debug = "--debug" in arguments
    with warnings.catch_warnings(), notes():
        warnings.showwarning = _show_warning()
        try:
            code = app(list(arguments), prog_name="specdec", standalone_mode=False)
            sys.stdout.flush()
            if code == INTERRUPTED:  # the parser, or a command after Ctrl-C, returned it
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
            parsers = getattr(error, "format_message", None)  # errors of the parser have it
            message = str(error) if parsers is None else parsers().replace("Value error, ", "")  # pydantic's
            if llama := _llama_cpp(arguments, error):
                message = f"No such option: {llama}. In its place: {LLAMA_CPP[llama]}"
            elif way_out := next((way for text, way in _WAYS_OUT.items() if message.startswith(text)), None):
                message = f"{message.rstrip('.')}: {way_out}"
            if parsers is not None or isinstance(error, OptionError):
                return fail(f"error: {message}", USAGE)
            if not isinstance(error, SpecdecError):
                message = f"{type(error).__name__}: {message} (--debug shows where)"
            return fail(f"error: {message}", FAILED)


def _llama_cpp(arguments: Sequence[str], error: Exception) -> str | None:
    """The flag of llama.cpp that the parser's error is about; the parser reads -md as -m, and -ngl as -n gl.

    A flag's value may be part of its word, as in --threads=4 and -t4.
    """
    name, opts = getattr(error, "option_name", None), getattr(getattr(error, "param", None), "opts", ())
    words = (re.sub(r"=.*|(?<=^-\w)\d+$", "", word) for word in arguments)

    def is_meant(word: str) -> bool:
        return word.startswith(name) if name else len(word) > 2 and word[:2] in opts

    return next((word for word in words if word in LLAMA_CPP and is_meant(word)), None)


def _show_warning() -> Any:
    lines: set[str] = set()  # options are checked before models are loaded and again by every call

    def show(message: Warning | str, *_: object, **__: object) -> None:
        line = "warning: " + in_flags(" ".join(str(message).split()))
        if line not in lines:
            lines.add(line)
            remark(line, "yellow")

    return show


@app.callback(invoke_without_command=True)
@flags.takes()
def root(
    ctx: typer.Context,
    version: bool = Option(False, "--version", help="Print the version, with the commit of a git checkout, and exit."),
) -> None:
    """Speculative decoding: the same text in fewer passes over the model's weights."""
    if version:
        from specdec import __version__
        from specdec.options.versions import commit

        print(f"specdec {__version__}{f' (commit {number})' if (number := commit()) else ''}")
    elif ctx.invoked_subcommand is None:
        print(ctx.get_help())
    else:
        return
    raise typer.Exit


@flags.takes(
    "draft num_draft_tokens schedule sample temperature top_k top_p",
    "dtype quantization gguf_file backend exactness device_map offload offload_folder trust_remote_code",
    "activations prefix_cache memory config set_ json_ stats quiet",
)
def generate(
    ctx: typer.Context,
    target: str | None = flags.target(
        "Hub id, folder, GGUF file, or zoo:NAME (specdec zoo lists them); may come from --config."
    ),
    prompt: str | None = flags.flag("Text to continue; - reads stdin.", "--prompt", "-p"),
    chat: bool = Option(False, "--chat", help="Treat the prompt as a message and apply the model's chat template."),
    system: str | None = flags.flag("System message; implies --chat.", metavar="TEXT"),
    max_new_tokens: int | None = flags.flag(
        f"Length limit; {DEFAULT_NEW_TOKENS} if nothing sets one, {ANSWER_TOKENS} with --chat.",
        "--max-new-tokens",
        "-n",
    ),
    image: list[str] | None = flags.flag("Picture, for a model that sees; repeatable; implies --chat.", metavar="FILE"),
    prediction: str | None = flags.flag("File that the output may resemble, for drafts that copy.", metavar="FILE"),
    num_draft_branches: int | None = flags.flag("Have the draft model guess trees, with this many branches."),
    sampling: str | None = flags.flag(f"Acceptance rule: {', '.join(SAMPLING)}; implies --sample.", words=SAMPLING),
    seed: int | None = flags.flag("Seed of sampling; random by default, reported by --json."),
    num_return_sequences: int | None = flags.flag("Number of samples or beams to return."),
    stop: list[str] | None = flags.flag("Text that ends the answer, and stays in it; repeatable."),
    response_format: str | None = flags.flag(
        "JSON schema that the answer matches, or a file with one; json: any JSON object.", metavar="SCHEMA"
    ),
    guided_regex: str | None = flags.flag("Expression that the whole answer matches.", metavar="REGEX"),
    guided_choice: list[str] | None = flags.flag("One of the possible answers; repeatable.", metavar="TEXT"),
    *,
    max_memory: list[str] | None = flags.flag(
        "Memory limit of a device, as in cpu=2GiB; repeatable.", metavar="DEVICE=SIZE"
    ),
    revision: str | None = flags.flag("Branch, tag or commit of the target on the hub."),
    show_draft: bool = Option(
        False, "--show-draft", help="Color the tokens of the draft; without colors, mark them ⟦so⟧."
    ),
    stream: bool = Option(True, help="Print text as it is generated."),
    json_: bool,
    stats: bool,
) -> int:
    """Continue a prompt, or answer it (--chat). The text is the same with and without a draft."""
    chat = chat or system is not None or bool(image)
    request = of_one_answer(read_request(ctx.params, new_tokens=ANSWER_TOKENS if chat else DEFAULT_NEW_TOKENS))
    text = read_prompt(prompt)
    expected, request = read_prediction(prediction, request)
    content = with_images(text, image or [])
    generator = load_with_spinner(request)
    if not chat and getattr(generator.tokenizer, "chat_template", None):
        remark("hint: the prompt is continued as a text: for an answer by the model's chat template, pass --chat")
    live = stream and not json_ and request.options.get("num_return_sequences", 1) == 1
    with Interrupt(SIGTERM) as interrupt:
        call: dict[str, Any] = {**request.options, "stopping_criteria": [interrupt], "prediction": expected}
        before = [] if system is None else [{"role": "system", "content": system}]
        call |= {"messages": [*before, {"role": "user", "content": content}]} if chat else {"prompt": text}
        if live:
            cut_before = generator.options(**request.options).cut_before
            printer = Printer(Console(), generator.tokenizer, show_draft=show_draft, cut_before=cut_before)
            out = printer.follow(generator.stream(**call))
        else:
            out = generator.generate(**call)
    assert out.stats is not None
    texts = out.texts or []
    if json_:
        fields = {"texts": out.texts, "token_ids": out.new_tokens(), "finish_reasons": list(out.stats.finish_reasons)}
        report({**fields, "interrupted": interrupt.is_set}, request, out.stats)
    elif not live:
        for number, each in enumerate(texts, 1):
            print_text(each, f"{number}/{len(texts)}" if len(texts) > 1 else None)
    if stats:
        show_stats(out.stats)
    if interrupt.is_set:
        return INTERRUPTED
    if "length" in out.stats.finish_reasons and ctx.params.get("max_new_tokens") is None:
        remark(f"note: the text ended at {max(out.stats.lengths)} tokens; for more, pass -n")
    return OK


@flags.takes("dtype quantization gguf_file trust_remote_code quiet")
def pack_(
    ctx: typer.Context,
    target: str = flags.target("Hub id, folder, GGUF file, or zoo:NAME (specdec zoo lists them).", ...),
    out: Path = Argument(..., metavar="OUT", help="New folder for the packed model."),
) -> int:
    """Write TARGET into a folder that loads in seconds. Its weights in few bits are not rounded again."""
    with loading(f"packing {target}", downloads=not are_here(target, None)):
        from specdec.generator.pack import pack_model

        pack_model(target, out, **passed(ctx.params))
    size = sum(file.stat().st_size for file in out.iterdir())
    remark(f"{out} has {size / 1e9:.1f} GB: use it as TARGET or --draft")
    return OK


for command in (generate, chat_.chat, demo, doctor, bench, serve, batch, summarize, transcribe, pack_, zoo):
    name = command.__name__.rstrip("_")
    app.command(name, epilog=f"\b\nExample: {EXAMPLES[name]}")(command)  # \b: not wrapped
