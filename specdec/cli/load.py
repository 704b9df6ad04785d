"""Loads models for a command, with a spinner."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.cli.request import Request, locate
from specdec.cli.terminal import loading
from specdec.options.load import Loading

if TYPE_CHECKING:
    from specdec.generator.generator import SpecGenerator


def first_of_job(request: Request) -> None:
    """Returns in the first of the processes that share the target; the others run in here until it ends."""
    if request.loading.get("tp_plan") is not None:
        from specdec.parallel.load import leading

        leading(Loading(tp_plan=request.loading["tp_plan"]))


def load(request: Request, *, quiet: bool, **more: Any) -> SpecGenerator:
    """The generator of a request; `more` are further arguments of `from_pretrained`."""
    target = locate(request.target, "target", "TARGET")
    models = [target, *([request.draft_model] if request.draft_model else [])]
    downloads = not all(Path(model).exists() for model in models)
    with loading(f"loading {request.target}", quiet=quiet, downloads=downloads):
        from specdec.generator.generator import SpecGenerator

        return SpecGenerator.from_pretrained(target, request.draft, **request.loading, **more)
