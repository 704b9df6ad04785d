"""Versions of the software."""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("torch", "transformers", "accelerate", "bitsandbytes", "numpy")


def versions() -> dict[str, str]:
    """Versions of specdec, Python, and the installed libraries that affect results and speed."""
    from specdec import __version__

    found = {"specdec": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
