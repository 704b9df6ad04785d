"""`specdec bench`: measures a matrix of settings beside plain decoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from typer import Argument, Option

from specdec.cli import flags
from specdec.cli.request import DRAFT_FLAGS, loading_flags, passed
from specdec.cli.show import write
from specdec.cli.terminal import FAILED, MISMATCH, OK, Bar, loading, say
from specdec.core.draft_schedules import SCHEDULES
from specdec.errors import OptionError
from specdec.options.drafts import SPELLINGS
from specdec.options.resolve import read_yaml

# Parameters that are keys of a suite.
KEYS = (
    *("imports", "targets", "drafts", "strategies", "temperatures", "prompts", "batches"),
    *("max_new_tokens", "repeats", "seed", "near_tie"),
)
WAYS = ", ".join(SCHEDULES)


@flags.takes(
    "dtype quantization gguf_file activations backend exactness", "offload offload_folder memory quiet", *DRAFT_FLAGS
)
def bench(
    ctx: typer.Context,
    targets: list[str] | None = Argument(
        None, metavar="TARGET", help="Hub ids, folders, or zoo:python-code; may come from --config."
    ),
    config: Path | None = flags.flag("YAML file of the matrix, as in configs/bench; flags win."),
    imports: list[str] | None = flags.flag(
        "Import a module that registers your own drafts, schedules or strategies; repeatable.",
        "--import",
        metavar="MODULE",
    ),
    drafts: list[str] | None = flags.flag(f"What drafts: {SPELLINGS}; repeatable.", "--draft"),
    schedule: list[str] | None = flags.flag(f"How much to draft: {WAYS}; repeatable."),
    num_draft_tokens: list[int] | None = flags.flag("Draft a constant number of tokens per round; repeatable.", min=1),
    strategies: list[str] | None = flags.flag(
        "Decoding strategy: greedy, sample, or a YAML file of options; repeatable.", "--strategy"
    ),
    temperatures: list[float] | None = flags.flag(
        "Sampling temperature; 0 is greedy; repeatable.", "--temperature", min=0
    ),
    prompts: list[str] | None = flags.flag(
        "code, copy, text, a text file (one a paragraph) or JSON lines (Spec-Bench, HumanEval, GSM8K); repeatable."
    ),
    count: int | None = flags.flag("Number of prompts from every source.", min=1),
    batches: list[int] | None = flags.flag("Prompts per call; repeatable.", "--batch", min=1),
    max_new_tokens: int | None = flags.flag("New tokens per prompt.", min=1),
    repeats: int | None = flags.flag("Measurements of every request.", min=1),
    seed: int | None = flags.flag("Seed of sampling."),
    near_tie: float | None = flags.flag(
        "Accept texts that differ where the two best logits are at most this far apart.", min=0
    ),
    out: Path | None = flags.flag("Folder for samples and results; bench-NAME by default."),
    restart: bool = Option(False, "--restart", help="Discard the samples in the folder."),
) -> int:
    """Compare drafts with plain decoding, in speed and in text.

    After Ctrl-C or a kill, the same command resumes. Exit code 3: a text differs from plain decoding's, and
    neither --near-tie nor a row-dependent target excuses it.
    """
    keys = suite_keys(ctx.params)
    with loading("reading the suite"):
        from specdec.bench import exit_state, read_suite, results, run, save

        suite = read_suite(keys)
    folder = out or Path(f"bench-{suite.name}")
    if restart:
        with suppress(NotADirectoryError):  # the run raises its own error
            (folder / "samples.jsonl").unlink(missing_ok=True)
    try:
        with Bar() as notify:
            content = results(run(suite, folder, notify))
    except KeyboardInterrupt:
        without = " without --restart" if restart else ""
        say(f"run the same command{without} to resume; the samples so far are in {folder}")
        raise
    write(Console(), "".join(f"{line}\n" for line in lines(content)))
    say(f"all figures: {save(content, folder)}")
    report_errors(content)
    return {"mismatch": MISMATCH, "failed": FAILED}.get(exit_state(content), OK)


def lines(content: Mapping[str, Any]) -> Iterator[str]:
    """The outcome as lines: every system of every group, measured or not, then the summary."""
    from specdec.bench import backends

    for group in content["groups"]:
        yield group["label"]
        failures = [failure for failure in content["failures"] if failure["group"] == group["label"]]
        names = [system["name"] for system in group["systems"]] + [failure["system"] for failure in failures]
        width = max(map(len, names), default=0)
        wide = max((len(backends(system)) for system in group["systems"]), default=0)
        for system in group["systems"]:
            speed = system["speedup"]
            words = f"  {speed['words']}" if speed else ""
            length = system["mean_acceptance_length"]
            words += f"  acceptance length {length:.2f}" if length is not None else ""
            figure = f"{system['name']:<{width}}  {system['ms_per_token']:8.2f} ms per token"
            yield f"  {figure}  {backends(system):<{wide}}{words}".rstrip()
        for failure in failures:
            yield f"  {failure['system']:<{width}}  not measured: {failure['error']}"
    yield from content["summary"]
    yield content["contention"]


def report_errors(content: Mapping[str, Any]) -> None:
    """Prints failures and the first mismatch without an excuse on stderr."""
    for failure in content["failures"]:
        say(f"error: {failure['group']}, {failure['system']}: {failure['error']}", "red")
    if wrong := [m for m in content["mismatches"] if m["excuse"] is None]:
        m = wrong[0]
        gap = "" if m["gap"] is None else f"; the two best logits are {m['gap']:.4g} apart there"
        more = f" ({len(wrong) - 1} more)" if len(wrong) > 1 else ""
        say(
            f"error: mismatch in {m['group']}, {m['system']}: new token {m['position']} of request {m['batch']}, "
            f"row {m['row']}: plain wrote {m['plain']}, assisted {m['other']}{gap}{more}",
            "red",
        )


def suite_keys(params: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a suite: the flags', over the keys of the file of --config."""
    config, lengths = params["config"], params["num_draft_tokens"]
    file = {} if config is None else {"name": config.stem, **read_yaml(config)}
    keys = passed(params, KEYS)
    schedules = list(params["schedule"] or [])
    if lengths:
        schedules.append({"schedule": "constant", "num_assistant_tokens": lengths})
    if schedules:
        keys["schedules"] = schedules
    if mode := loading_flags(params):
        keys["modes"] = [mode]
    if params["count"] is not None:
        sets = keys.get("prompts", file.get("prompts", "code"))
        sets = sets if isinstance(sets, list) else [sets]
        entries = [{"source": entry} if isinstance(entry, str) else entry for entry in sets]
        keys["prompts"] = [{**entry, "count": params["count"]} for entry in entries]
    merged = {**file, **keys}
    if not merged.get("targets"):
        raise OptionError("no target was named: pass TARGET, or a --config file with `targets`")
    return merged
