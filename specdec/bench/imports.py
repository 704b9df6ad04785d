"""Modules of the caller, which add drafts, schedules or strategies to the registries before a suite is read."""

from __future__ import annotations

import hashlib
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from specdec.core.draft_schedules import SCHEDULES
from specdec.decoding import strategies
from specdec.errors import OptionError
from specdec.proposers import DRAFTS


def import_modules(names: Sequence[str]) -> None:
    """Imports modules, also from the working folder; raises OptionError for a module that cannot be imported."""
    if names and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in names:
        if name.endswith(".py") or "/" in name:
            raise OptionError.of("imports", "the name of a module", name, f"pass {Path(name).stem!r}, without its path")
        try:
            import_module(name)
        except Exception as error:
            is_absent = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
            failure = f"its own code failed at {line_of(error)}"
            advice = "run the command in its folder, or install it" if is_absent else failure
            raise OptionError(
                f"`imports` (--import): module {name!r} cannot be imported ({type(error).__name__}: {error}): {advice}"
            ) from error


def line_of(error: BaseException) -> str:
    """The file and line where an error was raised, or of the syntax that cannot be read."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def digests(names: Sequence[str]) -> dict[str, str]:
    """Digests of the code of imported modules, and of modules that define drafts, schedules or strategies, by name.

    A module in a package has the digest of what is imported of its package. Other code makes other samples.
    """
    kinds = [*DRAFTS.values(), *SCHEDULES.values(), *strategies.STRATEGIES] if names else []
    roots = {name.partition(".")[0] for name in [*names, *(kind.__module__ for kind in kinds)]} - {"specdec"}
    hashes = {root: hashlib.sha256() for root in sorted(roots)}
    for name in sorted(name for name in sys.modules if name.partition(".")[0] in hashes):
        if (file := getattr(sys.modules[name], "__file__", None)) is not None:
            hashes[name.partition(".")[0]].update(Path(file).read_bytes())
    return {root: digest.hexdigest() for root, digest in hashes.items()}
