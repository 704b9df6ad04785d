"""Compiled code on disk, and the process that makes it.

Models of one structure share a folder in `specdec/kernels/compiled` in `$XDG_CACHE_HOME`, or in `$SPECDEC_COMPILED`.
Code is exported and compiled ahead of time (AOTInductor) by a process of low priority, which outlives the program that
started it. It holds the folder's lock until it ends, so that other programs wait for it, and works in a temporary
folder, which the next one deletes if it was killed. It gives up if it takes more than `$SPECDEC_COMPILE_SECONDS`, or
more memory than was estimated and free when it began; if its turn comes after its program has ended, it ends. Above
`$SPECDEC_COMPILED_BYTES`, it deletes the code that was not loaded for the longest time.
"""

from __future__ import annotations

import mmap
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from specdec import kernels
from specdec.errors import UnsupportedError
from specdec.kernels import kept
from specdec.models.backends.ragged_inputs import PassInputs
from specdec.models.backends.ragged_model import RaggedModel
from specdec.models.cache.buffers import free_bytes
from specdec.models.hf.derived import shallow_copy
from specdec.models.hf.private_api import forget_outputs, note_outputs

_OPTIONS = {"aot_inductor.package": True, "aot_inductor.compile_wrapper_opt_level": "O1"}
_CODE, _CALLS = "passes.pt2", "calls.pt"
_FOLDER, _BYTES, _LIMIT = "SPECDEC_COMPILED", "SPECDEC_COMPILED_BYTES", "SPECDEC_COMPILE_SECONDS"
_LOCK = "turn.lock"  # which the compiler that runs holds
_MOST = 2**30  # bytes of all code
_SECONDS = 600  # after which a compiler gives up
_MEMORY = 2**30, 2**24  # bytes that a compiler takes at most: in any case, and for each layer
_TURN = """
import fcntl, os, runpy, shutil, sys
program, turn = int(sys.argv.pop()), open(sys.argv.pop(), "w")
try:
    fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    fcntl.flock(turn, fcntl.LOCK_EX)
    try:
        os.kill(program, 0)
    except OSError:  # it has ended meanwhile, and others that wait for the code start a compiler of their own
        shutil.rmtree(sys.argv[1])
        sys.exit()
os.nice(19)
try:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with open("/proc/self/autogroup", "w") as file:  # where Linux weighs sessions, the others count only within one
        file.write("19")
except (AttributeError, OSError):  # not on Linux, or refused
    pass
runpy.run_module(sys.argv.pop(), run_name="__main__", alter_sys=True)
"""  # one compiler at a time: the others wait before they load torch
_NODES, _KEPT, _WORDS, _ROWS, _COLUMNS, _FRAMES = 5, 3, 2, 4, 96, 7  # sizes of the traced pass, all different
_RETURNED = 100  # returned nodes of its first hidden state, one more for each other one


class KeptCode:
    """The compiled code of one structure, which `key` names, and what is known of it; raises Lack without a folder."""

    def __init__(self, key: str) -> None:
        self.folder = _root() / key
        self.code, self.calls = self.folder / _CODE, self.folder / _CALLS
        self._failed, self._seconds = self.folder / "failed", self.folder / "seconds"

    @property
    def exists(self) -> bool:
        return self.code.exists()

    def check(self) -> None:
        """Notes that the code is used; raises UnsupportedError if its files are broken."""
        with suppress(OSError):  # not ours to write
            os.utime(self.code)
        for file in (self.calls, self.code):
            if not kept.is_intact(file):
                raise UnsupportedError(f"{file.name} is broken")

    def alone(self) -> AbstractContextManager[IO[str]]:
        """Context in which no process compiles this code, after waiting for one that does; yields the held lock."""
        return kept.alone(_lock(self.folder), _FOLDER)

    @property
    def is_compiled_now(self) -> bool:
        """Whether a process is compiling this code; raises Lack."""
        return kept.is_held(_lock(self.folder), _FOLDER)

    def seconds(self) -> float:
        """Seconds of passes that programs ran without this code."""
        try:
            return sum(map(float, self._seconds.read_text().split()))
        except (OSError, ValueError):
            return 0.0

    def add_seconds(self, spent: Sequence[float]) -> None:
        """Adds the one number of `spent` to `seconds`, where the folder can be written to."""
        with suppress(OSError):
            if spent[0]:
                self.folder.mkdir(parents=True, exist_ok=True)
                with self._seconds.open("a") as file:
                    file.write(f"{spent[0]:.3f}\n")

    def failure(self) -> str | None:
        """Why the compiler failed within the last day, if it did."""
        return next(reversed(kept.failure(self._failed)), None)

    def fail(self, reason: str) -> None:
        """Keeps the last line of `reason` as that of `failure`."""
        with suppress(OSError):
            self._failed.write_text(reason, "utf-8")

    def begin(self, model: RaggedModel, lock: IO[str]) -> None:
        """Starts the process that compiles `model`, and hands it the `lock` that is held.

        Raises Lack, OSError, and UnsupportedError if there is too little memory.
        """
        kept.number(_BYTES, _MOST)
        limits = [kept.number(_LIMIT, _SECONDS, "seconds"), _needed(model)]
        program = kernels.compiler()
        self.folder.mkdir(exist_ok=True)
        self._failed.unlink(missing_ok=True)
        for stale in self.folder.glob("tmp*"):  # of processes that were killed
            shutil.rmtree(stale, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            torch.save(_without_weights(model), folder / "model.pt")
            # The same imports as here, but none from the current folder.
            known = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "PYTHONSAFEPATH": "1"}
            # Caches of its own, as other processes may leave half-written files.
            known |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "TMPDIR": str(folder)}
            known |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
            known |= {"CXX": _program(program, folder), _FOLDER: str(self.folder.parent)}
            command = [sys.executable, "-c", _TURN, str(folder), str(lock.fileno()), *map(str, limits), __name__]
            command += [str(_root() / _LOCK), str(os.getpid())]
            subprocess.run(  # a shell that ends at once, so that the process is nobody's child
                ["/bin/sh", "-c", '"$@" &', "sh", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **known},
                start_new_session=True,
                pass_fds=[lock.fileno()],
                check=True,
            )
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(error, OSError):  # a model that cannot be sent
                self.fail(str(error))
            raise

    def make(self, folder: Path) -> None:
        """Compiles the model in `folder`, moves the code into place, and deletes old code of others."""
        try:
            _compile(folder)
            for file in (self.calls, self.code):
                kept.put(folder / file.name, file)
            with suppress(OSError):  # files of a compiler that has just begun
                kept.make_room(self.folder, _CODE, kept.number(_BYTES, _MOST), _FOLDER)
        except Exception:
            self.fail(_explained(traceback.format_exc()))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def is_running() -> bool:
    """Whether a compiler runs, of this program or another one."""
    try:
        return kept.is_held(_root() / _LOCK, _FOLDER)
    except kernels.Lack:
        return False


def compiled_code() -> str:
    """How much compiled code there is, and whether a compiler runs or failed within the last day; raises Lack."""
    root = _root()
    codes = [KeptCode(path.name) for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    failures = [reason for code in codes if (reason := code.failure()) is not None]
    words = [f"of {sum(code.exists for code in codes)} models in {root}"]
    if is_running():
        words.append("one more is compiled now")
    if failures:
        words.append(f"{len(failures)} could not be compiled, the last one because: {failures[-1]}")
    return "; ".join(words)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def example(model: RaggedModel) -> tuple[PassInputs, PassInputs]:
    """Inputs of a pass to trace, and in the same places which sizes change."""
    from torch.export import Dim  # loads the compiler

    count = len(model.kinds) or 1
    place = torch.arange(_NODES)
    positions = place[None] + _NODES  # unequal to columns and tokens
    table = torch.zeros(1, 1, _NODES, 4 + _WORDS, dtype=torch.int32)
    table[..., 1], table[..., 3] = place, place + 1  # a chain in the first row
    frames = torch.zeros_like(table)
    frames[..., 3] = _FRAMES
    tables, encoders = [table.clone() for _ in range(count)], [frames] if model.has_encoder else []
    buffers = [_pair(width, _ROWS, _COLUMNS, model.dtype) for width in model.widths]
    projections = [_pair(width, _ROWS - 1, _FRAMES, model.dtype) for width in model.widths] if model.has_encoder else []
    returned = [torch.arange(_RETURNED + state) % _NODES for state in range(model.states)]
    given = PassInputs(
        model.inputs(place[None]), positions, place[:_KEPT], tables, encoders, buffers, projections, returned
    )
    free, of = Dim.DYNAMIC, dict[str, Any]()
    of["ids"] = of["positions"] = {1: free}
    of["kept"] = {0: free}
    of["tables"], of["encoders"] = ([{2: free, 3: free}] * len(some) for some in (tables, encoders))
    of["returned"] = [{0: free}] * model.states
    of["buffers"], of["frames"] = ([({0: free, 2: free},) * 2] * len(some) for some in (buffers, projections))
    return given, PassInputs(**of)


def _pair(width: tuple[int, ...], rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    heads, *sides = width
    keys, values = (torch.zeros(rows, heads, columns, side, dtype=dtype) for side in sides)
    return keys, values


def _without_weights(model: RaggedModel) -> RaggedModel:
    """A shallow copy without values in its tensors."""
    other: RaggedModel = shallow_copy(model)
    forget_outputs(other)
    _move(other, "meta")
    return other


def _move(model: nn.Module, device: str) -> None:
    """Replaces the tensors of a model by empty ones on `device`, but for those already there."""
    made: dict[int, Tensor] = {}

    def moved(tensor: Tensor | None) -> Any:
        if tensor is None or tensor.device.type == device:
            return tensor
        if id(tensor) not in made:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
        return made[id(tensor)]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: moved(tensor) for name, tensor in held.items()})


def _program(compiler: Sequence[str], folder: Path) -> str:
    """A compiler without arguments, as torch takes it: a script adds them."""
    if len(compiler) == 1:
        return compiler[0]
    script = folder / "c++"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(compiler)} "$@"\n')
    script.chmod(0o700)
    return str(script)


def _explained(errors: str) -> str:
    """Why the compiler failed; torch's words for a broken one name no way out."""
    if any(name in errors for name in ("InvalidCxxCompiler", "CppCompileError")):
        return f"{shlex.join(kernels.compiler())} does not compile: mend it, or name another compiler in CXX"
    return errors


def _root() -> Path:
    """The folder of all compiled code; raises Lack without a home folder."""
    named = os.environ.get(_FOLDER)
    return (Path(named) if named else kernels.folder() / "compiled").absolute()


def _lock(folder: Path) -> Path:
    return folder.with_suffix(".lock")


def _needed(model: RaggedModel) -> int:
    """Bytes that a model's compiler takes at most; raises UnsupportedError if they are not free."""
    needed, free = _MEMORY[0] + _MEMORY[1] * len(model.widths), free_bytes(torch.device("cpu"))
    if needed > free:
        sizes = f"{needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} are free"
        raise UnsupportedError(f"compiling may take {sizes}: end other programs, or run specdec compile later")
    return needed


def _memory() -> int:
    """Bytes of this process and of the programs that it runs."""
    pages = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = file.read_text().rpartition(")")[2].split()
            pages += int(fields[21]) if int(fields[2]) == os.getpgrp() else 0
    return pages * mmap.PAGESIZE


def _watch(folder: Path, seconds: int, most: int) -> None:
    """Ends this process and the programs that it runs once they exceed their limits, and notes why."""
    end = time.monotonic() + seconds
    while (early := time.monotonic() < end) and _memory() < most:
        time.sleep(1)
    reason = f"{most / 2**30:.1f} GiB of memory" if early else f"{seconds} seconds, which {_LIMIT} changes"
    KeptCode(folder.parent.name).fail(f"compiling took more than {reason}")
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _compile(folder: Path) -> None:
    from torch._inductor.package.package import package_aoti
    from torch.fx.experimental import _config as shape_config

    from specdec.models.backends.pieces import Pieces, example_inputs  # loads the compiler

    kernels.available()
    model = torch.load(folder / "model.pt", weights_only=False)
    _move(model, "cpu")
    note_outputs(model)
    given, sizes = example(model)
    with torch.no_grad(), shape_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        program = torch.export.export(model.eval(), tuple(given), dynamic_shapes={"given": tuple(sizes)}, strict=False)
        pieces = Pieces.of(program)
        options = _OPTIONS | {"aot_inductor.precompile_headers": len(pieces.functions) > 2}  # else it takes longer
        files: dict[str, Any] = {
            str(place): torch._inductor.aot_compile(function, example_inputs(function), options=options)
            for place, function in enumerate(pieces.functions)
        }
    own = tensors_of(model)
    constants = {name: tensor for name, tensor in program.constants.items() if name not in own}
    made = {"held": pieces.held, "calls": pieces.calls, "outputs": pieces.outputs, "constants": constants}
    torch.save(made, folder / _CALLS)
    package_aoti(str(folder / _CODE), files)


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[2]), False)  # the lock
    with suppress(OSError):  # not on Linux
        Path("/proc/self/oom_score_adj").write_text("1000")  # programs survive, if memory runs out
    torch.set_num_threads(1)
    made_in = Path(sys.argv[1])
    threading.Thread(target=_watch, args=(made_in, *map(int, sys.argv[3:])), daemon=True).start()
    KeptCode(made_in.parent.name).make(made_in)
