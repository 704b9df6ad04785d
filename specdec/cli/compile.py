"""`compile`: has the passes of models compiled before they are needed."""

from __future__ import annotations

from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.cli.flags import Dtype, GgufFile, Quantization, RemoteCode
from specdec.cli.terminal import FAILED, OK, Debug, Quiet, counting, duration, fail, loading, say

if TYPE_CHECKING:
    from specdec.generator.generator import SpecGenerator

_SECONDS = 60.0  # that a model takes, about


def compile_(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="Hub id, folder, GGUF file, or zoo:NAME (specdec zoo lists them).")
    ],
    draft_model: Annotated[str | None, typer.Option(help="Draft model: hub id, folder, or zoo:NAME.")] = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    gguf_file: GgufFile = None,
    trust_remote_code: RemoteCode = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Compile the passes of TARGET and its draft model. It takes about a minute each, once per dtype."""
    from specdec import kernels
    from specdec.generator.generator import SpecGenerator

    if (missing := kernels.lack()) is not None:
        return fail(f"error: nothing can be compiled here, {missing}", FAILED)
    given = {"dtype": dtype, "quantization": quantization, "gguf_file": gguf_file}
    how: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    began = monotonic()
    with loading(f"loading {target}", quiet=quiet):
        generator = SpecGenerator.from_pretrained(
            target, draft_model, backend="compiled", trust_remote_code=trust_remote_code, **how
        )
    try:
        ready = _wait(generator, quiet=quiet)
    except KeyboardInterrupt:
        say("compiled models stay compiled: run the same command to compile the rest")
        raise
    if not ready:
        return fail("error: not everything could be compiled", FAILED)
    if not quiet:
        say(f"ready after {duration(monotonic() - began)}: --backend auto and compiled use it with these options")
    return OK


def _wait(generator: SpecGenerator, *, quiet: bool) -> bool:
    """Waits for compiled code, with about the time that it takes; whether all models run on it."""
    drafts = generator.drafter.models if generator.drafter is not None else ()
    models, began = (generator.target, *drafts), monotonic()
    waiting = [Thread(target=model.wait_until_compiled, daemon=True) for model in models]  # Ctrl-C leaves them
    for thread in waiting:
        thread.start()
    with counting(quiet=quiet) as notify:
        while left := [thread for thread in waiting if thread.is_alive()]:
            left[0].join(0.5)
            done = len(models) - len(left)
            share = min((monotonic() - began) / _SECONDS, 0.95 * len(models))
            notify(max(share, done), len(models), f"{done} of {len(models)} compiled")
    return all(model.wait_until_compiled(0) for model in models)
