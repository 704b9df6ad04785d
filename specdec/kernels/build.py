"""The compiled library: built on first use, once per processor, torch and sources, and shared by all processes.

It lies in `specdec/kernels` in `$XDG_CACHE_HOME` (by default `~/.cache`), or in the folder `$SPECDEC_KERNELS`. Its name
holds a digest of the instructions that the processor has, so that no library built for another one is ever loaded.
`$CXX` names the compiler; by default it is the first of c++, g++ and clang++.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

_log = logging.getLogger(__name__)
_SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
_HEADERS = sorted(Path(__file__).parent.glob("*.h"))
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-fopenmp", "-fPIC")
_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 300  # a compiler that takes longer hangs


class _NoKernels(Exception):
    """Why there are none, in one line."""


def available() -> bool:
    """Whether the compiled kernels can be used; the first call loads them, and builds them where they are missing."""
    return why_not() is None


def is_loaded() -> bool:
    """Whether the compiled kernels are here already; loads and builds nothing."""
    return why_not.cache_info().currsize > 0 and available()


@cache
def why_not() -> str | None:
    """Why the kernels cannot be used, in one line; None if they can. Loads or builds them like `available`."""
    try:
        torch.ops.load_library(_built())  # type: ignore[no-untyped-call]
    except _NoKernels as reason:
        return str(reason)
    except OSError as error:  # the folder, or the library itself
        return _line(str(error))
    return None


def _built() -> Path:
    """The library of this processor; raises _NoKernels and OSError."""
    if os.name != "posix":
        raise _NoKernels(f"they are not built on {platform.system()}")
    place = folder()
    library = place / f"kernels-{digest()}.so"
    place.mkdir(parents=True, exist_ok=True)
    with alone(library.with_suffix(".lock")):
        if not library.exists():
            _build(library)
    return library


def folder() -> Path:
    """Where what is built for this processor is kept."""
    if named := os.environ.get("SPECDEC_KERNELS"):
        return Path(named)
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise _NoKernels("there is no home folder to keep them in: set SPECDEC_KERNELS to a folder") from None
    return Path(root) / "specdec" / "kernels"


def digest() -> str:
    """What a library depends on, as a short name."""
    sources = (path.read_text("utf-8") for path in (*_SOURCES, *_HEADERS))
    parts = (*sources, torch.__version__, platform.system(), *_FLAGS, instructions())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def instructions() -> str:
    """The processor's instruction set, as far as the system tells: its architecture, name and flags."""
    found = {"machine": platform.machine(), "processor": platform.processor()}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "flags", "Features", "CPU part"):
                found.setdefault(name.strip(), value.strip())
    return "\n".join(f"{name}: {value}" for name, value in found.items())


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """One process at a time; the others wait until the file is let go."""
    import fcntl  # not everywhere

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # closing it lets go
        yield


def _build(library: Path) -> None:
    compiler = _compiler()
    # Whoever waits for it should know why, also where no messages are asked for.
    _log.warning("building kernels for this processor, once: about 20 seconds (%s)", library)
    root = Path(torch.__file__).parent
    headers = [f"-I{root / 'include'}", f"-I{root / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder, ThreadPoolExecutor() as pool:
        objects = [str(Path(folder) / f"{source.stem}.o") for source in _SOURCES]
        compiled = [
            pool.submit(_run, [compiler, *_FLAGS, *headers, "-c", str(source), "-o", to])
            for source, to in zip(_SOURCES, objects, strict=True)
        ]
        for one in compiled:
            one.result()
        made = Path(folder) / library.name
        _run([compiler, *_FLAGS, "-shared", *objects, "-o", str(made), f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"])
        os.replace(made, library)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _NoKernels(f"the compiler failed: {_line(str(error))}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit code {done.returncode}"]
        raise _NoKernels(f"{command[0]} could not build them: {_line(lines[0])}")


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in [named] if named else _COMPILERS:
        if found := shutil.which(name):
            return found
    raise _NoKernels(f"there is no C++ compiler ({named or ', '.join(_COMPILERS)}): install one, or name it in CXX")


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
