"""The compiled library: built on first use, once per processor, torch and sources, for all processes.

It lies in `specdec/kernels` in `$XDG_CACHE_HOME` (by default `~/.cache`), or in `$SPECDEC_KERNELS`. Its name has a
digest of the processor's instructions, so that no other processor's library is loaded. `$CXX` is the compiler, with
arguments if need be; by default the first of c++, g++ and clang++. A compiler that failed is tried again when it
changes, a day later, or by `specdec doctor`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

import torch

from specdec.errors import UnsupportedError
from specdec.kernels import cache_files
from specdec.kernels.cache_files import Lack
from specdec.options.fields import is_list, is_whole
from specdec.options.versions import system_entries

_log = logging.getLogger(__name__)
_SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
_HEADERS = sorted(Path(__file__).parent.glob("*.h"))
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC")
_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 300  # a compiler that takes longer hangs
# Runs a command, and ends it with all of its processes once its standard input ends, as when Python is killed.
_GUARD = 'exec 3<&0; (read _ <&3; kill -9 0) & "$@" </dev/null 3<&-; status=$?; kill $!; exit $status'
_FOLDER = "SPECDEC_KERNELS"
_LOADING = threading.Lock()


class _CompilerError(Exception):
    """The compiler's error, in one line."""


def available() -> bool:
    """Whether the compiled kernels can be used; the first call loads them, building them if missing.

    Logs once why they cannot.
    """
    reason = lack()
    if reason is not None:
        _report(reason)
    return reason is None


@cache
def _report(reason: Lack) -> None:
    if reason.way_out:  # otherwise the user cannot change it
        _log.warning("no kernels, so passes and sampling on the CPU are slower: %s", reason)


def check(what: str, otherwise: str = "leave it out") -> None:
    """Raises UnsupportedError for `what` if the kernels cannot be used; `otherwise` is the way out without them."""
    if reason := lack():
        raise UnsupportedError(f"{what} needs kernels, and {reason}; without them, {otherwise}")


def lack() -> Lack | None:
    """Why the kernels cannot be used; None if they can. Loads or builds them."""
    with _LOADING:
        return _lack()


@cache
def _lack() -> Lack | None:
    if os.name != "posix":
        return Lack(f"they are not built on {platform.system()}", "")
    try:
        library = _library()
        try:
            if not cache_files.is_intact(library):
                with cache_files.file_lock(library.with_suffix(".lock"), _FOLDER):
                    if not cache_files.is_intact(library):
                        _build(library)
        except OSError as error:
            raise cache_files.unwritable(library.parent, _FOLDER, error) from None
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except Lack as reason:
        return reason
    except OSError as error:
        return Lack(f"they cannot be loaded ({_line(error)})", f"delete {library}, and they are built again")
    return None


def _library() -> Path:
    return folder() / f"kernels-{digest()}.so"


def folder() -> Path:
    """The folder of libraries; raises Lack."""
    try:
        return cache_files.cache_folder("kernels", _FOLDER)
    except RuntimeError:
        raise Lack("there is no home folder to keep them in", f"name one in {_FOLDER}") from None


def digest() -> str:
    """A digest of all that the library depends on."""
    sources = (path.read_text("utf-8") for path in (*_SOURCES, *_HEADERS))
    parts = (*sources, torch.__version__, platform.system(), *_FLAGS, instructions())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def instructions() -> str:
    """The processor's instruction set, as the system reports it: architecture, name and flags."""
    names, entries = ("model name", "flags", "Features", "CPU part"), system_entries("/proc/cpuinfo")
    facts = {"machine": platform.machine(), "processor": platform.processor()}
    facts |= {name: value for name, value in entries.items() if name in names}
    return "\n".join(f"{name}: {value}" for name, value in facts.items())


def measured(what: str, count: int, measure: Callable[[], list[int]]) -> list[int]:
    """The `count` numbers that `measure` returns for `what`, measured once per library and number of threads.

    All processes read them from a file, so they make the same choice by speed, and texts stay what they were.
    """
    name = f"measured-{digest()}-{torch.get_num_threads()}-{what}.json"
    with suppress(Lack, OSError, ValueError):
        numbers = json.loads((folder() / name).read_text())
        if is_list(numbers) and len(numbers) == count and all(map(is_whole, numbers)):
            return numbers  # type: ignore[no-any-return]
    numbers = measure()
    with suppress(Lack, OSError):
        with tempfile.NamedTemporaryFile("w", dir=folder(), delete=False) as file:
            json.dump(numbers, file)
        os.replace(file.name, folder() / name)
    return numbers


def try_again() -> None:
    """Lets a compiler that failed before be tried again."""
    with suppress(OSError, Lack):
        _library().with_suffix(".failed").unlink(missing_ok=True)


def _build(library: Path) -> None:
    """Builds the library, unless this compiler failed within the last day; raises Lack and OSError."""
    program, note = compiler(), library.with_suffix(".failed")  # the compiler that failed, and its error
    files = [os.path.realpath(path) for word in program if (path := shutil.which(word))]
    states = [(state.st_size, state.st_mtime_ns) for state in map(os.stat, files)]
    identity = f"{shlex.join(program)} {files} {states}"
    failure = cache_files.failure(note)
    if failure[:1] != [identity]:
        how = {"doing": "building kernels, once"}  # in a bar
        # A warning, as the caller waits for it.
        _log.warning("building kernels for this processor, once: 20 to 60 seconds (%s)", library, extra=how)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            binary = Path(folder) / library.name
            try:
                _compile(binary, program)
            except _CompilerError as error:
                failure = [identity, *str(error).splitlines()]
                note.write_text("\n".join([*failure, ""]), "utf-8")
            else:
                cache_files.install(binary, library)
                note.unlink(missing_ok=True)
                return
    way_out = "mend it, or name another compiler in CXX; specdec doctor tries again"
    raise Lack(f"{shlex.join(program)} could not build them ({''.join(failure[1:2])})", way_out)


def _compile(library: Path, program: Sequence[str]) -> None:
    """Compiles all sources in parallel, and links them."""
    root = Path(torch.__file__).parent
    headers = [f"-I{root / 'include'}", f"-I{root / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    objects = [str(library.with_name(f"{source.stem}.o")) for source in _SOURCES]
    reader, writer = os.pipe()
    with os.fdopen(reader) as guard, ThreadPoolExecutor() as pool, os.fdopen(writer, "w"):
        run = partial(_run, guard)
        jobs = [
            pool.submit(run, [*program, *_FLAGS, *headers, "-c", str(source), "-o", to])
            for source, to in zip(_SOURCES, objects, strict=True)
        ]
        for job in jobs:
            while not wait([job], timeout=1).done:
                pass  # Ctrl-C may reach another thread, which does not end this one's wait before its timeout
            job.result()
        run([*program, *_FLAGS, "-shared", *objects, "-o", str(library), f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"])


def _run(guard: IO[str], command: list[str]) -> None:
    """Runs a compiler, which ends with its own processes where the other end of the pipe `guard` is closed."""
    how: dict[str, Any] = {"stdin": guard, "start_new_session": True, "timeout": _SECONDS}
    try:
        result = subprocess.run(
            ["/bin/sh", "-c", _GUARD, "sh", *command], capture_output=True, text=True, errors="replace", **how
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _CompilerError(_line(error)) from None
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "error" in line] or [f"exit code {result.returncode}"]
        raise _CompilerError(_line(lines[0]))


def compiler() -> list[str]:
    """The C++ compiler and its arguments: `$CXX`, or the first that exists; raises Lack."""
    setting = os.environ.get("CXX")
    with suppress(ValueError):  # unbalanced quotes
        for words in ([setting], shlex.split(setting)) if setting else ([name] for name in _COMPILERS):
            if words and (program := shutil.which(words[0])):
                return [program, *words[1:]]
    if setting:
        raise Lack(f"CXX names {setting}, which is not here", "name a C++ compiler, or unset it")
    raise Lack(f"there is no C++ compiler ({', '.join(_COMPILERS)})", "apt install g++, or name one in CXX")


def _line(text: object) -> str:
    return " ".join(str(text).split())[:300]
