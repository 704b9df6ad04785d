"""`specdec batch`: a file of rows, and the same rows with their answers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import inf
from pathlib import Path
from signal import SIGTERM
from typing import TYPE_CHECKING, Any, Literal

import typer
from typer import Argument, Option

from specdec.cli import flags
from specdec.cli.request import DEFAULT_NEW_TOKENS, CommandRequest, passed, read_request, refuse_idle
from specdec.cli.serve import plain_name
from specdec.cli.terminal import FAILED, INTERRUPTED, OK, Bar, Interrupt, duration, loading, remark, say
from specdec.cli.transcribe import choose_model, read_speech
from specdec.errors import OptionError

if TYPE_CHECKING:
    from specdec.batch import BatchSpec, Progress, Source

TaskName = Literal["generate", "chat", "summarize", "transcribe"]
_TEXT = ("generate", "chat", "summarize")
# Flag -> the tasks that have it.
ONLY = {
    "system": ("chat",),
    "template": ("summarize",),
    "chunk_tokens": ("summarize",),
    **dict.fromkeys(("config", "sample", "temperature", "top_k", "top_p"), _TEXT),
}


@flags.takes(
    "draft num_draft_tokens schedule max_new_tokens sample temperature top_k top_p",
    "dtype quantization backend exactness device_map trust_remote_code prefix_cache memory config set_ quiet",
)
def batch(
    ctx: typer.Context,
    source: Path = Argument(..., metavar="IN", help="Input rows: .jsonl, .parquet, or .txt with one row per line."),
    out: Path = Argument(..., metavar="OUT", help="The same rows with their answers: .jsonl."),
    task: TaskName | None = flags.flag(
        "generate (default), chat, summarize or transcribe; none for OpenAI batch files.", metavar="TASK"
    ),
    model: str | None = flags.flag("Target: hub id, folder, or zoo:NAME; may come from --config."),
    field: str | None = flags.flag(
        "Input field of a row; by default prompt, messages, text or audio, depending on the task."
    ),
    system: str | None = flags.flag("System message of each chat.", metavar="TEXT"),
    template: str | None = flags.flag("Prompt of a summary, with {text} in it."),
    chunk_tokens: int | None = flags.flag("Summarize longer texts in chunks of this many tokens.", min=1),
    seed: int | None = flags.flag("Seed of sampling (0), from which every row gets its own."),
    at_once: int = Option(32, min=1, help="Rows that are decoded together."),
    row_stats: bool = Option(
        False, "--row-stats", help="Add passes, drafts and seconds to every row; they differ between runs."
    ),
    overwrite: bool = Option(False, "--overwrite", help="Start over, even if OUT exists."),
) -> int:
    """Answer every row of a file. After Ctrl-C or a kill, the same command resumes.

    A row that fails has the reason in its field `error`; the others are answered, and the exit code is 1.
    """
    request = read_task(ctx.params)
    with loading("", quiet=True), Interrupt(SIGTERM) as interrupt, Bar() as notify:
        from specdec.batch import Source, run_batch

        def report(done: Progress) -> None:
            pace = f"{done.done}/{done.total} rows, {rates(done)}" if done.seconds else f"loading {request.target}"
            notify(done.done, done.total, pace)

        rows = Source.of(source)
        spec = make_spec(request, rows, ctx.params)
        try:
            how: dict[str, Any] = {"at_once": at_once, "overwrite": overwrite, "tell": report}
            done = run_batch(rows, out, spec, **how, stop=lambda: interrupt.is_set)
        except KeyboardInterrupt:  # the second Ctrl-C: rows under way are lost
            say("ended at once: run the same command to resume")
            os._exit(INTERRUPTED)
    earlier = f", {done.before} before" if done.before else ""
    answers = f"{done.done - done.before} rows in {duration(done.seconds)} ({rates(done)})"
    remark(f"{answers}{earlier}, {done.failed} failed")
    for number, reason in done.failures:
        say(f"error: row {number + 1}: {reason}", "red")
    if (more := done.failed - len(done.failures)) > 0:
        say(f"error: {more} more rows, each with its `error` in {out}", "red")
    if done.done < done.total:
        say(f"{done.total - done.done} rows are left, run the same command to resume")
        return INTERRUPTED
    return FAILED if done.failed else OK


def read_task(params: Mapping[str, Any]) -> CommandRequest:
    """The models and the options of all rows; raises OptionError for flags of another task."""
    task = params["task"] or "generate"
    for flag, tasks in ONLY.items():
        if task not in tasks:
            refuse_idle(params, [flag], f"is for the task {' or '.join(tasks)}, and this is {task}: leave it out")
    if task == "transcribe":
        return read_speech({**params, "model": choose_model(params["model"], demo=False), "task": None})
    limit = None if task == "summarize" else DEFAULT_NEW_TOKENS
    return read_request({**params, "target": params["model"]}, argument="--model", new_tokens=limit, seed=0)


def make_spec(request: CommandRequest, rows: Source, params: Mapping[str, Any]) -> BatchSpec:
    """The task for every row; the first row shows whether the file has requests in OpenAI's form."""
    from specdec.batch import BatchSpec

    task = params["task"] or "generate"
    if {"custom_id", "body"} <= next(rows.read("text")).fields.keys():
        if params["task"] is not None:
            raise OptionError(f"{rows.path} has requests in OpenAI's form, which name their task: leave out --task")
        if params["field"] is not None:
            raise OptionError(f"{rows.path} is an OpenAI batch file, which names its fields: leave out --field")
        why = f"is for prompts, and {rows.path} has requests in OpenAI's form, which set it: leave it out"
        refuse_idle(params, ["max_new_tokens", "sample"], why)
        task = "openai"
    options = dict(request.options)
    seed = options.pop("seed", 0)
    if not isinstance(seed, int):
        raise OptionError.of("seed", "one number, from which every row gets its own", seed)
    return BatchSpec(
        task,
        request.target,
        request.draft,
        options=options,
        loading=request.loading,
        more=passed(params, ("system", "template", "chunk_tokens")),
        seed=seed,
        name=plain_name(params["model"] or request.target),
        field=params["field"],
        folder=str(rows.path.parent.absolute()),
        row_stats=params["row_stats"],
    )


def rates(done: Progress) -> str:
    seconds = done.seconds or inf
    return f"{(done.done - done.before) / seconds:.1f} rows/s, {done.new_tokens / seconds:.0f} tokens/s"
