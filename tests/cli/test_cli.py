"""The command line: what it prints where, its exit codes, and that flags, files and errors mean what they say."""

import io
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec import Loading, SpecGenerator
from specdec.bench.prompts import PromptText
from specdec.bench.samples import Difference
from specdec.cli import commands, main
from specdec.cli.pair import comparison
from specdec.cli.request import of_one_answer, read_request
from specdec.cli.show import Printer
from specdec.cli.terminal import BROKEN_PIPE, EXAMPLES, Interrupt, loading, notes
from specdec.errors import LoadError, OptionError, SpecdecError
from specdec.generator.generation import Event, Generation
from specdec.generator.memories import MemoryWish
from specdec.kernels import Lack, build
from specdec.models import load_model
from specdec.models.loading.load import save_loaded
from specdec.options import bundled_models
from tests.folders import WIDTH, byte_tokenizer, saved_gguf
from tests.matrix import slow
from tests.pipelines.models import CHAT

NEW = ["--max-new-tokens", "12"]
JSON_KEYS = {"texts", "token_ids", "finish_reasons", "interrupted", "stats", "settings", "versions"}
STATS = (
    "num_new_tokens num_target_passes num_draft_rounds num_draft_tokens num_accepted_draft_tokens "
    "mean_acceptance_length draft_acceptance_rate acceptance_histogram target_passes_per_token "
    "tokens_per_second per_round_drafted per_round_accepted"
)


@pytest.fixture(scope="module")
def target(folders: tuple[str, str]) -> str:
    return folders[0]


@pytest.fixture(scope="module")
def draft(folders: tuple[str, str]) -> str:
    return folders[1]


@pytest.fixture
def generate(target: str, called: Any) -> Any:
    """Runs `specdec generate` on the target, as `called` does."""
    return lambda *words, prompt="def f", **code: called("generate", target, "-p", prompt, *words, **code)


@pytest.fixture
def error_of(called: Any) -> Any:
    """The one line on stderr of a call that goes wrong, which prints nothing else."""

    def call(*words: object, code: int = 2) -> str:
        out, err = called(*words, code=code)
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("error: ")
        return err

    return call


def params(**given: Any) -> dict[str, Any]:
    """The parameters of `generate`, as if nothing but `given` had been passed."""
    return {"target": "t", "stream": True, **given}


# ------------------------------------------------------------------------------------------------------ without a model


@pytest.mark.filterwarnings("always:`min_p`:UserWarning")
def test_a_warning_is_shown_once(generate: Any) -> None:
    """However often options are looked at. (Before the models were loaded, and again by the call.)"""
    plain, told = generate("-p", "ab"), generate("-p", "ab", "--set", "min_p=0.1")
    assert told.out == plain.out
    assert told.err.count("warning: `min_p`=0.1 is about drawing tokens") == 1
    assert "min_p" not in generate("-p", "ab", "--set", "min_p=0.1", "--quiet").err


def test_version(called: Any) -> None:
    assert called("--version").out.startswith("specdec ")


def test_help_does_not_import_torch() -> None:
    """Looking up a flag takes no model library, and so no seconds; nor do options and the names of schedules."""
    code = "import specdec.options.generate, specdec.core.draft_schedules"
    code += "; from specdec.cli.commands import run_command; run_command(['generate', '--help'])"
    code += "; import sys; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_help_at_80_columns(monkeypatch: pytest.MonkeyPatch, called: Any) -> None:
    """It goes to stdout, cuts no name (`--num-return-sequenc…` did in 0.1.0), and ends with an example that parses."""
    monkeypatch.setenv("COLUMNS", "80")
    made = typer.main.get_command(commands.app).commands
    assert {*made} == {*EXAMPLES}
    for arguments in ([], ["--help"]):
        assert "...\n" not in called(*arguments).out.partition("Commands:")[2]
    for name, command in made.items():
        out, err = called(name, "--help")
        assert (f"Usage: specdec {name}" in out, err) == (True, ""), name
        assert f"Example: {EXAMPLES[name]}\n" in out
        shown = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        assert {"--debug", *(flag for flag in shown if flag.startswith("--"))} <= {*out.split()}, name
        command.make_context(name, shlex.split(EXAMPLES[name])[2:])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("specdec doc", ["doctor"]),
        ("specdec generate --backend pa", ["packed"]),
        ("specdec generate zoo", ["zoo:python-code", "zoo:speech", "zoo:python-summary"]),
        ("specdec generate --draft ngram+zoo:s", ["ngram+zoo:speech"]),
    ],
)
def test_shell_completion(words: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Commands, and the words that flags and names take."""
    asked = {"_SPECDEC_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["specdec"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.split() == expected


def test_a_bar_while_weights_are_brought_in(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal it is as long as the model has tensors; transformers' own stays away."""
    shown = io.StringIO()
    screen = Console(file=shown, force_terminal=True, width=80)
    monkeypatch.setattr("specdec.cli.terminal.Console", lambda **_: screen)
    with loading("loading it"):
        AutoModelForCausalLM.from_pretrained(target)
    text = shown.getvalue()
    assert "loading it" in text
    assert "Loading weights" not in text
    assert "0:00:00" in text  # the time left, at the end


def test_lines_while_a_step_takes_long(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal, the time so far. (Imports, reading and writing were silent, whatever they took.)"""
    monkeypatch.setattr("specdec.cli.terminal._SECONDS", 0.5)
    with loading("loading it"):
        time.sleep(1.6)
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(re.fullmatch(r"loading it: 0:\d\d so far", line) for line in lines)
    time.sleep(1.2)
    with loading("loading it", quiet=True):
        time.sleep(1.2)
    assert not capsys.readouterr().err


def test_the_bar_tells_of_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While kernels were built, for a minute, it said that the model was loading."""
    monkeypatch.setattr("specdec.cli.terminal._SECONDS", 0.5)
    monkeypatch.setattr(build, "_compile", lambda library, program: (time.sleep(1.6), library.touch()))
    with notes(), loading("loading it"):
        build._build(tmp_path / "kernels.so")
    lines = capsys.readouterr().err.splitlines()
    assert sum("building kernels for this processor" in line for line in lines) == 1
    assert any(re.fullmatch(r"building kernels, once: 0:\d\d so far", line) for line in lines)


@pytest.mark.parametrize("kind", ["rounded", "packed", "gguf"])
def test_lines_while_weights_are_brought_in(
    kind: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a terminal, lines have the time left. (Rounding and GGUF files, which take longest, were silent.)"""
    rounded, source = Loading(quantization="int8-weight"), target
    if kind == "packed":
        save_loaded(target, tmp_path / "packed", rounded)
        source = str(tmp_path / "packed")
    elif kind == "gguf":
        source = saved_gguf(tmp_path / "a.gguf")
    monkeypatch.setattr("specdec.cli.terminal._SECONDS", -1.0)
    capsys.readouterr()
    with loading("loading it"):
        load_model(source, rounded if kind == "rounded" else None)
    lines = capsys.readouterr().err.splitlines()
    assert lines.count("100%: loading it") == (2 if kind == "rounded" else 1)
    assert len(lines) > 10


def test_the_line_of_loading_names_both_models(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch, called: Any
) -> None:
    """The draft is loaded under it, too. (Its weights counted as the target's.)"""
    monkeypatch.setattr("specdec.cli.terminal._SECONDS", -1.0)
    target, draft = folders
    flags = ["--draft", f"suffix+{draft}", "--draft-quantization", "int8-weight", "-p", "a", "--max-new-tokens", "1"]
    assert f"100%: loading {target} and {draft}\n" in called("generate", target, *flags).err


USAGE_ERRORS = {
    "generate": "no target was named",
    "generate t": "no prompt was given",
    "generate zoo:nope -p x": "`TARGET` must be a hub id, a folder or one of zoo:python-code, zoo:speech, zoo:python-"
    "summary, got 'zoo:nope'",
    "generate t -p 'x\udcff'": "the prompt is not text in UTF-8",
    "demo --max-new-tokens 0": "--max-new-tokens",
    "nonsense": "nonsense",
    "generate -m FILE": "No such option: -m. In its place: the model is the first argument",
    "generate t -p x -md FILE": "No such option: -md. In its place: --draft FILE",
    "generate t -p x -ngl 99": "No such option: -ngl. In its place: --device-map cuda",
    "generate t -p x -c 4096": "No such option: -c. In its place: --context N of serve",
    "serve t -t 4": "No such option: -t. In its place: OMP_NUM_THREADS=N before",
    "demo -t4": "No such option: -t. In its place: OMP_NUM_THREADS=N before",
    "serve t -tb 4": "No such option: -tb. In its place: OMP_NUM_THREADS=N before",
    "chat t --threads=4": "No such option: --threads. In its place: OMP_NUM_THREADS=N before",
    "generate t -p -t4 --nope": "No such option: --nope",
    "serve t -p x": "No such option: -p. In its place: -p of generate",
    "generate t -p -c --nope": "No such option: --nope",
    "generate t -p x --temp 0": "No such option: --temp. In its place: --temperature",
    "generate t -p x -s 1": "No such option: -s. In its place: --seed",
    "generate -hf a/b -p x": "No such option: -hf. In its place: the hub id is the first argument",
    "chat t -cnv": "No such option: -cnv. In its place: specdec chat",
    "run t": "No such command 'run': specdec generate TARGET --chat -p TEXT answers",
    "generate t Hello": "extra argument(s) (Hello): a prompt follows -p",
    "generate t -p ''": "the prompt is empty: pass -p TEXT",
    "batch a b --model t --temperature many": "--temperature",
}
FLAG_ERRORS = {
    "--nonsense": "--nonsense",
    "--num-draft-tokens many": "--num-draft-tokens",
    "--num-draft-tokens 0": "error: --num-draft-tokens must be",
    "--set num_assistant_tokens=0": "error: `num_assistant_tokens` must be",
    "--method ngram": "No such option: --method",
    "--draft sufix": "`--draft` must be suffix, ngram, early_exit:N, quantized, mtp, a model (hub id, path or "
    "zoo:NAME), suffix+MODEL, model:MODEL, auto or none, got 'sufix': did you mean 'suffix'?",
    "--schedule fast": "--schedule must be one of",
    "--top-p 1.5": "--top-p must be",
    "--greedy --top-k 5": "--top-k is for sampling",
    "--num-return-sequences 2": "--num-return-sequences above 1 needs --sample",
    "--set num_samples=3": "`num_samples`=3 is about drawing tokens, which needs --sample",
    "--guided-regex '('": "error: --guided-regex: unclosed group",
    "--guided-regex a --guided-choice b": "--guided-regex and --guided-choice each set the form",
    "--response-format no-such-file": "no-such-file cannot be read",
    "--response-format pyproject.toml": "`--response-format` must be json, a JSON schema or a file with one",
    "--stop ''": "--stop must be text, or a list of texts",
    "--set top_k": "KEY=VALUE",
    "--set a=[1": "YAML",
    "--set top_k=5 --top-k 6": "by its flag and by --set",
    "--set prompt_lookup_num_tokens=5 --draft suffix": "pass one of them",
    "--json --show-draft": "leave one of them out",
    "--show-draft --no-stream": "leave out --no-stream",
    "--show-draft --sample --num-return-sequences 2": "shows one text",
    "--config no-such-file.yaml": "no-such-file.yaml",
    "--draft none --prediction f": "--prediction is for drafts that copy",
    "--prediction no-such-file": "no-such-file cannot be read",
    f"--prediction {os.devnull}": "is empty",
    "--quantization int4": "nf4",
    "--max-memory cpu --offload disk": "DEVICE=SIZE",
    "--draft-dtype float32 --draft suffix": "suffix is no model",
}
USAGE_ERRORS |= {f"generate t -p x {flags}": words for flags, words in FLAG_ERRORS.items()}


@pytest.mark.parametrize("arguments", USAGE_ERRORS)
def test_usage_errors(arguments: str, error_of: Any) -> None:
    """Exit code 2, nothing on stdout, and one line on stderr that names the argument; nothing is loaded."""
    assert USAGE_ERRORS[arguments] in error_of(*shlex.split(arguments))


def test_a_prompt_that_is_no_text(monkeypatch: pytest.MonkeyPatch, error_of: Any) -> None:
    """Undecodable bytes on stdin are a usage error. (They were an internal one, or reached the tokenizer.)"""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    assert error_of("generate", "t", "-p", "-").startswith("error: standard input is not text in UTF-8")


def test_a_prompt_that_is_the_name_of_a_file(tmp_path: Path, called: Any) -> None:
    """The name is continued, and a hint says how the text in the file is."""
    (tmp_path / "a.py").write_text("x = 1")
    hint = f'hint: the prompt is the name of a file; for the text in it, pass -p "$(cat {tmp_path / "a.py"})"'
    flags = ["generate", "zoo:python-code", "--max-new-tokens", "1", "-p"]
    assert hint in called(*flags, str(tmp_path / "a.py")).err
    assert "hint" not in called(*flags, "x" * 1000).err


@pytest.mark.parametrize(("closed", "code"), [("<&-", 2), *(slow(stream, 0) for stream in (">&-", "2>&-"))])
def test_a_closed_stream(closed: str, code: int) -> None:
    """Nothing comes from a closed stdin, and nothing goes to the others. (An internal error said so.)"""
    command = f"{sys.executable} -m specdec generate zoo:python-code -p - --max-new-tokens 2 {closed}"
    done = subprocess.run(command, shell=True, input="x = ", capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "standard input is empty" in done.stderr or not code


def test_files_that_cannot_be_read(tmp_path: Path, error_of: Any) -> None:
    """An empty folder and a wrong config are a wrong use of the command."""
    error_of("generate", tmp_path, "-p", "x")
    file = tmp_path / "c.yaml"
    for content, words in (
        ("# Höhe\ntop_k: 3\n".encode("latin-1"), "error: `config` must be a YAML file in UTF-8, got "),
        (b"foo: 1\ndo_sampl: true\ntop_k: 3\n", "error: `foo` is not an option of generate"),
        (b"do_sampl: true\n", "error: `do_sampl` is not an option of generate; did you mean `do_sample`?"),
        (b"draft_options: 3\n", "error: `draft_options` must be a mapping of loading options, got 3"),
    ):
        file.write_bytes(content)
        args = ("-p", "x", "--draft", "d", "--draft-dtype", "float32", "--config", file)
        assert error_of("generate", "t", *args).startswith(words)


def test_debug_shows_the_traceback(called: Any) -> None:
    """Without --debug an error is one line; with it, the traceback comes first."""
    err = called("generate", "t", "--debug", code=2).err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error: no prompt")


RAISED = {
    OptionError("a\n b"): 2, SpecdecError("a b"): 1, RuntimeError("a b"): 1, KeyboardInterrupt(): 130, SystemExit(3): 3,
}  # fmt: skip


@pytest.mark.parametrize(("raised", "code"), RAISED.items(), ids=lambda v: type(v).__name__)
def test_exit_codes(raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, called: Any) -> None:
    """What goes wrong decides the exit code; nothing reaches the user as a traceback."""

    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(commands, "read_request", fail)
    err = called("generate", "t", "-p", "x", code=code).err
    assert err in ("error: a b\n", "error: RuntimeError: a b (--debug shows where)\n", "interrupted\n", "")


# ---------------------------------------------------------------------------------------------- flags, files, methods


FILE = "target: file-target\ndo_sample: true\ntop_k: 7\ntop_p: 0.5\nmax_length: 30\nseed: 4\n"
OF_FILE = {"do_sample": True, "top_p": 0.5, "seed": 4}
LENGTH = {"max_new_tokens": 128}
OPTIONS = [
    ({}, FILE, {**OF_FILE, "top_k": 7, "max_length": 30}),
    ({"top_k": 9, "max_new_tokens": 5}, FILE, {**OF_FILE, "top_k": 9, "max_new_tokens": 5}),  # either limit
    ({"sample": False}, "sampling: rejection\nmin_p: 0.1\n" + FILE, {"do_sample": False, "max_length": 30}),
    ({"set_": ["suppress_tokens=[1, 2]", "min_p=null"]}, "{}", {"suppress_tokens": [1, 2], **LENGTH}),
]


@pytest.mark.parametrize(("flags", "file", "expected"), OPTIONS)
def test_flags_win_over_the_file(flags: dict[str, Any], file: str, expected: dict[str, Any], tmp_path: Path) -> None:
    """The rest of the file stays; --greedy over a sampling preset is no contradiction; --set reads YAML."""
    path = tmp_path / "c.yaml"
    path.write_text(file)
    requests = [read_request(params(target=name, config=path, **flags)) for name in (None, "flag") if "target" in file]
    assert [request.target for request in requests] == ["file-target", "flag"][: len(requests)]
    assert read_request(params(config=path, **flags)).options == expected


SPELLED = [
    ({}, "", "auto"), ({"draft": "d"}, "", "d"), ({}, "draft: d", "d"), ({"draft": "none"}, "draft: d", "none"),
    ({}, "draft: none", "none"), ({"draft": "d"}, "draft: ngram", "d"), ({}, "draft: ngram+d", "ngram+d"),
    ({"draft": "early_exit:2"}, "", "early_exit:2"), ({"set_": ["prompt_lookup_num_tokens=3"]}, "draft: d", None),
    ({"target": "zoo:python-code"}, "", "zoo:python-code"),
    ({"target": "zoo:python-code", "draft": "suffix+d"}, "", "suffix+d"),
    ({"target": "zoo:python-code"}, "draft: none", "none"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "file", "expected"), SPELLED)
def test_which_draft(flags: dict[str, Any], file: str, expected: str | None, tmp_path: Path) -> None:
    """The flag, else the file's; else a target of the zoo brings its own draft, and any other what is best."""
    path = tmp_path / "c.yaml"
    path.write_text(file or "{}")
    assert read_request(params(config=path, **flags)).draft == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [({}, "suffix"), ({"max_new_tokens": 140}, "auto"), ({"set_": ["max_length=60"]}, "auto"), ({"draft": "d"}, "d")],
)
def test_a_short_answer_does_not_pay_for_a_copy(flags: dict[str, Any], expected: str) -> None:
    """The copy of a target took four seconds, and the answer of 48 tokens that it was made for three."""
    assert of_one_answer(read_request(params(**flags))).draft == expected


# ------------------------------------------------------------------------------------------------------------- output


def test_stdout_is_the_text_alone(generate: Any) -> None:
    """Streamed or not, stdout holds the same text and a line end, and stderr nothing."""
    streamed, err = generate(*NEW)
    assert (streamed[-1], err) == ("\n", "")
    assert generate(*NEW, "--no-stream").out == streamed
    assert generate(*NEW, "--draft", "none").out == streamed


@pytest.fixture(scope="module")
def chatty(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target with a chat template."""
    folder = tmp_path_factory.mktemp("models") / "chatty"
    shutil.copytree(target, folder)
    AutoTokenizer.from_pretrained(target, chat_template=CHAT).save_pretrained(folder)
    return str(folder)


def test_chat(chatty: str, generate: Any, called: Any) -> None:
    """The prompt as a message, behind what the system says; without a template the error says so."""
    assert "chat template" in generate("--chat", *NEW, code=2).err
    generator = SpecGenerator.from_pretrained(chatty)
    user = {"role": "user", "content": "def f"}
    for flags, system in ((["--chat"], []), (["--system", "be short"], [{"role": "system", "content": "be short"}])):
        expected = generator.generate(messages=[*system, user], max_new_tokens=12)
        assert called("generate", chatty, "-p", "def f", *NEW, *flags) == (expected.texts[0] + "\n", "")
        whole = json.loads(called("generate", chatty, "-p", "def f", "--set", "max_time=0.01", "--json", *flags).out)
        assert whole["settings"]["options"]["max_new_tokens"] == 1024  # an answer was cut at 128


def answers(folder: str, *said: str) -> list[str]:
    """What the model answers turn by turn."""
    generator, turns = SpecGenerator.from_pretrained(folder), list[dict[str, str]]()
    for message in said:
        turns.append({"role": "user", "content": message})
        [text] = generator.generate(messages=turns, max_new_tokens=12).texts
        turns.append({"role": "assistant", "content": text})
    return [turn["content"] for turn in turns[1::2]]


@pytest.fixture
def talk(chatty: str, monkeypatch: pytest.MonkeyPatch, called: Any) -> Any:
    """Runs `specdec chat` with these lines on stdin, as `called` does."""

    def call(*lines: str, flags: tuple[str, ...] = (), target: str = chatty, code: int = 0) -> Any:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return called("chat", target, "-n", "12", *flags, code=code)

    return call


def test_a_conversation(chatty: str, draft: str, talk: Any) -> None:
    """A line a turn, each after all that was said; drafts change nothing, /reset forgets, /quit leaves."""
    first, second = answers(chatty, "ab", "cd")
    assert talk("ab", "", "cd").out == f"{first}\n{second}\n"
    changed = talk("ab", f"/draft {draft}", "cd", "/draft none", "/reset", "ab", "/quit", "x")
    assert changed == (f"{first}\n{second}\n{first}\n", "")


def test_a_hub_out_of_reach_is_one_line(talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tries were twelve lines."""

    def away(self: Any, **_: Any) -> None:
        log = logging.getLogger("huggingface_hub.utils._http")
        for number in range(3):
            log.warning("'no such name' thrown while requesting HEAD https://example.org")
            log.warning("Retrying in 1s [Retry %d/5].", number)
        raise LoadError("the hub cannot be reached")

    monkeypatch.setattr(SpecGenerator, "submit", away)
    err = talk("/draft org/name", code=1).err
    assert err.splitlines() == ["loading org/name", "error: the hub cannot be reached"]


def test_statistics_of_a_conversation(talk: Any) -> None:
    """After each answer with --stats, or where asked for."""
    assert talk("ab", "/stats", "cd", flags=("--stats",)).err.count("new tokens") == 3


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("/help", 0, "/draft NAME"),
        ("/stats", 0, "no answer was written yet"),
        ("/nonsense", 2, "/nonsense is none of the commands /draft NAME"),
        ("/draft", 2, "/draft needs a name"),
        ("/draft zoo:nope", 2, "`/draft` must be"),
    ],
)
def test_commands_of_a_conversation(line: str, code: int, words: str, talk: Any) -> None:
    """Wrong ones end a piped one, in one line. (/help did, too.)"""
    out, err = talk(line, "/quit", "ab", code=code)
    assert (out, words in err) == ("", True)


def test_a_conversation_needs_a_chat_template(target: str, talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before weights are read."""
    monkeypatch.setattr(SpecGenerator, "from_pretrained", None)
    out, err = talk("ab", target=target, code=2)
    assert (out, "has no chat template" in err) == ("", True)


def test_a_conversation_at_a_terminal(chatty: str, monkeypatch: pytest.MonkeyPatch, called: Any) -> None:
    """Ctrl-C discards a line, an error ends no conversation, Ctrl-D leaves."""
    lines = iter([KeyboardInterrupt(), "/nonsense", "ab", EOFError()])

    def typed(prompt: str) -> str:
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr(sys, "stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", typed)
    out, err = called("chat", chatty, *NEW)
    assert out == f"\n{answers(chatty, 'ab')[0]}\n"
    assert "error: /nonsense" in err


def test_ctrl_c_stops_the_answer_alone(chatty: str, talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written stays in the conversation."""
    before = Printer._write

    def interrupted(self: Printer, text: str, **given: Any) -> None:
        before(self, text, **given)
        if text:
            signal.raise_signal(signal.SIGINT)
            monkeypatch.setattr(Printer, "_write", before)

    monkeypatch.setattr(Printer, "_write", interrupted)
    out = talk("ab", "/reset", "ab", flags=("--draft", "none")).out
    [whole] = answers(chatty, "ab")
    assert out.endswith(f"\n{whole}\n")
    assert whole.startswith(out.removesuffix(f"\n{whole}\n").rstrip("\ufffd"))


def test_a_hint_where_a_chat_model_continues(chatty: str, generate: Any, called: Any) -> None:
    """A plain prompt made many of them end at once, or write on: nothing told of --chat."""
    ends = ["--set", "forced_eos_token_id=2", "-n", "1"]
    out, err = called("generate", chatty, "-p", "def f", *ends)
    assert (out, err.startswith("hint: the prompt is continued")) == ("\n", True)
    assert err.endswith("--chat\n")
    for flags in (["--chat"], ["--quiet"]):
        assert called("generate", chatty, "-p", "def f", *ends, *flags).err == ""
    assert generate(*ends) == ("\n", "")


def test_prompt_from_stdin(generate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generate(*NEW, prompt="a\nb\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfa\nb\n")))  # with a byte order mark
    assert generate(*NEW, prompt="-") == expected


@pytest.mark.parametrize("spelling", ["suffix", "{}"])
def test_a_prediction_saves_passes(spelling: str, generate: Any, draft: str, tmp_path: Path) -> None:
    """With a draft that copies, and with a model, which then copies besides. (A model was refused.)"""
    letters = byte_tokenizer().encode("abcdefghijklmnopqrstuvwxyz")
    others = [i for i in range(WIDTH) if i not in letters]
    how = ("--json", "--draft", spelling.format(draft), "--set", f"suppress_tokens={others}", *NEW)
    plain = json.loads(generate(*how).out)
    (tmp_path / "expected.txt").write_text(plain["texts"][0])
    helped = json.loads(generate(*how, "--prediction", tmp_path / "expected.txt").out)
    assert helped["texts"] == plain["texts"]
    assert helped["stats"]["num_accepted_draft_tokens"] > plain["stats"]["num_accepted_draft_tokens"]


@pytest.mark.parametrize("spelling", ["none", "ngram", "suffix", "early_exit:1", "{}", "suffix+{}"])
def test_json(spelling: str, generate: Any, target: str, draft: str) -> None:
    """One object with texts, ids, reasons, statistics, settings and versions; every draft writes the same text."""
    spelling = spelling.format(draft)
    out, err = generate(*NEW, "--json", "--draft", spelling)
    result = json.loads(out)
    assert (set(result), err) == (JSON_KEYS, "")
    assert set(result["stats"]) >= {*STATS.split()}
    assert result["texts"][0] + "\n" == generate(*NEW, "--draft", "none").out
    assert [len(ids) for ids in result["token_ids"]] == [result["stats"]["num_new_tokens"]]
    assert result["finish_reasons"] in (["length"], ["eos"])
    settings = result["settings"]
    assert (settings["draft"], settings["target"], settings["options"]) == (spelling, target, {"max_new_tokens": 12})
    assert {"specdec", "torch", "transformers", "python"} <= set(result["versions"])


def test_samples_repeat_with_the_seed_that_json_tells(generate: Any) -> None:
    """A sampled call without a seed draws one, and can be repeated with any draft; several samples are numbered."""
    assert len({read_request(params(temperature=0.7)).options["seed"] for _ in range(2)}) == 2
    first = json.loads(generate(*NEW, "--json", "--temperature", "0.9", "--num-return-sequences", "2").out)
    assert len(first["texts"]) == len(first["token_ids"]) == 2
    again = ["--sample", "--temperature", "0.9", "--seed", str(first["settings"]["options"]["seed"])]
    second = json.loads(generate(*NEW, "--json", "--num-return-sequences", "2", "--draft", "none", *again).out)
    assert second["texts"] == first["texts"]
    out = generate(*NEW, "--num-return-sequences", "2", *again).out
    assert out == f"── 1/2 ──\n{first['texts'][0]}\n── 2/2 ──\n{first['texts'][1]}\n"


def test_stop_strings(generate: Any) -> None:
    text = generate(*NEW).out
    letter = next(c for c in text if c.isascii() and c.isprintable())
    result = json.loads(generate(*NEW, "--json", "--stop", letter).out)
    assert result["finish_reasons"] == ["stop"]
    assert result["texts"][0].count(letter) == 1
    cut = (*NEW, "--stop", letter, "--set", "include_stop_str_in_output=false")
    for more in ((), ("--show-draft",)):
        shown = generate(*cut, *more).out.replace("⟦", "").replace("⟧", "")
        assert shown == text[: text.index(letter)] + "\n", more


def test_stats_go_to_stderr(generate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table leaves stdout as it is; a line after it says that threads wait for cores, and what helps."""
    out, err = generate(*NEW, "--stats", "--num-draft-tokens", "3", "--schedule", "constant")
    assert out == generate(*NEW).out
    assert "target passes" in err
    assert "schedule constant" in err
    assert re.search(r"first token +0\.\d\d s +models loaded in \d\.\d s", err)
    assert "busy machine" not in err
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr("specdec.bench.machine.core_share", lambda: 0.64)
    last = generate(*NEW, "--stats").err.splitlines()[-1]
    assert last.startswith("busy machine: torch's 2 threads got 64% of the cores that they need")
    assert "OMP_NUM_THREADS=" in last


def test_what_is_missing_is_one_line(called: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler: a note, and nothing if the command is to be quiet. (It said nothing.)"""
    missing = Lack("there is no compiler", "name one")
    monkeypatch.setattr(build, "_lack", lambda: missing)
    writing = "generate", "zoo:python-code", "--draft", "none", "-p", "def", "--max-new-tokens", "2"
    for words in (["--quiet"], []):
        build._report.cache_clear()
        note = "" if words else f"note: no kernels, so passes and sampling on the CPU are slower: {missing}\n"
        assert called(*writing, *words).err == note


# ------------------------------------------------------------------------------------------------------------- printer


def shown(*rounds: tuple[str, int], terminal: bool, show_draft: bool = True, **environment: str) -> str:
    """What a printer writes for these rounds: letters, a token each, and how many of them the draft had."""

    def stream() -> Generator[Event, None, Generation]:
        for text, accepted in rounds:
            yield Event(text, byte_tokenizer().encode(text), accepted)
        return Generation(texts=["the result"])

    colours = "standard" if terminal else None
    out = Console(file=io.StringIO(), force_terminal=terminal, color_system=colours, width=20, _environ=environment)
    assert Printer(out, byte_tokenizer(), show_draft=show_draft).follow(stream()).texts == ["the result"]
    return out.file.getvalue()  # type: ignore[attr-defined]


def test_the_last_token_of_a_round_is_the_targets_own() -> None:
    """Of three rounds, the first two end with the target's token; the last ended on an accepted one, or did not."""
    assert shown(("a", 0), ("bcd", 2), ("ef", 1), terminal=False) == "a⟦bc⟧d⟦e⟧f\n"
    assert shown(("a", 0), ("bcd", 2), ("ef", 2), terminal=False) == "a⟦bc⟧d⟦ef⟧\n"
    assert shown(("a", 0), ("bcd", 2), ("ef", 1), terminal=False, show_draft=False) == "abcdef\n"


def test_notes_speak_of_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """Each once, an option as its flag. (A note came for each model, with `dtype bfloat16` in it.)"""
    with notes():
        for _ in range(2):
            logging.getLogger("specdec.x").info(
                "slow (`dtype='bfloat16'`, or `max_new_tokens=`, `trust_remote_code=True`)"
            )
    expected = "note: slow (--dtype bfloat16, or --max-new-tokens, --trust-remote-code)\n"
    assert capsys.readouterr().err == expected


def test_notes_wait_for_the_end_of_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    def rounds() -> Generator[Event, None, Generation]:
        yield Event("one ", [1], 0)
        logging.getLogger("specdec").info("meanwhile")
        assert capsys.readouterr().err == ""
        yield Event("two", [2], 0)
        return Generation(texts=[])

    out = Console(file=io.StringIO())
    with notes():
        Printer(out, byte_tokenizer(), show_draft=False).follow(rounds())
        assert out.file.getvalue() == "one two\n"  # type: ignore[attr-defined]
        assert capsys.readouterr().err == "note: meanwhile\n"
        logging.getLogger("specdec").info("afterwards")
        assert capsys.readouterr().err == "note: afterwards\n"


def test_accepted_text_is_coloured_on_a_terminal() -> None:
    """Colours instead of marks, unless NO_COLOR asks for none; long lines are not wrapped."""
    assert shown(("a", 0), ("bc", 1), terminal=True) == "a\x1b[32mb\x1b[0mc\n"
    assert shown(("a", 0), ("bc", 1), terminal=True, NO_COLOR="1") == "a⟦b⟧c\n"
    assert shown(("a" * 50, 49), terminal=True).count("\n") == 1


def test_a_terminal_obeys_no_escape_sequence_of_a_model() -> None:
    """Control characters in generated text are replaced on a terminal, and left alone in a file."""
    assert shown(("\x1b[2J\tx", 0), terminal=True) == "\ufffd[2J\tx\n"
    assert shown(("\x1b[2J\tx", 0), terminal=False) == "\x1b[2J\tx\n"


# ----------------------------------------------------------------------------------------------- interrupts and pipes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_call_tells_what_it_has(
    number: signal.Signals, generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, or a request to end, ends the text after the next token: JSON is complete and says so, the exit code is
    130.
    """

    def soon(self: Interrupt, input_ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        if input_ids.shape[1] >= len("def f") + 3 and not self.is_set:
            time.sleep(0.1)  # until the main thread waits: a signal just before would not wake it
            os.kill(os.getpid(), number)
            while not self.is_set:  # until the handler has run: a second signal would end the program
                time.sleep(0.001)
        return self.is_set

    monkeypatch.setattr(Interrupt, "__call__", soon)
    handler = signal.getsignal(number)
    out, err = generate(*NEW, "--json", code=130)
    result = json.loads(out)
    assert err == "interrupted\n"
    assert (result["interrupted"], result["finish_reasons"]) == (True, ["interrupted"])
    assert len(result["token_ids"][0]) == 3
    assert signal.getsignal(number) is handler
    twice = Interrupt()
    twice.set()
    with pytest.raises(KeyboardInterrupt):
        twice.set()
    assert generate(*NEW, code=130) == (result["texts"][0] + "\n", "interrupted\n")


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error(target: str) -> None:
    """`specdec generate | head` ends without a traceback."""
    command = [sys.executable, "-m", "specdec", "generate", target, "-p", "ab", "--max-new-tokens", "400", "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == BROKEN_PIPE


# --------------------------------------------------------------------------------------------------------------- demo


@pytest.fixture
def pair(target: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny models in place of the package's pair for code, a short prompt for its demo, and a quiet machine."""
    tiny = bundled_models.Pair("python-code", Path(target), Path(draft), {"target_parameters": 1234})
    bundled, code = bundled_models.pair, "python-code"
    monkeypatch.setattr(bundled_models, "pair", lambda name=code: tiny if name == code else bundled(name))
    monkeypatch.setattr("specdec.bench.prompts.pick_prompts", lambda *_: [PromptText("def f():\n", "code")])
    monkeypatch.setattr("specdec.bench.machine.load_now", lambda: 0.0)


@pytest.mark.usefixtures("pair")
@pytest.mark.parametrize("sampled", [[], ["--sample", "--seed", "3"], ["--temperature", "0.8"]])
def test_demo(sampled: list[str], monkeypatch: pytest.MonkeyPatch, called: Any) -> None:
    """Piped, the demo prints prompt, text and one line of statistics, without escape codes."""
    monkeypatch.setattr("specdec.bench.machine.waiting_threads", lambda: None)
    out, err = called("demo", "--max-new-tokens", "6", *sampled)
    assert out.startswith("── the target alone ──\ndef f():\n")
    assert "── the target and its draft ──\ndef f():\n" in out
    alone, draft = (line for line in out.splitlines() if line.endswith(" passes of the target"))
    assert (alone[:14], draft[:14], err) == ("  alone      █", "  with draft █", "")
    assert "▒ draft" in out
    assert "\x1b" not in out
    last = out.splitlines()[-1]
    assert all(words in last for words in ("plain", "assisted", "tokens/s", "mean acceptance length", "identical: yes"))


@pytest.mark.usefixtures("pair")
def test_a_demo_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch, called: Any) -> None:
    """One line says why it takes long. (Minutes passed, and a low speedup stood there.)"""
    monkeypatch.setattr("specdec.bench.machine.waiting_threads", lambda: "threads wait")
    out, err = called("demo", "--max-new-tokens", "6")
    assert err == "busy machine: threads wait: other programs take the cores, and the figures below mean little\n"
    assert " on a busy machine · " in out.splitlines()[-1]  # (a firm 0.51x stood there)
    assert called("demo", "--max-new-tokens", "6", "--quiet").err == ""
    cores = os.cpu_count() or 1
    monkeypatch.setattr("specdec.bench.machine.load_now", lambda: 0.6 * cores)  # (only threads that wait were told)
    err = called("demo", "--max-new-tokens", "6").err
    words = f"load {0.6 * cores:.1f} on {cores} cores: other programs take the cores"
    assert err == f"busy machine: {words}, and the figures below mean little\n"


@pytest.mark.usefixtures("pair")
def test_a_demo_that_differs_is_a_mismatch(monkeypatch: pytest.MonkeyPatch, called: Any) -> None:
    monkeypatch.setattr("specdec.bench.samples.differences", lambda plain, assisted: iter([Difference(0, 4, 70, None)]))
    monkeypatch.setattr("specdec.bench.machine.waiting_threads", lambda: None)
    out, err = called("demo", "--max-new-tokens", "6", code=3)
    assert "identical: no" in out
    assert err.startswith("error: mismatch at new token 4: plain wrote 70 ")
    assert err.endswith("assisted nothing\n")


def test_the_speedup_in_words() -> None:
    words = [comparison(speedup) for speedup in (1.5, 1.0, 0.8)]
    assert words == ["1.50× faster", "about as fast (1.00×)", "assistance is slower here (0.80×)"]


@pytest.mark.usefixtures("pair")
def test_zoo(called: Any) -> None:
    assert re.search(r"^zoo:python-code\n(.*\n)+  target parameters +1,234\n", called("zoo").out)


@pytest.mark.parametrize("arguments", [["zoo"], ["demo"], ["generate", "zoo:python-code", "-p", "x"]])
def test_missing_weights(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_of: Any) -> None:
    """An installation without its data files is no usage error: exit code 1, and one line that says so."""
    monkeypatch.setattr(bundled_models, "_ROOT", tmp_path)
    assert error_of(*arguments, code=1).startswith("error: the weights of 'python-code' are not in ")


def test_loading_by_flags_and_file(generate: Any, draft: str, tmp_path: Path) -> None:
    """Flags win over the file, the draft has its own options, and the report tells what was loaded and what holds."""
    file = tmp_path / "run.yaml"
    file.write_text("quantization: int8\noffload: disk\nmax_memory: {cpu: 40KB}\ndraft_options: {dtype: bfloat16}\n")
    flags = ["--quantization", "int8-weight", "--draft-quantization", "int8-weight", "--max-memory", "cpu=90KB"]
    how = [*NEW, "--json", "--quiet", "--draft", draft, "--config", str(file), *flags]
    found = json.loads(generate(*how).out)
    assert found["settings"]["quantization"] == "int8-weight"
    assert found["settings"]["offload"] == "disk"
    assert found["settings"]["max_memory"] == {"cpu": "90KB"}
    assert found["settings"]["draft_options"] == {"dtype": "bfloat16", "quantization": "int8-weight"}
    assert found["stats"]["exactness"] == "exact"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of all generators that commands make from now on, each of which ends its command."""
    options_of_all = list[dict[str, Any]]()

    def spy(self: Any, *models: Any, **options: Any) -> None:
        options_of_all.append({**options, "memory": MemoryWish.read(options.get("memory"))})
        raise SpecdecError("enough")

    monkeypatch.setattr(SpecGenerator, "__init__", spy)
    return options_of_all


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (path := tmp_path / "rows.txt").write_text("def f\n")
    return path


def test_every_command_reads_in_full_if_told(
    target: str, rows: Path, made: list[dict[str, Any]], called: Any, talk: Any
) -> None:
    """By --no-prefix-cache, or by a file, over which the flag wins; measurements always do."""
    (file := rows.with_name("run.yaml")).write_text("prefix_cache: false\n")
    generating = ("generate", target, "-p", "def f")
    batch = ("batch", rows, rows.with_name("out.jsonl"), "--model", target)
    for arguments in (generating, batch, ("summarize", rows, "--model", target), ("transcribe", "--demo")):
        called(*arguments, "-q", "--no-prefix-cache", code=1)
    talk("ab", flags=("--no-prefix-cache",), code=1)
    called(*generating, "-q", "--config", file, code=1)
    called("doctor", target, "--seconds", "0.1", "-q", code=1)
    called(*generating, "-q", "--config", file, "--prefix-cache", code=1)
    called(*generating, "-q", code=1)
    assert [options.get("prefix_cache") for options in made] == [*[False] * 7, True, None]


def test_every_command_that_drafts_takes_a_memory(
    target: str, rows: Path, made: list[dict[str, Any]], called: Any, talk: Any
) -> None:
    """By --memory, of words or paths, or by a file."""
    (file := rows.with_name("run.yaml")).write_text(f"memory: {rows}\n")
    generating = ("generate", target, "-p", "def f", "-q")
    flags = ("--memory", str(rows), "--memory", str(rows))
    called(*generating, *flags, code=1)
    called("batch", rows, rows.with_name("out.jsonl"), "--model", target, "-q", *flags, code=1)
    talk("ab", flags=flags, code=1)
    for more in (("--config", file), ("--memory", "on"), ()):
        called(*generating, *more, code=1)
    wishes = [options["memory"] for options in made]
    assert [len(wish.texts) for wish in wishes] == [2, 2, 2, 1, 0, 0]
    assert [bool(wish.most_bytes) for wish in wishes] == [True] * 5 + [False]
    assert "`memory`: missing has no text" in called(*generating, "--memory", "missing", code=2).err


def test_gguf_files(tmp_path: Path, called: Any) -> None:
    """By their own path, or by that of their folder and --gguf-file; nothing but the text is shown."""
    pytest.importorskip("gguf")
    path = saved_gguf(tmp_path / "model.gguf", tokens=True, vocab=WIDTH + 1)
    saved_gguf(tmp_path / "draft.gguf", tokens=True, vocab=WIDTH + 1, types=["Q4_0"])
    folder, texts = str(tmp_path), []
    draft = ["--draft", folder, "--draft-gguf-file", "draft.gguf"]
    for named in ([path], [folder, "--gguf-file", "model.gguf"], [path, *draft, "--json"]):
        out, err = called("generate", *named, "-p", "abab", "--max-new-tokens", "4", "--quiet")
        assert not err
        texts.append(out)
    found = json.loads(texts[2])
    assert texts[0] == texts[1] == f"{found['texts'][0]}\n"
    assert found["settings"]["draft_options"] == {"gguf_file": "draft.gguf"}
    assert found["stats"]["num_draft_tokens"]
    err = called("generate", folder, "-p", "a", "--gguf-file", "other.gguf", code=2).err
    assert "there are draft.gguf, model.gguf" in err


def test_packed_folders(target: str, tmp_path: Path, called: Any) -> None:
    """What `pack` writes is a target and a draft like any other, and never over something else."""
    folder = tmp_path / "packed"
    assert f"{folder} has 0.0 GB" in called("pack", target, folder, "--quantization", "int8-weight").err
    expected = called("generate", target, "-p", "def f", *NEW, "--quantization", "int8-weight", "-q").out
    assert called("generate", folder, "--draft", folder, "-p", "def f", *NEW, "-q").out == expected
    assert "a folder that is new or empty" in called("pack", target, folder, code=2).err
