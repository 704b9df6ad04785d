"""`compile`: has the passes of models compiled before they are needed."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from specdec.cli.flags import Dtype, GgufFile, Quantization, RemoteCode
from specdec.cli.terminal import FAILED, OK, Debug, Quiet, duration, fail, loading, say


def compile_(
    target: Annotated[str, typer.Argument(help="Hub id, folder, GGUF file, or zoo:NAME (specdec zoo lists them).")],
    draft_model: Annotated[str | None, typer.Option(help="A smaller model: hub id, folder, or zoo:NAME.")] = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    gguf_file: GgufFile = None,
    trust_remote_code: RemoteCode = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Compile the passes of TARGET and its draft, about a minute each; from then on they run on that code."""
    from time import monotonic

    from specdec.generator import SpecGenerator

    given = {"dtype": dtype, "quantization": quantization, "gguf_file": gguf_file}
    how: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    began = monotonic()
    with loading(f"compiling {target}", quiet=quiet):
        generator = SpecGenerator.from_pretrained(
            target, draft_model, gear="compiled", trust_remote_code=trust_remote_code, **how
        )
        ready = generator.wait_until_compiled()
    if not ready:
        return fail("error: not everything could be compiled", FAILED)
    if not quiet:
        say(f"ready after {duration(monotonic() - began)}: --gear compiled, and auto, run on it with these options")
    return OK
