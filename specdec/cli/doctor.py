"""`specdec doctor`: what this machine, this installation and a pair are fit for."""

from __future__ import annotations

import json
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.style import Style

from specdec.cli.flags import (
    Backend,
    DeviceMap,
    Dtype,
    ExactnessName,
    GgufFile,
    Method,
    Quantization,
    RemoteCode,
    own_pairs,
)
from specdec.cli.load import load
from specdec.cli.request import read_request
from specdec.cli.show import PROMPT, write
from specdec.cli.terminal import FAILED, OK, Debug, Quiet, loading
from specdec.errors import SpecdecError
from specdec.options.versions import versions

if TYPE_CHECKING:
    from specdec.bench.doctor import Finding
    from specdec.generator.generator import SpecGenerator

MARKS = {"good": ("✓", Style(color="green")), "note": ("·", PROMPT), "bad": ("✗", Style(color="red", bold=True))}
_WIDTH = 16  # of names


def doctor(
    ctx: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="Model to examine: hub id, folder, GGUF file, or zoo:NAME.",
            autocompletion=own_pairs,
        ),
    ] = None,
    draft_model: Annotated[str | None, typer.Option(help="Draft model: hub id, folder, or zoo:NAME.")] = None,
    method: Method = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Prompt of the estimate; repeatable; code by default.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Approximate duration of the estimate.")] = 10.0,
    dtype: Dtype = None,
    quantization: Quantization = None,
    gguf_file: GgufFile = None,
    backend: Backend = None,
    exactness: ExactnessName = None,
    device_map: DeviceMap = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
    trust_remote_code: RemoteCode = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Examine the machine, the installation and a pair of models.

    Prints install commands for missing parts, and estimates the pair's speedup.

    Exit code 1: something is wrong; see the line with ✗.
    """
    found: list[Finding] = []
    for finding in _examine(ctx.params, quiet=quiet):
        if not json_:
            _show(finding, headed=not found or found[-1].section != finding.section)
        found.append(finding)
    if json_:
        whole = {"findings": [asdict(finding) for finding in found], "versions": versions()}
        write(Console(), json.dumps(whole, ensure_ascii=False) + "\n")
    return FAILED if any(finding.state == "bad" for finding in found) else OK


def _examine(params: Mapping[str, Any], *, quiet: bool) -> Iterator[Finding]:
    """Findings as they come, with a sign of life before each."""
    with loading("looking at the machine", quiet=quiet):
        from specdec.bench import doctor

        here = [*doctor.machine(), *doctor.installation()]
    yield from here
    if params["target"] is None:
        return
    flags = {**params, "set_": None}
    request = read_request(defaultdict(lambda: None, flags))
    try:
        generator: SpecGenerator = load(request, quiet=quiet, schedule="cost")
    except SpecdecError as error:
        yield doctor.Finding("models", "loading", " ".join(str(error).split()), "bad")
        return
    yield from doctor.models(generator)
    with loading(f"decoding for {params['seconds']:.0f} seconds", quiet=quiet):
        measured = list(doctor.estimate(generator, params["prompt"] or (), seconds=params["seconds"]))
    yield from measured


def _show(finding: Finding, *, headed: bool) -> None:
    """One line, with the way out below it; under a heading where a section begins."""
    out = Console()
    mark, style = MARKS[finding.state]
    if headed:
        write(out, f"{finding.section}\n", Style(bold=True))
    write(out, f"  {mark} ", style)
    text = finding.text
    if out.is_terminal:  # long ones go on below where they began
        margin = _WIDTH + 5
        text = f"\n{'':<{margin}}".join(textwrap.wrap(text, max(out.width - margin, 30)))
    write(out, f"{finding.name:<{_WIDTH}} {text}\n")
    if finding.remedy is not None:
        write(out, f"    {'':<{_WIDTH}} → {finding.remedy}\n", PROMPT)
