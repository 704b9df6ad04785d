"""`specdec summarize`: files in, summaries out."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from specdec.cli.load import load
from specdec.cli.request import DEFAULT_NEW_TOKENS, METHODS, Request, read_request, read_text
from specdec.cli.show import print_text, settings, stats_fields, stats_table, versions, write
from specdec.cli.terminal import OK, Debug, Quiet, loading, say
from specdec.errors import OptionError

if TYPE_CHECKING:
    from specdec.pipelines import Summaries, Summarizer


def summarize(
    ctx: typer.Context,
    files: Annotated[list[str] | None, typer.Argument(metavar="FILE…", help="Text files; - reads stdin.")] = None,
    model: Annotated[str | None, typer.Option(help="Hub id or folder; may come from --config.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="A smaller model: hub id or folder.")] = None,
    method: Annotated[
        str | None, typer.Option(help=f"{METHODS}. auto: draft if there is a draft model, else suffix.")
    ] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="Most tokens to draft per round.")] = None,
    schedule: Annotated[str | None, typer.Option(help="heuristic, constant, confidence or cost.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help=f"Length limit; else the checkpoint's, or {DEFAULT_NEW_TOKENS}.")
    ] = None,
    chunk_tokens: Annotated[
        int | None, typer.Option(min=1, help="Read longer texts in pieces of so many tokens, if the model takes more.")
    ] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Read only the beginning of a long text.")] = False,
    template: Annotated[str | None, typer.Option(help="What the model reads, with {text} in it.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts, or pieces of one, that are decoded together.")] = 8,
    reference: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="A good summary of each FILE, in order, for ROUGE.")
    ] = None,
    format: Annotated[Literal["text", "json"], typer.Option(help="text, or one JSON object.")] = "text",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 …")] = None,
    quantization: Annotated[str | None, typer.Option(help="int8, int8-weight, nf4 or fp4.")] = None,
    device_map: Annotated[str | None, typer.Option(help="cpu, cuda, auto …")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML: target, draft, method and options. Flags win.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other option of generate; repeatable.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="A table of statistics on stderr.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with a model.")
    ] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Summarise texts of any length; the summaries are the model's own, whatever draft helps it."""
    flags = defaultdict(lambda: None, {**ctx.params, "target": model})
    request = read_request(flags, named="--model", new_tokens=None)
    if not files:
        raise OptionError("no file was named: pass FILE, or - to read stdin")
    texts, references = read_files(files), read_files(reference or [])
    if references and len(references) != len(texts):
        raise OptionError.of("--reference", f"given once for each of {len(texts)} files", list(references))
    if references:
        check_rouge()
    summarizer = make(request, quiet=quiet, template=template, chunk_tokens=chunk_tokens)
    options = {**request.options, "batch_size": batch_size, "truncation": truncate}
    found = []
    for names in batches(list(texts), batch_size):
        with loading(f"summarizing {', '.join(names)}", quiet=quiet):
            found.append(summarizer.summarize([texts[name] for name in names], **options))
        if format == "text":
            print_summaries(names, found[-1], headings=len(texts) > 1)
    conclude(request, texts, list(references.values()), found, as_json=format == "json", stats=stats)
    return OK


def read_files(names: Sequence[str]) -> dict[str, str]:
    """The texts of files, by name; raises OptionError for what is no text, or empty, or named twice."""
    found: dict[str, str] = {}
    for name in names:
        if name in found:
            raise OptionError(f"{name} was named twice: leave one out")
        found[name] = read_text(name)
        if not found[name].strip():
            raise OptionError(f"{'standard input' if name == '-' else name} is empty: there is nothing to summarize")
    return found


def check_rouge() -> None:
    """Raises SpecdecError where ROUGE cannot be measured."""
    from specdec.pipelines.scoring import scorer

    scorer()


def make(request: Request, *, quiet: bool, **how: Any) -> Summarizer:
    """The summarizer that a request names, with a length limit."""
    from specdec.pipelines.summarize import TASK, Summarizer

    generator = load(request, quiet=quiet, task=TASK)
    limits = generator.options(**request.options)
    if limits.max_new_tokens is None and limits.max_length is None:
        request.options["max_new_tokens"] = DEFAULT_NEW_TOKENS
    return Summarizer(generator, **how)


def batches(names: list[str], size: int) -> Iterator[list[str]]:
    """The names, so many at a time."""
    for first in range(0, len(names), size):
        yield names[first : first + size]


def print_summaries(names: Sequence[str], found: Summaries, *, headings: bool) -> None:
    """Every summary, under its file's name where there are several files."""
    for name, summary in zip(names, found.documents, strict=True):
        for text in summary.texts:
            print_text(text, name if headings else None)


def conclude(
    request: Request,
    texts: dict[str, str],
    references: list[str],
    found: Sequence[Summaries],
    *,
    as_json: bool,
    stats: bool,
) -> None:
    """What is told when all summaries are there: the JSON object, ROUGE, statistics."""
    from specdec.pipelines import rouge
    from specdec.pipelines.stats import total

    documents = [document for part in found for document in part.documents]
    scores = rouge([document.texts[0] for document in documents], references) if references else None
    counts = total([part.stats for part in found])
    if as_json:
        rows = [
            {"file": name, "summary_text": d.texts[0], "summaries": d.texts, "parts": d.parts}
            for name, d in zip(texts, documents, strict=True)
        ]
        whole = {"documents": rows, "rouge": scores, "stats": stats_fields(counts)}
        whole |= {"settings": settings(request, counts), "versions": versions()}
        write(Console(), json.dumps(whole, ensure_ascii=False) + "\n")
    elif scores:
        say(" · ".join(f"{kind} {score:.3f}" for kind, score in scores.items()))
    if stats:
        Console(stderr=True).print(stats_table(counts))
