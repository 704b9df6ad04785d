"""Modules of the caller's own, which add drafts, schedules or strategies to the registries before a suite is read."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from specdec.errors import OptionError


def import_modules(names: Sequence[str]) -> None:
    """Imports modules, also those in the working folder; raises OptionError for one that cannot be imported."""
    if names and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in names:
        try:
            import_module(name)
        except Exception as error:
            raise OptionError(
                f"`imports`: module {name!r} cannot be imported ({type(error).__name__}: {error}): run the command in "
                "its folder, or install it"
            ) from error


def digests(names: Sequence[str]) -> dict[str, str]:
    """A digest of the file of each imported module: other code makes other samples."""
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    return {name: hashlib.sha256(Path(file).read_bytes()).hexdigest() for name, file in files.items() if file}
