"""`specdec bench` measures a matrix of settings, `specdec tune` finds the best schedule of one pair."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from specdec.cli import flags
from specdec.cli.request import COPYING, WORDS, passed
from specdec.cli.show import write
from specdec.cli.terminal import FAILED, MISMATCH, OK, counting, fail, loading, say
from specdec.core.draft_schedules import SCHEDULES
from specdec.errors import OptionError
from specdec.options.resolve import read_yaml

# Parameters that are keys of a suite.
KEYS = (
    *("imports", "targets", "drafts", "strategies", "temperatures", "prompts", "batches"),
    *("max_new_tokens", "repeats", "seed", "near_tie"),
)
DRAFTS = f"Hub id, folder, zoo:python-code, {', '.join(WORDS)} or {COPYING[0]}+MODEL"
WAYS = ", ".join(SCHEDULES)

# Flags of both commands.
OUT = Option(None, help="Folder for samples and report; bench-NAME by default.")
PROMPTS = Option(None, help="code, copy, text, a text file or JSON lines (Spec-Bench, HumanEval, GSM8K); repeatable.")
COUNT = Option(None, min=1, help="Number of prompts from every source.")
TOKENS = Option(None, min=1, help="New tokens per prompt.")
REPEATS = Option(None, min=1, help="Measurements of every request.")


@flags.takes("dtype quantization gguf_file backend exactness offload offload_folder quiet")
def bench(
    ctx: typer.Context,
    targets: list[str] | None = Argument(
        None, metavar="TARGET", help="Hub ids, folders, or zoo:python-code; may come from --config."
    ),
    config: Path | None = Option(None, help="YAML file of the matrix, as in configs/bench; flags win."),
    imports: list[str] | None = Option(
        None,
        "--import",
        metavar="MODULE",
        help="Import a module that registers your own drafts, schedules or strategies; repeatable.",
    ),
    drafts: list[str] | None = Option(None, "--draft", help=f"{DRAFTS}; repeatable."),
    schedule: list[str] | None = Option(None, help=f"How much to draft: {WAYS}; repeatable."),
    num_draft_tokens: list[int] | None = Option(
        None, min=1, help="Draft a constant number of tokens per round; repeatable."
    ),
    strategies: list[str] | None = Option(
        None, "--strategy", help="Decoding strategy: greedy, sample, or a YAML file of options; repeatable."
    ),
    temperatures: list[float] | None = Option(
        None, "--temperature", min=0, help="Sampling temperature; 0 is greedy; repeatable."
    ),
    prompts: list[str] | None = PROMPTS,
    count: int | None = COUNT,
    batches: list[int] | None = Option(None, "--batch", min=1, help="Prompts per call; repeatable."),
    max_new_tokens: int | None = TOKENS,
    repeats: int | None = REPEATS,
    seed: int | None = Option(None, help="Seed of sampling."),
    near_tie: float | None = Option(
        None, min=0, help="Accept texts that differ where the two best logits are at most this far apart."
    ),
    out: Path | None = OUT,
    restart: bool = Option(False, "--restart", help="Discard the samples in the folder."),
    *,
    quiet: bool,
) -> int:
    """Compare drafts with plain decoding. Speeds and texts are compared, and a report is written.

    After Ctrl-C or a kill, the same command resumes. Exit code 3: a text differs from that of plain decoding, and
    neither --near-tie nor a row-dependent target excuses it.
    """
    keys = suite_keys(ctx.params)
    with loading("reading the suite", quiet=quiet):
        from specdec.bench import exit_state, read_suite, results, run, write_report

        suite = read_suite(keys)
    folder = out or Path(f"bench-{suite.name}")
    if restart:
        with suppress(NotADirectoryError):  # the run raises its own error
            (folder / "samples.jsonl").unlink(missing_ok=True)
    with resumable(folder, without=" without --restart" if restart else ""), counting(quiet=quiet) as notify:
        found = results(run(suite, folder, notify))
    write(Console(), "".join(f"{line}\n" for line in lines(found)))
    say(f"report: {write_report(found, folder)}")
    return concluded(found, exit_state(found))


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The outcome as lines: every system of every group, measured or not, then the summary."""
    from specdec.bench import backends

    for group in found["groups"]:
        yield group["label"]
        failures = [failure for failure in found["failures"] if failure["group"] == group["label"]]
        names = [system["name"] for system in group["systems"]] + [failure["system"] for failure in failures]
        width = max(map(len, names), default=0)
        wide = max((len(backends(system)) for system in group["systems"]), default=0)
        for system in group["systems"]:
            speed = system["speedup"]
            words = f"  {speed['words']}" if speed else ""
            length = system["mean_acceptance_length"]
            words += f"  acceptance length {length:.2f}" if length is not None else ""
            measured = f"{system['name']:<{width}}  {system['ms_per_token']:8.2f} ms per token"
            yield f"  {measured}  {backends(system):<{wide}}{words}".rstrip()
        for failure in failures:
            yield f"  {failure['system']:<{width}}  not measured: {failure['error']}"
    yield from found["summary"]
    yield found["contention"]


def concluded(found: Mapping[str, Any], state: str) -> int:
    """The exit code; prints failures and the first mismatch on stderr."""
    for failure in found["failures"]:
        say(f"error: {failure['group']}, {failure['system']}: {failure['error']}", "red")
    wrong = [m for m in found["mismatches"] if m["excuse"] is None]
    if wrong:
        m = wrong[0]
        gap = "" if m["gap"] is None else f"; the two best logits are {m['gap']:.4g} apart there"
        more = f" ({len(wrong) - 1} more)" if len(wrong) > 1 else ""
        fail(
            f"error: mismatch in {m['group']}, {m['system']}: new token {m['position']} of request {m['batch']}, "
            f"row {m['row']}: plain wrote {m['plain']}, assisted {m['other']}{gap}{more}",
            MISMATCH,
        )
    return {"mismatch": MISMATCH, "failed": FAILED}.get(state, OK)


def suite_keys(params: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a suite: flags over those of the file of --config."""
    file = read_yaml(params["config"]) if params["config"] is not None else {}
    keys = passed(params, KEYS)
    if params["config"] is not None:
        file.setdefault("name", params["config"].stem)
    constant = {"schedule": "constant", "num_assistant_tokens": params.get("num_draft_tokens")}
    if schedules := [*(params.get("schedule") or []), *([constant] if params.get("num_draft_tokens") else [])]:
        keys["schedules"] = schedules
    if mode := passed(params):
        keys["modes"] = [mode]
    if params["count"] is not None:
        sets = keys.get("prompts", file.get("prompts", "code"))
        sets = sets if isinstance(sets, list) else [sets]
        named = [{"source": one} if isinstance(one, str) else one for one in sets]
        keys["prompts"] = [{**one, "count": params["count"]} for one in named]
    merged = {**file, **keys}
    if not merged.get("targets"):
        raise OptionError("no target was named: pass TARGET, or a --config file with `targets`")
    return merged


@contextmanager
def resumable(folder: Path | None, *, without: str = "") -> Iterator[None]:
    """Prints at Ctrl-C how to resume a run in this folder; `without` names a flag that would forget its samples."""
    try:
        yield
    except KeyboardInterrupt:
        if folder is not None:
            say(f"run the same command{without} to resume; the samples so far are in {folder}")
        raise


@flags.takes("dtype quantization gguf_file backend exactness offload offload_folder quiet")
def tune(
    ctx: typer.Context,
    target: str = Argument(..., metavar="TARGET", help="Hub id, folder, or zoo:python-code."),
    draft: str = Argument(..., metavar="DRAFT", help=f"{DRAFTS}."),
    prompts: list[str] | None = PROMPTS,
    count: int | None = COUNT,
    num_draft_tokens: list[int] | None = Option(None, min=1, help="Constant draft length to try; repeatable."),
    temperatures: float | None = Option(None, "--temperature", min=0, help="Sampling temperature; 0 is greedy."),
    batches: int | None = Option(None, "--batch", min=1, help="Prompts per call."),
    max_new_tokens: int | None = TOKENS,
    repeats: int | None = REPEATS,
    out: Path | None = OUT,
    *,
    quiet: bool,
) -> int:
    """Find the best draft schedule of a pair for your prompts. It is `method: none` where drafting does not pay.

    Prints a table on stderr, and on stdout a file for `specdec generate --config`.
    """
    own = {"targets": target, "drafts": draft, "config": None, "num_draft_tokens": None}
    given = suite_keys({**ctx.params, **own})
    with loading("reading the prompts", quiet=quiet):
        import yaml

        from specdec.bench import exit_state, results, run, write_report
        from specdec.bench.tune import LENGTHS, best, candidates, ranked, snippet

        suite = candidates(target, draft, given, num_draft_tokens or LENGTHS)
    with tempfile.TemporaryDirectory() as scratch, resumable(out), counting(quiet=quiet) as notify:
        found = results(run(suite, out or Path(scratch), notify))
        if out is not None:
            write_report(found, out)
    if any(system["speedup"] for system in found["groups"][0]["systems"]):
        chosen = best(found)
        Console(stderr=True, quiet=quiet).print(schedules_table(ranked(found), chosen))
        say(f"{found['contention']}")
        write(Console(), f"# {verdict(chosen)}\n" + yaml.safe_dump(snippet(target, chosen), sort_keys=False))
    return concluded(found, exit_state(found))


def schedules_table(systems: list[dict[str, Any]], chosen: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("schedule", "ms per token", "speedup", "95% interval", "acceptance length", "accepted"):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for system in systems:
        speed = system["speedup"]
        name = "off" if speed is None else system["name"].rpartition(", ")[2]
        cells = [f"{name}{' ←' if system is chosen else ''}", f"{system['ms_per_token']:.2f}"]
        if speed:
            interval = "" if speed["low"] is None else f"{speed['low']:.2f} to {speed['high']:.2f}"
            length, rate = (system[n] for n in ("mean_acceptance_length", "draft_acceptance_rate"))
            accepted = ("", "") if length is None else (f"{length:.2f}", f"{rate:.0%}")
            cells += [f"{speed['value']:.2f}×", interval, *accepted]
        table.add_row(*cells)
    return table


def verdict(chosen: Mapping[str, Any]) -> str:
    if chosen["speedup"] is None:
        return "no schedule is clearly faster than plain decoding here: leave the draft off"
    return str(chosen["speedup"]["words"])
