"""Which versions ran."""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("torch", "transformers", "accelerate", "bitsandbytes", "numpy")


def versions() -> dict[str, str]:
    """The package, Python, and the libraries that decide about numbers and speed, as far as they are installed."""
    from specdec import __version__

    found = {"specdec": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
