"""`specdec summarize`: summaries of files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import typer
from typer import Argument, Option

from specdec.cli import flags
from specdec.cli.request import DEFAULT_NEW_TOKENS, STDIN, files_among, load_with_spinner, read_request, read_text
from specdec.cli.show import print_text, report, show_stats
from specdec.cli.terminal import FAILED, INTERRUPTED, OK, Bar, fail, say
from specdec.cli.transcribe import check_output, make_folder, output_file, write_file
from specdec.core.stats import Stats, total
from specdec.errors import OptionError
from specdec.options import bundled_models

TEXTS = ("txt", "md", "rst")
ZOO = "zoo:python-summary"


@flags.takes(
    "draft num_draft_tokens schedule dtype quantization backend exactness device_map trust_remote_code prefix_cache",
    "config set_ stats quiet",
)
def summarize(
    ctx: typer.Context,
    files: list[str] | None = Argument(
        None, metavar="FILE", help="Texts or folders of them (txt, md, rst); - reads stdin."
    ),
    demo: bool = Option(False, "--demo", help=f"Summarize the bundled functions with {ZOO}."),
    model: str | None = flags.flag("Target: hub id, folder or GGUF file; may come from --config."),
    max_new_tokens: int | None = flags.flag(f"Length limit; by default the checkpoint's, or {DEFAULT_NEW_TOKENS}."),
    chunk_tokens: int | None = flags.flag("Read longer texts in chunks of at most this many tokens.", min=1),
    truncate: bool = Option(False, "--truncate", help="Read only the beginning of a long text."),
    template: str | None = flags.flag(
        "Prompt of the model, with {text} in it, and perhaps {words}, which the limit leaves."
    ),
    batch_size: int = Option(8, min=1, help="Texts or chunks that are decoded together."),
    format: Literal["text", "json"] = Option("text", help="Output: text, or one JSON object."),
    output_dir: Path | None = flags.flag("Folder for NAME.txt or .json."),
    *,
    config: Path | None,
    stats: bool,
) -> int:
    """Summarize texts of any length. The summaries are the same with and without a draft.

    Files that cannot be read are reported on stderr; the others are summarized, and the exit code is 1.
    """
    from specdec.pipelines.summaries.summarize import TASK, Summarizer, batch_seeds

    if demo and files:
        raise OptionError("--demo has its own texts: leave out the files, or --demo")
    target = model or (ZOO if demo and config is None else None)
    request = read_request({**ctx.params, "target": target}, argument="--model", new_tokens=None)
    if not files and not demo:
        raise OptionError("no file was named: pass FILE, - to read stdin, or --demo for bundled texts")
    names = files_among(files or [], TEXTS)
    check_output(names, format, output_dir, files or [])
    texts = bundled_models.functions() if demo else read_text_files(names)
    make_folder(output_dir)
    generator = load_with_spinner(request, task=TASK)
    summarizer = Summarizer(generator, template=template, chunk_tokens=chunk_tokens)
    request = replace(request, options=summarizer.with_limit(request.options))
    options, code = {**request.options, "truncation": truncate}, OK if len(texts) >= len(names) else FAILED
    documents, counts, bar, all_names = list[dict[str, Any]](), list[Stats](), Bar(), list(texts)
    seeds = batch_seeds(generator.options(**request.options), len(texts)) or []
    rows = len(seeds) // max(len(texts), 1)  # for each text
    try:
        for first in range(0, len(texts), batch_size):
            batch = all_names[first : first + batch_size]
            if seeds:
                options["seed"] = seeds[first * rows : (first + len(batch)) * rows]

            def hear(done: int, whole: int, first: int = first, batch: Sequence[str] = batch) -> None:
                bar(first + len(batch) * done / whole, len(texts), f"summarizing {', '.join(batch)}")

            options["progress"] = hear
            with bar:
                summaries = summarizer.summarize([texts[name] for name in batch], batch_size=batch_size, **options)
            counts.append(summaries.stats)
            for name, summary in zip(batch, summaries.documents, strict=True):
                facts = {"file": name, "summary_text": summary.texts[0], "summaries": summary.texts}
                documents.append({**facts, "finish_reasons": summary.finish_reasons, "parts": summary.parts})
                if output_dir is not None:
                    content = "\n\n".join(summary.texts)
                    content = content if format == "text" else json.dumps(documents[-1], ensure_ascii=False)
                    write_file(output_file(name, format, output_dir, files or []), content)
                for text in summary.texts if format == "text" and output_dir is None else ():
                    print_text(text, name if len(texts) > 1 else None)
    except KeyboardInterrupt:
        place = "" if output_dir is None else f" and in {output_dir}"
        say(f"{len(documents)} of {len(texts)} are done{place}; leave these files out to resume")
        code = INTERRUPTED
    if documents and format == "json" and output_dir is None:
        report({"documents": documents}, request, total(counts))
    if documents and stats:
        show_stats(total(counts))
    return code


def read_text_files(names: Sequence[str]) -> dict[str, str]:
    """The texts of files, by name; files that are no text or empty are reported on stderr.

    Raises OptionError where no text is left, or a file was named twice.
    """
    texts: dict[str, str] = {}
    for name in names:
        if name in texts:
            raise OptionError(f"{name} was named twice: leave one out")
        try:
            if not (text := read_text(name)).strip():
                source = "standard input" if name == STDIN else name
                raise OptionError(f"{source} is empty: there is nothing to summarize")
            texts[name] = text
        except OptionError as error:
            if name == names[-1] and not texts:
                raise
            fail(f"error: {error}", FAILED)
    return texts
