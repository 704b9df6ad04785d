"""Pages that are made from the code.

    python -m docs.make.pages        # writes those that are in the repository; a test compares

| page in the repository | made from |
| --- | --- |
| `reference/cli.md` | the parsers of `specdec` |
| `reference/options.md` | options of calls, loading, suites and servers; their descriptions are in `options.yaml` |
| `reference/api.md`, `pipelines.md`, `types.md` | docstrings of classes |

This file is also a hook of mkdocs, which makes the others while the site is built. Some have a page in the repository,
so that links lead somewhere; on the site mkdocstrings writes the classes, with their types.

| page of the site | made from |
| --- | --- |
| `reference/errors.md` | every message in the source that names an argument or a way out |
| `changelog.md` | CHANGELOG.md |
| `results/` | the pages of benchmarks/results |
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, get_args, get_origin

import typer.main
import yaml
from pydantic import BaseModel

import specdec
from specdec import errors
from specdec.bench import parts, suite
from specdec.cli import request
from specdec.cli.commands import app
from specdec.options.fields import SYNONYMS
from specdec.options.generate import Options
from specdec.options.load import Loading
from specdec.server import protocol, settings

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SOURCE = Path(specdec.__file__).parent
RESULTS = "benchmarks/results"


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages; mkdocs calls this."""
    from mkdocs.structure.files import File

    for path, make in PAGES.items():
        if (stub := files.get_file_from_path(path)) is not None:  # for readers of the repository
            files.remove(stub)
        files.append(File.generated(config, path, content=make()))
    for page in sorted((ROOT / RESULTS).glob("*.md")):
        content = page.read_text(encoding="utf-8").replace("](../../docs/", "](../")
        files.append(File.generated(config, f"results/{page.name}", content=content))
    return files


def on_page_markdown(markdown: str, **others: Any) -> str:
    """Leads links to the folder of results, as the repository has them, to the pages of the site."""
    return re.sub(rf"\]\(((?:\.\./)*)\.\./{RESULTS}/", r"](\1results/", markdown)


# the command line


def command_line() -> str:
    """Usage, help and flags of every command."""
    about = (
        "# Command line\n\n"
        "Standard output is data, standard error is progress. `--quiet` leaves progress and warnings out, `--debug` "
        "shows the traceback of an error. This page is made from the parsers themselves.\n\n"
        "| exit code | meaning |\n| ---: | --- |\n"
        "| 0 | done |\n"
        "| 1 | failed, or a part of the work was left out (a recording, a setting of a benchmark) |\n"
        "| 2 | wrong usage |\n"
        "| 3 | outputs differ that should be the same |\n"
        "| 130 | interrupted (Ctrl-C) |\n"
    )
    commands = typer.main.get_command(app).commands
    return "\n".join([about, *(_section(commands[name], f"specdec {name}") for name in sorted(commands))])


def _section(command: Any, name: str) -> str:
    context = command.context_class(command, info_name=name, terminal_width=120, max_content_width=120)
    usage = command.get_usage(context).removeprefix("Usage: ")
    records = [record for param in command.get_params(context) if (record := param.get_help_record(context))]
    rows = "".join(f"| `{_pipes(flags)}` | {_pipes(_escaped(told))} |\n" for flags, told in records)
    table = f"| flag | |\n| --- | --- |\n{rows}" if rows else ""
    example = command.epilog.partition("Example: ")[2] if command.epilog else ""
    epilog = f"\nExample: `{example}`\n" if example else ""
    return f"## {name}\n\n{_escaped(command.help)}\n\n```text\n{usage}\n```\n{epilog}\n{table}"


# options and files


@cache
def told() -> dict[str, dict[str, Any]]:
    """What `options.yaml` says of each table's keys."""
    found: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "options.yaml").read_text(encoding="utf-8"))
    return found


def known() -> dict[str, dict[str, str]]:
    """Each table's keys, and what values they take, from the code."""
    return {
        "generate": _schema(Options),
        "loading": {field.name: f"`{field.default!r}`" for field in fields(Loading)},
        "suite": {**_schema(suite.Suite), **{f"modes: {name}": kind for name, kind in _schema(parts.Mode).items()}},
        "serve": _schema(settings.ServeSettings),
        "serve_model": _schema(settings.ModelSettings),
        "serve_limits": _schema(settings.Limits),
    }


def options() -> str:
    """Every key of every configuration; raises where one has no words, or words have no key."""
    page, keys = [], known()
    for table, said in told().items():
        sections = said["sections"]
        named = [name for section in sections for name in section["keys"]]
        if sorted(named) != sorted(keys[table]):
            odd = sorted({*named} ^ {*keys[table]})
            raise ValueError(f"docs/make/options.yaml, {table}: the code has other keys, see {', '.join(odd)}")
        page.append(f"## {said['title']}\n\n{said['about']}")
        for section in sections:
            head = f"### {section['title']}\n\n" if "title" in section else ""
            rows = [f"| `{name}` | {keys[table][name]} | {words} |" for name, words in section["keys"].items()]
            page.append(f"{head}| key | {said['column']} | |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n")
    about = (
        "# Options and files\n\n"
        "Settings are checked before any work begins: an unknown key is an error that names the nearest known one. "
        "Keys and values on this page are read from the code.\n\n"
        "A file for `--config` of `specdec generate`, `summarize` and `batch` is a YAML mapping. It holds `target`, "
        "`draft`, `prefix_cache`, `memory`, options of loading, `draft_options` (options of loading for the draft) and "
        "options of calls. Flags win over the file. The draft has [one spelling](../guides/drafts.md) everywhere.\n\n"
        + _names()
    )
    return "\n".join([about, *page])


def _schema(model: type[BaseModel]) -> dict[str, str]:
    """The keys of a model, each with its values and default in words."""
    schema = model.model_json_schema()["properties"]
    bounds = {name: " ".join(dict.fromkeys(_bounds(field))) for name, field in model.model_fields.items()}
    return {name: _kind(part, bounds[name]) for name, part in schema.items()}


def _bounds(part: Any) -> Iterator[str]:
    """Least and most of a number; JSON schemas lack those that stand behind a validator."""
    for bound in getattr(part, "metadata", getattr(part, "__metadata__", ())):
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤")):
            if (value := getattr(bound, name, None)) is not None:
                yield f"{sign} {_number(value)}"
        yield from _bounds(bound) if hasattr(bound, "metadata") else ()
    for inner in get_args(getattr(part, "annotation", part)):
        if get_origin(inner) not in (list, tuple, dict):
            yield from _bounds(inner)


def _kind(part: Mapping[str, Any], bounds: str) -> str:
    words = f"{_values(part)} {bounds}".strip()
    default = part.get("default")
    shown = default is not None and not isinstance(default, list | dict)
    return f"{words}, `{json.dumps(default)}`" if shown else words


def _values(part: Mapping[str, Any]) -> str:
    """The values that a part of a JSON schema lets through."""
    if "$ref" in part:
        return "mapping"
    if "anyOf" in part:
        return " or ".join(dict.fromkeys(_values(one) for one in part["anyOf"] if one.get("type") != "null"))
    if "enum" in part:
        return " or ".join(f"`{value}`" for value in part["enum"])
    names = {"integer": "whole number", "number": "number", "boolean": "true or false", "string": "text"}
    names |= {"object": "mapping", "array": "list"}
    of = f" of {_values(part['items'])}" if part.get("items") else ""
    return names.get(part.get("type", ""), "any") + of


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


# names of options


def _names() -> str:
    """The options that a flag of `generate` or a field of a request calls otherwise."""
    flags = {option: f"--{flag.replace('_', '-')}" for flag, option in request.FLAGS.items()}
    fields: dict[str, list[str]] = {}
    for field in _requests():
        fields.setdefault(SYNONYMS.get(field, field), []).append(field)
    rows = []
    for option in sorted(Options.model_fields):
        flag, names = flags.get(option, f"--set {option}=…"), fields.get(option, [])
        if flag.removeprefix("--") not in (option.replace("_", "-"), f"set {option}=…") or names not in ([], [option]):
            rows.append(f"| `{option}` | `{flag}` | {' or '.join(f'`{name}`' for name in names)} |")
    return (
        "An option of a call has one name in Python, in files, on the command line (a flag, or `--set NAME=VALUE`) "
        "and in a request, but for these. Other options, and those of loading, are no fields of a request.\n\n"
        "| option | `specdec generate` | request |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"
    )


def _requests() -> list[str]:
    return [*{**protocol.Generate.model_fields, **protocol.ChatRequest.model_fields}]


# errors


def error_list() -> str:
    """The tree of errors, and every message in the source."""
    about = (
        "# Errors\n\n"
        "Everything that specdec raises on purpose is a `SpecdecError`. A message names the argument, what was "
        "expected, what came, and the way out. Errors about arguments come before any work is done. On the command "
        "line an error is one line on standard error; `--debug` shows where it came from.\n\n"
        "```text\n" + _tree() + "\n```\n\n"
        "Every message in the source follows, so that the search finds yours. `…` stands for what depends on the "
        "call.\n"
    )
    found: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for kind, message in messages(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault(kind, set()).add(message)
    page = [about]
    for kind in KINDS:
        rows = "".join(f"- {_escaped(message)}\n" for message in sorted(found.get(kind, ()), key=_by_words))
        if rows:
            page.append(f"## {kind}\n\n{getattr(errors, kind).__doc__.strip()}\n\n{rows}")
    return "\n".join(page)


def _tree() -> str:
    """The tree in the docstring of `specdec.errors`."""
    return (errors.__doc__ or "").partition("\n\n")[2].strip()


def messages(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Each error that the code makes: its kind, and its message with … for what is not known beforehand."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        texts = [_literal(argument) for argument in node.args]
        if name in KINDS and texts and (texts[0] or "").strip("… "):
            yield name, str(texts[0])
        elif name.removesuffix(".of") in KINDS and name.endswith(".of") and len(texts) >= 2:
            named, expected, *others = (text or "…" for text in texts)
            way_out = f": {others[1]}" if len(others) > 1 else ""
            yield name.removesuffix(".of"), f"`{named}` must be {expected}, got …{way_out}"


def _literal(node: ast.expr) -> str | None:
    """The text of an expression as far as it stands in the source."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_literal(part) or "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (_literal(node.left) or "…") + (_literal(node.right) or "…")
    return None


KINDS = tuple(
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.SpecdecError) and kind is not errors.SpecdecError
)


# classes

_CLASSES: dict[str, tuple[str, dict[str, list[str]]]] = {
    "reference/api.md": (
        "# SpecGenerator\n\nThe main names of `specdec`. Arguments of calls are in [Options and files](options.md).",
        {
            "": [
                *("specdec.generator.generator.SpecGenerator", "specdec.generator.generation.Generation"),
                *("specdec.generator.generation.Event", "specdec.core.stats.Stats", "specdec.generator.job.Job"),
                "specdec.options.load.Loading",
            ],
            "Constraints": [
                "specdec.decoding.strategies.constraints.PhrasalConstraint",
                "specdec.decoding.strategies.constraints.DisjunctiveConstraint",
            ],
        },
    ),
    "reference/pipelines.md": (
        "# Pipelines\n\nThe names of `specdec.pipelines`.",
        {
            "": [
                *(f"specdec.pipelines.summaries.summarize.{name}" for name in ("Summarizer", "Summaries", "Summary")),
                *(f"specdec.pipelines.speech.transcribe.{name}" for name in ("Transcriber", "Transcription")),
                "specdec.pipelines.speech.live.Live",
            ],
        },
    ),
    "reference/types.md": (
        "# Types for extensions\n\nThe types for your own drafts, strategies and schedules. "
        "[Extending](../extending.md) has a complete example of each.",
        {
            "Drafts": ["specdec.core.drafts"],
            "Trees": ["specdec.core.tree"],
            "Rounds": ["specdec.core.outcome.Round", "specdec.core.outcome.SequenceRound"],
            "Strategies": ["specdec.core.strategies"],
            "Schedules": ["specdec.core.draft_schedules.fixed"],
        },
    ),
}
"""The first lines of a page, and its classes, or modules of classes, by section."""


def directives(path: str) -> str:
    """A page of classes for mkdocstrings."""
    about, sections = _CLASSES[path]
    page = [about]
    for title, names in sections.items():
        page += [f"## {title}"] if title else []
        for name in names:
            options = {"heading_level": 3 if title else 2}
            if isinstance(resolve_name(name), ModuleType):
                options |= {"show_root_heading": False, "show_root_toc_entry": False}
            page.append(f"::: {name}\n    options: {json.dumps(options)}")
    return "\n\n".join(page) + "\n"


def classes(path: str) -> str:
    """The same page for readers of the repository: docstrings, and tables of methods and properties."""
    about, sections = _CLASSES[path]
    page = [about]
    for title, names in sections.items():
        page += [f"## {title}"] if title else []
        for part in map(resolve_name, names):
            kinds = [part] if inspect.isclass(part) else vars(part).values()
            page += [_class(kind, "###" if title else "##") for kind in kinds if _is_public_class(kind, part)]
    return "\n\n".join(page) + "\n"


def _is_public_class(kind: Any, part: Any) -> bool:
    place = part.__name__ if isinstance(part, ModuleType) else part.__module__
    return inspect.isclass(kind) and kind.__module__ == place and not kind.__name__.startswith("_")


def _class(kind: Any, heading: str) -> str:
    source = Path(inspect.getfile(kind)).relative_to(SOURCE).as_posix()
    rows = ""
    for name, member in vars(kind).items():
        function = getattr(member, "func", None) or getattr(member, "fget", None)
        call = getattr(member, "__func__", member)
        if not name.startswith("_") and (text := inspect.getdoc(function or call)) and (function or callable(call)):
            shown = name if function else name + _arguments(call)
            first = text.partition("\n\n")[0]
            rows += f"| `{_pipes(shown)}` | {_pipes(_escaped(first))} |\n"
    table = f"\n\n| | |\n| --- | --- |\n{rows}".rstrip() if rows else ""
    call = f"`{kind.__name__}{_arguments(kind)}`, [source](../../specdec/{source})"
    return f"{heading} {kind.__name__}\n\n{call}\n\n{inspect.getdoc(kind)}{table}"


_OBJECT = type("_Object", (), {"__repr__": lambda _: "…"})()  # stands for a default that is an object
_PLAIN = (str, int, float, bool, tuple, type(None), type)  # `Parameter.empty` is a type


def _arguments(call: Any) -> str:
    """A signature without types; nothing for protocols and other classes that have none."""
    if getattr(call, "_is_protocol", False) or (inspect.isclass(call) and issubclass(call, dict)):
        return ""
    signature, arguments = inspect.signature(call), []
    for argument in signature.parameters.values():
        if type(argument.default) not in _PLAIN:
            argument = argument.replace(default=_OBJECT)
        if argument.name not in ("self", "cls"):
            arguments.append(argument.replace(annotation=argument.empty))
    return str(signature.replace(parameters=arguments, return_annotation=signature.empty))


# text


def _pipes(text: str) -> str:
    return text.replace("|", "\\|")


def _escaped(text: str) -> str:
    """Text as one paragraph, in which HTML means nothing."""
    return re.sub(r"<(?=[\w/!])", "&lt;", " ".join(text.split()))


def _by_words(text: str) -> str:
    return re.sub(r"\W", "", text).lower()


def changes() -> str:
    """CHANGELOG.md under a title of the site."""
    return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("# Changelog", "# Changes", 1)


WRITTEN: dict[str, Callable[[], str]] = {"reference/cli.md": command_line, "reference/options.md": options}
WRITTEN |= {path: partial(classes, path) for path in _CLASSES}
PAGES: dict[str, Callable[[], str]] = {"reference/errors.md": error_list, "changelog.md": changes}
PAGES |= {path: partial(directives, path) for path in _CLASSES}


if __name__ == "__main__":
    for path, make in WRITTEN.items():
        (ROOT / "docs" / path).write_text(make(), encoding="utf-8")
