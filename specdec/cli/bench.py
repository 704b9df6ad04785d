"""`specdec bench` measures a matrix of settings; `specdec tune` finds the best schedule of one pair."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from specdec.cli.flags import Backend, Dtype, ExactnessName, GgufFile, Offload, OffloadFolder, Quantization
from specdec.cli.remote import KEY, check_flags, measure_server
from specdec.cli.request import COPYING, WORDS
from specdec.cli.show import write
from specdec.cli.terminal import FAILED, MISMATCH, OK, Debug, Quiet, counting, fail, loading, say
from specdec.core.draft_schedules import SCHEDULES
from specdec.errors import OptionError

# Flag of `bench` -> key of a suite.
FLAGS = {
    "target": "targets",
    "draft": "drafts",
    "strategy": "strategies",
    "temperature": "temperatures",
    "prompts": "prompts",
    "batch": "batches",
    "max_new_tokens": "max_new_tokens",
    "repeats": "repeats",
    "seed": "seed",
    "near_tie": "near_tie",
}
DRAFTS = f"Hub id, folder, zoo:python-code, {', '.join(WORDS)} or {COPYING[0]}+MODEL"
MODE_FLAGS = ("dtype", "quantization", "gguf_file", "offload", "offload_folder", "backend", "exactness")

Out = Annotated[Path | None, typer.Option(help="Folder for samples and report; bench-NAME by default.")]
Draft = Annotated[
    list[str] | None,
    typer.Option(help=f"{DRAFTS}; repeatable."),
]
PromptSource = Annotated[
    list[str] | None,
    typer.Option(help="code, copy, text, a text file or JSON lines (Spec-Bench, HumanEval, GSM8K); repeatable."),
]
Number = Annotated[int | None, typer.Option(min=1, help="Number of prompts from every source.")]
Tokens = Annotated[int | None, typer.Option(min=1, help="New tokens per prompt.")]
Repeats = Annotated[int | None, typer.Option(min=1, help="Measurements of every request.")]


def bench(
    ctx: typer.Context,
    target: Annotated[
        list[str] | None,
        typer.Argument(metavar="TARGET", help="Hub ids, folders, or zoo:python-code; may come from --config."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file of the matrix, as in configs/bench; flags win.")
    ] = None,
    draft: Draft = None,
    schedule: Annotated[
        list[str] | None, typer.Option(help=f"How much to draft: {', '.join(SCHEDULES)}; repeatable.")
    ] = None,
    num_draft_tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Draft a constant number of tokens per round; repeatable.")
    ] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help="Decoding strategy: greedy, sample, or a YAML file of options; repeatable.")
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0, help="Sampling temperature; 0 is greedy; repeatable.")
    ] = None,
    prompts: PromptSource = None,
    count: Number = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Prompts per call; repeatable.")] = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    gguf_file: GgufFile = None,
    offload: Offload = None,
    offload_folder: OffloadFolder = None,
    backend: Backend = None,
    exactness: ExactnessName = None,
    max_new_tokens: Tokens = None,
    repeats: Repeats = None,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling.")] = None,
    near_tie: Annotated[
        float | None,
        typer.Option(min=0, help="Accept texts that differ where the two best logits are at most this far apart."),
    ] = None,
    out: Out = None,
    restart: Annotated[bool, typer.Option("--restart", help="Discard the samples in the folder.")] = False,
    url: Annotated[
        str | None, typer.Option(help=f"Measure a running server instead, ours or another's; its key is in ${KEY}.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="One of the server's models.")] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at a time, for --url; repeatable.")
    ] = None,
    rate: Annotated[
        list[float] | None, typer.Option(min=0.001, help="Requests a second whatever becomes of them; repeatable.")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="How many for each of these; 16 by default.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask the server for chats instead of completions.")] = False,
    beside_plain: Annotated[
        bool, typer.Option("--beside-plain", help="Each also without the draft, in turn; specdec's server alone can.")
    ] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Compare drafts with plain decoding, or measure a server. Speeds and texts are compared, and a report is written.


    After Ctrl-C or a kill, the same command resumes. Exit code 3: a text differs from that of plain decoding, and
    neither --near-tie nor a row-dependent target excuses it.
    """
    check_flags(ctx.params)
    if url is not None:
        with loading("reading the prompts", quiet=quiet):
            from specdec.bench.extras import check_extras

            check_extras()
        return measure_server(ctx.params, counting(quiet=quiet), out or Path("bench-server"))
    keys = suite_keys(ctx.params)
    with loading("reading the suite", quiet=quiet):
        from specdec.bench import exit_state, read_suite, results, run, write_report

        suite = read_suite(keys)
    folder = out or Path(f"bench-{suite.name}")
    if restart:
        with suppress(NotADirectoryError):  # which the run tells
            (folder / "samples.jsonl").unlink(missing_ok=True)
    with resumable(folder, without=" without --restart" if restart else ""), counting(quiet=quiet) as notify:
        found = results(run(suite, folder, notify))
    write(Console(), "".join(f"{line}\n" for line in lines(found)))
    say(f"report: {write_report(found, folder)}")
    return concluded(found, exit_state(found))


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The outcome as text: every system of every group, then the summary."""
    from specdec.bench import backends

    for group in found["groups"]:
        yield group["label"]
        width = max((len(system["name"]) for system in group["systems"]), default=0)
        wide = max((len(backends(system)) for system in group["systems"]), default=0)
        for system in group["systems"]:
            speed = system["speedup"]
            words = f"  {speed['words']}" if speed else ""
            measured = f"{system['name']:<{width}}  {system['ms_per_token']:8.2f} ms per token"
            yield f"  {measured}  {backends(system):<{wide}}{words}".rstrip()
    yield from found["summary"]
    yield found["contention"]


def concluded(found: Mapping[str, Any], state: str) -> int:
    """The exit code, after a line on stderr for everything that went wrong."""
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
    """The keys of a suite: flags over the file of --config."""
    from specdec.options.generate import read_yaml

    file = read_yaml(params["config"]) if params["config"] is not None else {}
    keys: dict[str, Any] = {key: params[flag] for flag, key in FLAGS.items() if params.get(flag) not in (None, [], ())}
    if params["config"] is not None:
        file.setdefault("name", params["config"].stem)
    constant = {"schedule": "constant", "num_assistant_tokens": params.get("num_draft_tokens")}
    if schedules := [*(params.get("schedule") or []), *([constant] if params.get("num_draft_tokens") else [])]:
        keys["schedules"] = schedules
    if mode := {name: params[name] for name in MODE_FLAGS if params[name] is not None}:
        keys["modes"] = [mode]
    if params["count"] is not None:
        sets = keys.get("prompts", file.get("prompts", "code"))
        keys["prompts"] = [counted(source, params["count"]) for source in (sets if isinstance(sets, list) else [sets])]
    merged = {**file, **keys}
    if not merged.get("targets"):
        raise OptionError("no target was named: pass TARGET, or a --config file with `targets`")
    return merged


def counted(source: str | Mapping[str, Any], count: int) -> dict[str, Any]:
    """A prompt set with this many prompts."""
    return {**({"source": source} if isinstance(source, str) else source), "count": count}


@contextmanager
def resumable(folder: Path | None, *, without: str = "") -> Iterator[None]:
    """Tells at Ctrl-C how a run with this folder goes on; `without` is a flag that would forget its samples."""
    try:
        yield
    except KeyboardInterrupt:
        if folder is not None:
            say(f"run the same command{without} to resume; the samples so far are in {folder}")
        raise


def tune(
    ctx: typer.Context,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Hub id, folder, or zoo:python-code.")],
    draft: Annotated[str, typer.Argument(metavar="DRAFT", help=f"{DRAFTS}.")],
    prompts: PromptSource = None,
    count: Number = None,
    num_draft_tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Constant draft length to try; repeatable.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Prompts per call.")] = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    gguf_file: GgufFile = None,
    offload: Offload = None,
    offload_folder: OffloadFolder = None,
    backend: Backend = None,
    exactness: ExactnessName = None,
    max_new_tokens: Tokens = None,
    repeats: Repeats = None,
    out: Out = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Find the best draft schedule of a pair for your prompts. It is `method: none` where drafting does not pay.

    Prints a table on stderr, and on stdout a file for `specdec generate --config`.
    """
    given = suite_keys({**ctx.params, "config": None, "num_draft_tokens": None})
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
    """Every schedule, the fastest first."""
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
    """What was found, in words."""
    if chosen["speedup"] is None:
        return "no schedule is clearly faster than plain decoding here: leave the draft off"
    return str(chosen["speedup"]["words"])
