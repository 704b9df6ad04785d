"""`specdec compile`: compiles the passes of models in advance."""

from __future__ import annotations

from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING

import typer

from specdec.cli import flags
from specdec.cli.request import are_here, choose_draft, loading_flags
from specdec.cli.terminal import FAILED, OK, Bar, duration, fail, loading, remark, say

if TYPE_CHECKING:
    from specdec.generator.generator import SpecGenerator

_SECONDS = 60.0  # per model, about


@flags.takes("draft dtype quantization gguf_file trust_remote_code quiet")
def compile_(
    ctx: typer.Context,
    target: str = flags.target("Hub id, folder, GGUF file, or zoo:NAME (specdec zoo lists them).", ...),
) -> int:
    """Compile the passes of TARGET and its draft model. It takes 20 to 60 seconds each, once per architecture,
    size and dtype.
    """
    from specdec import kernels
    from specdec.generator.generator import SpecGenerator

    if (reason := kernels.lack()) is not None:
        return fail(f"error: nothing can be compiled here, {reason}", FAILED)
    began, draft = monotonic(), choose_draft(ctx.params, {}, target, {})
    with loading(f"loading {target}", downloads=not are_here(target, draft)):
        generator = SpecGenerator.from_pretrained(target, draft, backend="compiled", **loading_flags(ctx.params))
    try:
        ready = _wait(generator)
    except KeyboardInterrupt:
        say("compiling goes on in the background")
        raise
    if not ready:
        return fail("error: not everything could be compiled", FAILED)
    remark(f"ready after {duration(monotonic() - began)}: --backend auto and compiled use it with these options")
    return OK


def _wait(generator: SpecGenerator) -> bool:
    """Waits for compiled code, with an estimated bar; returns whether all models run on it."""
    drafts = generator.draft.models if generator.draft is not None else ()
    models, began = (generator.target, *drafts), monotonic()
    # Threads wait, so that Ctrl-C ends the process.
    threads = [Thread(target=model.wait_until_compiled, daemon=True) for model in models]
    for thread in threads:
        thread.start()
    with Bar() as notify:
        while running := [thread for thread in threads if thread.is_alive()]:
            running[0].join(0.5)
            done = len(models) - len(running)
            share = min((monotonic() - began) / _SECONDS, 0.95 * len(models))
            notify(max(share, done), len(models), f"{done} of {len(models)} compiled")
    return all(model.wait_until_compiled(0) for model in models)
