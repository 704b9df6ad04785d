"""Versions of the software, and what Linux tells about the machine."""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "transformers", "accelerate", "bitsandbytes", "numpy")


def versions() -> dict[str, str]:
    """Versions of specdec, Python, and the installed libraries that affect results and speed."""
    from specdec import __version__

    releases = {"specdec": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            releases[name] = version(name)
    return releases


def commit() -> str | None:
    """The commit of the git checkout that the package is, with `-dirty` if files differ from it; None elsewhere."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, check=True, text=True, timeout=10).stdout.strip()
    return None


def system_entries(file: str) -> dict[str, str]:
    """The lines `name: value` of a file in /proc, for each name the first; none on other systems."""
    entries = dict[str, str]()
    with suppress(OSError):
        for line in Path(file).read_text().splitlines():
            name, _, value = line.partition(":")
            entries.setdefault(name.strip(), value.strip())
    return entries
