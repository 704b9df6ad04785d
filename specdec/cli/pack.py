"""`specdec pack`: writes a model as it is loaded."""

from __future__ import annotations

from pathlib import Path

import typer
from typer import Argument

from specdec.cli import flags
from specdec.cli.request import are_here, passed
from specdec.cli.terminal import OK, loading, remark


@flags.takes("dtype quantization gguf_file trust_remote_code quiet")
def pack_(
    ctx: typer.Context,
    target: str = flags.target("Hub id, folder, GGUF file, or zoo:NAME (specdec zoo lists them).", ...),
    out: Path = Argument(..., metavar="OUT", help="New folder for the packed model."),
) -> int:
    """Write TARGET into a folder that loads in seconds. Its weights in few bits are not rounded again."""
    with loading(f"packing {target}", downloads=not are_here(target, None)):
        from specdec.generator.pack import pack_model

        pack_model(target, out, **passed(ctx.params))
    size = sum(file.stat().st_size for file in out.iterdir())
    remark(f"{out} has {size / 1e9:.1f} GB: use it as TARGET or --draft")
    return OK
