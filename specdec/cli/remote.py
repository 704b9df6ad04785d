"""`specdec bench --url`: a running server under load, ours or another's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from specdec.cli.show import write
from specdec.cli.terminal import FAILED, OK, fail, say
from specdec.errors import OptionError

if TYPE_CHECKING:
    from specdec.bench.remote import Workload
    from specdec.bench.runner import Notify

KEY = "OPENAI_API_KEY"
OWN = (
    *("url", "model", "concurrency", "rate", "requests", "chat", "beside_plain"),
    *("prompts", "count", "max_new_tokens", "temperature", "repeats", "seed", "out", "quiet", "debug"),
)


def check_flags(params: Mapping[str, Any]) -> None:
    """Raises OptionError for flags of the one kind of benchmark beside those of the other."""
    if params["url"] is None:
        idle = [name for name in OWN[1:7] if params[name]]
        if idle:
            raise OptionError(f"--{idle[0].replace('_', '-')} is about a running server: pass --url")
        return
    given = [name for name, value in params.items() if name not in OWN and value]
    if given:
        raise OptionError(f"--{given[0].replace('_', '-')} is about models here, and --url measures a server")
    if len(params["temperature"] or ()) > 1:
        raise OptionError("--temperature may be given once with --url")


def measure_server(params: Mapping[str, Any], progress: AbstractContextManager[Notify], folder: Path) -> int:
    """Measures, prints a line for each load, and writes the report into `folder`."""
    from specdec.bench.remote import measure
    from specdec.bench.remote_report import remote_lines, remote_results, write_remote_report

    workload = read_workload(params)
    with progress as notify:
        measured = measure(workload, notify)
    found = remote_results(workload, measured)
    write(Console(), "".join(f"{line}\n" for line in remote_lines(found)))
    say(f"report: {write_remote_report(found, folder)}")
    failed = sum(load["errors"] for load in found["loads"])
    return fail(f"error: {failed} requests failed", FAILED) if failed else OK


def read_workload(params: Mapping[str, Any]) -> Workload:
    """What the flags ask for; the only model of a server need not be named."""
    from specdec.bench.prompts import read_prompts
    from specdec.bench.remote import Load, Workload, models_of

    url, key = params["url"].rstrip("/").removesuffix("/v1"), os.environ.get(KEY)
    if not url.startswith(("http://", "https://")):
        raise OptionError.of("--url", "an address such as http://127.0.0.1:8000", params["url"])
    model = params["model"]
    if model is None:
        models = models_of(url, key)
        if len(models) != 1:
            raise OptionError(f"the server has several models, pass one as --model: {', '.join(models)}")
        [model] = models
    rates = params["rate"] or []
    loads = [Load(concurrency=number) for number in params["concurrency"] or ([] if rates else [1])]
    loads += [Load(rate=rate) for rate in rates]
    if params["beside_plain"]:
        plain = [Load(load.concurrency, load.rate, plain=True) for load in loads]
        loads = [one for pair in zip(plain, loads, strict=True) for one in pair]
    sources = params["prompts"] or ["code"]
    texts = [prompt.text for source in sources for prompt in read_prompts(source, params["count"] or 16)]
    return Workload(
        url=url,
        model=model,
        prompts=texts,
        loads=loads,
        key=key,
        chat=params["chat"],
        max_new_tokens=params["max_new_tokens"] or 64,
        temperature=(params["temperature"] or [0.0])[0],
        requests=params["requests"] or 16,
        repeats=params["repeats"] or 1,
        seed=params["seed"] or 0,
    )
