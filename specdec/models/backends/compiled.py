"""The backend "compiled": one compiled function for all passes of a model.

Ragged passes have one size that changes, the number of nodes; rows and columns of the buffers concern only our
attention. So one graph serves prompts, chains, trees and batches. It is exported and compiled ahead of time
(AOTInductor) in a process of its own, while passes run packed. The result is kept in `specdec/compiled` in
`$XDG_CACHE_HOME`, for all models of the same structure.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache, cached_property, partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

from specdec import kernels
from specdec.core.drafts import Chained, ChainRule
from specdec.errors import UnsupportedError
from specdec.models.backends.packed_layers import alike
from specdec.models.backends.ragged_inputs import StepInputs
from specdec.models.backends.ragged_model import PassInputs, RaggedModel
from specdec.models.hf.private_api import forget_outputs, note_outputs
from specdec.models.hf.shallow_copy import shallow_copy

_log = logging.getLogger(__name__)
_OPTIONS = {"aot_inductor.package_constants_in_so": False, "aot_inductor.compile_wrapper_opt_level": "O1"}
_CODE, _CONSTANTS = "passes.pt2", "constants.pt"
_WRITTEN = 8  # numbers: the compiler writes tensors up to this size into the code
_PLAIN = (bool, int, float, str, torch.dtype)
_FUNCTIONS = (BuiltinFunctionType, FunctionType, MethodType)
_RELEASED = ("builtins", "torch", "transformers")  # packages whose versions are part of the key
_NODES, _KEPT, _WORDS, _ROWS, _COLUMNS, _FRAMES = 5, 3, 2, 4, 96, 7  # sizes of the traced pass, all different
_RETURNED = 100  # returned nodes of its first hidden state, one more for each other one


class CompiledForward:
    """The compiled passes of one model, `ready` once they exist.

    If compiling fails, passes run as before and a warning gives the reason. `fuse` joins packed layers before that.
    `start` raises UnsupportedError on other devices than the CPU, and on Windows.
    """

    def __init__(
        self, model: RaggedModel, widths: Sequence[tuple[int, int, int]], states: int, fuse: Callable[[], None]
    ) -> None:
        self._model, self._widths, self._states = model, widths, states
        self._fuse: Callable[[], None] | None = fuse  # until `start`
        self._passes: Any = None
        self._done = threading.Event()
        self._compiler: subprocess.Popen[str] | None = None
        self._stopped = False
        self._starting = threading.Lock()  # of the compiler

    @cached_property
    def _key(self) -> str:
        return _key(self._model, self._widths, self._states)

    @property
    def _folder(self) -> Path:
        return _root() / self._key

    def start(self) -> CompiledForward:
        """Loads kept code, or compiles it in a thread."""
        device = self._model.device.type
        if device != "cpu" or os.name != "posix":
            where = f"on {device}, with {os.name}"
            raise UnsupportedError(
                f"passes are compiled for the CPU alone, not {where}: leave out `backend`='compiled'"
            )
        if self._key and self._fuse is not None:  # computes the key first, from the structure as loaded
            self._fuse()
            self._fuse = None
        if self._taken():
            self._done.set()
        else:
            threading.Thread(target=self._work, name="specdec-compile", daemon=True).start()
        return self

    @property
    def is_kept(self) -> bool:
        """Whether kept code exists."""
        try:
            return _root().exists() and (self._folder / _CODE).exists()
        except kernels.Lack:  # no home folder
            return False

    @property
    def ready(self) -> bool:
        """Whether passes can run."""
        return self._passes is not None

    def stop(self) -> None:
        """Stops the compiler where it runs, and keeps it from starting."""
        with self._starting:
            self._stopped = True
            compiler = self._compiler
        if compiler is not None:
            _kill(compiler)
            self._done.wait()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits up to `timeout` seconds until compiling has ended; returns `ready`."""
        self._done.wait(timeout)
        return self.ready

    def __call__(self, *given: Any) -> list[Tensor]:
        """Logits `[1, kept, vocab]` and hidden states; arguments as of `RaggedModel.forward`."""
        return self._passes.run(PassInputs(*given).tensors)  # type: ignore[no-any-return]

    def draft_chain(
        self, first: PassInputs, steps: StepInputs, rules: Sequence[ChainRule], embeddings: Tensor | None
    ) -> Chained:
        """Drafts chains: the first pass has inputs `first`; `embeddings` are those of a head (`AnyLinear.table`)."""
        encoders = [table[:, :, first.kept] for table in first.encoders]
        others = [side for pair in (*first.buffers, *first.frames) for side in pair]
        numbers = [_numbers(rule) for rule in rules]
        given = first.tensors, steps.positions, steps.tables, encoders, others, numbers, embeddings
        tokens, probabilities, scores = self._passes.draft_chain(*given)
        guesses = [list(zip(*own, strict=True)) for own in zip(tokens, probabilities, strict=True)]
        found = iter(scores)
        q = [next(found).softmax(-1) if rule.needs_q else None for rule in rules]
        return Chained(guesses, q)

    @property
    def _name(self) -> str:
        return type(self._model.model).__name__

    def _taken(self) -> bool:
        """Loads kept code, if any; deletes it where that fails."""
        if self.is_kept:
            try:
                self._passes = self._loaded()
            except Exception as error:
                _log.warning(
                    "the compiled passes of %s in %s cannot be used and are deleted: %s",
                    self._name,
                    self._folder,
                    error,
                )
                (self._folder / _CODE).unlink(missing_ok=True)
        return self.ready

    def _work(self) -> None:
        """Compiles the model, unless another process does so now, and loads the result."""
        try:
            if not kernels.available():
                raise UnsupportedError("they need kernels, which are missing")  # the log gives the reason
            compiler = kernels.compiler()
            with kernels.alone(self._folder / "lock", "SPECDEC_COMPILED"):
                if not self._taken():
                    _log.warning("compiling the passes of %s in the background, once: about a minute", self._name)
                    began = time.perf_counter()
                    self._compile(compiler)
                    _log.warning("the passes of %s are compiled, after %.0f s", self._name, time.perf_counter() - began)
                    self._passes = self._loaded()
        except Exception as error:
            if threading.main_thread().is_alive() and not self._stopped:  # else there is no reader
                _log.warning("the passes of %s are not compiled, they run as before: %s", self._name, error)
        finally:
            self._done.set()

    def _compile(self, compiler: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            made = (_without_weights(self._model), self._widths, self._states)
            torch.save(made, Path(folder) / "model.pt")
            # The same imports as here, but none from the current folder.
            known = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "PYTHONSAFEPATH": "1"}
            # A cache of its own, as other processes may leave half-written files.
            known |= {"CXX": _program(compiler, Path(folder)), "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "cache")}
            with self._starting:
                if self._stopped:
                    raise UnsupportedError("their compiler was stopped")
                process = self._compiler = subprocess.Popen(
                    [sys.executable, "-m", __name__, folder],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    env={**os.environ, **known},
                    start_new_session=True,
                )
            kill = atexit.register(partial(_kill, process))
            _, errors = process.communicate()
            atexit.unregister(kill)
            if process.returncode:
                raise UnsupportedError(_reason(errors, shlex.join(compiler)) or f"exit {process.returncode}")
            for file in (_CONSTANTS, _CODE):
                kernels.put(Path(folder) / file, self._folder / file)

    def _loaded(self) -> Any:
        """The compiled code over this model's weights; raises UnsupportedError if it is broken or gives other
        logits.
        """
        if reason := kernels.why_not():
            raise UnsupportedError(f"there are no kernels: {reason}")
        for file in (_CONSTANTS, _CODE):
            if not kernels.is_whole(self._folder / file):
                raise UnsupportedError(f"{file} is broken")
        passes = kernels.passes(str(self._folder / _CODE))
        held = _tensors(self._model) | torch.load(self._folder / _CONSTANTS)
        # Kept alive as long as the code, which does not own them.
        self._constants = {name: held[name] for name in passes.names()}
        passes.load(self._constants)
        # a new one for each run, as passes write to buffers
        example = partial(_example, self._model, self._widths, self._states)
        with torch.no_grad():
            logits, *states = self._model(*example()[0])
        found, *hidden = passes.run(example()[0].tensors)
        if not alike(found, logits) or not all(map(alike, hidden, states)):
            raise UnsupportedError("compiled code gives other logits")
        return passes


def _kill(process: subprocess.Popen[str]) -> None:
    """Ends a process and those that it started."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _numbers(rule: ChainRule) -> tuple[object, ...]:
    """A rule as passes.cpp takes it."""
    filters, address, first = rule.choice
    noise = [] if address is None else [kernels.signed(address), first]
    chosen = [(name, [*map(float, numbers)]) for name, numbers in filters], noise
    edges, rates, least = rule.until
    until = [*rule.ends], [*edges], [*rates], float(least)
    return *chosen, rule.most, rule.width, *until, rule.confident, rule.needs_q


def _root() -> Path:
    """The folder of compiled code: `$SPECDEC_COMPILED`, or beside the kernels; raises Lack."""
    named = os.environ.get("SPECDEC_COMPILED")
    return Path(named) if named else kernels.folder() / "compiled"


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, by all of their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _program(compiler: Sequence[str], folder: Path) -> str:
    """A compiler without arguments, as torch takes it: a script adds them."""
    if len(compiler) == 1:
        return compiler[0]
    script = folder / "c++"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(compiler)} "$@"\n')
    script.chmod(0o700)
    return str(script)


def _reason(errors: str, compiler: str) -> str:
    """Why a process could not compile, from its `errors`; torch's words for a broken compiler name no way out."""
    if any(name in errors for name in ("InvalidCxxCompiler", "CppCompileError")):
        return f"{compiler} does not compile: mend it, or name another compiler in CXX"
    return errors.strip().splitlines()[-1] if errors.strip() else ""


def _key(model: RaggedModel, widths: Sequence[tuple[int, ...]], states: int) -> str:
    """A digest of all that compiled code depends on."""
    config = model.model.config.to_json_string(use_diff=False)
    parts = [
        torch.__version__,
        transformers.__version__,
        kernels.digest(),
        _own_code(),
        *(_digest([file]) for file in sorted(_files(model))),
        *(f"{name} {type(module).__module__}.{type(module).__qualname__}" for name, module in model.named_modules()),
        *(f"{name} {tensor.dtype} {list(tensor.shape)} {tensor.stride()}" for name, tensor in _tensors(model).items()),
        *(f"{name} {tensor.tolist()}" for name, tensor in _tensors(model).items() if tensor.numel() <= _WRITTEN),
        *(f"{name} {_plain(module)} {_functions(module)}" for name, module in model.named_modules()),
        *(line for line in config.splitlines() if "_name_or_path" not in line),
        f"{list(widths)} {states}",
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _digest(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@cache
def _own_code() -> str:
    """A digest of the Python code that defines passes."""
    root = Path(__file__).parents[2]
    return _digest(sorted(file for room in ("kernels", "models") for file in (root / room).rglob("*.py")))


def _files(model: RaggedModel) -> set[Path]:
    """The files that define a model's modules and the functions put into them; of remote code the whole folder."""
    classes = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    functions = {function.__module__ for module in model.modules() for function in _callables(module)}
    files = set[Path]()
    for name in classes | functions:
        package = name.partition(".")[0]
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and package not in _RELEASED:
            files.update(
                Path(file).parent.glob("*.py") if package == TRANSFORMERS_DYNAMIC_MODULE_NAME else [Path(file)]
            )
    return files


def _plain(module: nn.Module) -> list[tuple[str, object]]:
    """Attributes of a module that tracing turns into constants."""
    held = sorted((name, value) for name, value in vars(module).items() if isinstance(value, _PLAIN))
    return [(name, value) for name, value in held if name[0] != "_" and name != "name_or_path"]


def _callables(module: nn.Module) -> list[Any]:
    """Functions put into a module that its forward may call, and hooks that are not transformers' own."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    functions = [value for _, value in sorted(vars(module).items()) if isinstance(value, _FUNCTIONS)]
    return functions + [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("transformers.")]


def _functions(module: nn.Module) -> list[str]:
    return [f"{one.__module__}.{getattr(one, '__qualname__', type(one).__qualname__)}" for one in _callables(module)]


def _without_weights(model: RaggedModel) -> RaggedModel:
    """A shallow copy without values in its tensors, but for the smallest."""
    other: RaggedModel = shallow_copy(model)
    forget_outputs(other)
    _move(other, "meta")
    return other


def _move(model: nn.Module, device: str) -> None:
    """Replaces the tensors of a model by empty ones on `device`, but for the smallest and those already there."""
    made: dict[int, Tensor] = {}

    def moved(tensor: Tensor | None) -> Any:
        if tensor is None or tensor.numel() <= _WRITTEN or tensor.device.type == device:
            return tensor
        if id(tensor) not in made:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
        return made[id(tensor)]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: moved(tensor) for name, tensor in held.items()})


def _example(model: RaggedModel, widths: Sequence[tuple[int, ...]], states: int) -> tuple[PassInputs, PassInputs]:
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
    buffers = [_pair(width, _ROWS, _COLUMNS, model.dtype) for width in widths]
    projections = [_pair(width, _ROWS - 1, _FRAMES, model.dtype) for width in widths] if model.has_encoder else []
    returned = [torch.arange(_RETURNED + state) % _NODES for state in range(states)]
    given = PassInputs(
        model.inputs(place[None]), positions, place[:_KEPT], tables, encoders, buffers, projections, returned
    )
    free, of = Dim.DYNAMIC, dict[str, Any]()
    of["ids"] = of["positions"] = {1: free}
    of["kept"] = {0: free}
    of["tables"], of["encoders"] = ([{2: free, 3: free}] * len(some) for some in (tables, encoders))
    of["returned"] = [{0: free}] * states
    of["buffers"], of["frames"] = ([({0: free, 2: free},) * 2] * len(some) for some in (buffers, projections))
    return given, PassInputs(**of)


def _pair(width: tuple[int, ...], rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    heads, *sides = width
    keys, values = (torch.zeros(rows, heads, columns, side, dtype=dtype) for side in sides)
    return keys, values


def _main(folder: Path) -> None:
    """Compiles the model in `folder`, in a process of its own."""
    from torch.fx.experimental import _config as shape_config

    os.nice(10)
    torch.set_num_threads(1)
    kernels.available()
    model, widths, states = torch.load(folder / "model.pt", weights_only=False)
    _move(model, "cpu")
    note_outputs(model)
    given, sizes = _example(model, widths, states)
    with torch.no_grad(), shape_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        program = torch.export.export(model.eval(), tuple(given), dynamic_shapes={"given": tuple(sizes)}, strict=False)
    made = torch._inductor.aoti_compile_and_package(program, inductor_configs=_OPTIONS)
    own = _tensors(model)
    torch.save({n: t for n, t in program.constants.items() if n not in own}, folder / _CONSTANTS)
    shutil.move(made, folder / _CODE)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
