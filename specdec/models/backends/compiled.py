"""The backend "compiled": one compiled function for all passes of a model.

Ragged passes have one size that changes, the number of nodes; rows and columns of the buffers concern only our
attention. So one graph serves prompts, chains, trees and batches. A process of its own compiles it, once for all models
of the same structure (`specdec.models.backends.compiler`), while passes run packed. A thread waits for that process and
loads the code, which the next pass runs on.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import IO, Any

import torch
import transformers
from torch import Tensor, nn
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

from specdec import kernels
from specdec.core.drafts import Chained, ChainRule
from specdec.errors import OptionError, UnsupportedError
from specdec.models.backends.compiler import KeptCode, example, tensors_of
from specdec.models.backends.packed_layers import alike
from specdec.models.backends.ragged_inputs import PassInputs, StepInputs
from specdec.models.backends.ragged_model import RaggedModel

_log = logging.getLogger(__name__)
_SWITCH, _AFTER = "SPECDEC_COMPILE", "SPECDEC_COMPILE_AFTER"
_SECONDS = "10"  # of passes, after which compiling pays
_PLAIN = (bool, int, float, str, torch.dtype)  # attributes that tracing turns into constants
_OF_ALL = vars(nn.Module()).keys()
_FUNCTIONS = (BuiltinFunctionType, FunctionType, MethodType)
_RELEASED = ("builtins", "torch", "transformers")  # packages whose versions are part of the key
_PATIENCE = 5.0  # seconds that a program which ends waits until its compiler has started


class CompiledForward:
    """The compiled passes of one model, `ready` once they exist.

    If compiling fails, passes run as before and a warning gives the reason. `join` returns the model with packed layers
    fused, which is compiled.
    """

    def __init__(self, model: RaggedModel, join: Callable[[], RaggedModel]) -> None:
        self._model, self._join = model, join
        self._passes: Any = None
        self._insists = False
        self._waiting: threading.Thread | None = None
        self._starting = threading.Lock()  # of the thread
        self._after = math.inf  # seconds of passes until compiling begins
        self._spent = [0.0]  # seconds of this model's passes, a list that outlives it

    def start(self) -> CompiledForward:
        """Loads kept code, or begins to compile."""
        self._insists = True
        with suppress(kernels.Lack):  # which the thread tells
            _ = self._joined
            self._loads()
        self.compile()
        return self

    def start_later(self) -> CompiledForward | None:
        """Loads kept code, or begins to compile once such models' passes have taken `$SPECDEC_COMPILE_AFTER` seconds.

        None where that cannot be, failed within the last day, or is switched off (`$SPECDEC_COMPILE`=0).
        """
        try:
            code = self._code
        except kernels.Lack:
            return None
        if code.exists and self._loads():
            return self
        if os.environ.get(_SWITCH) == "0" or code.failure() is not None:
            return None
        _ = self._joined
        self._after = _seconds() - code.seconds()
        weakref.finalize(self, code.add_seconds, self._spent)
        return self

    def compile(self) -> None:
        """Begins to compile in the background, unless that was begun before."""
        with self._starting:
            if self.ready or self._waiting is not None:
                return
            begun = threading.Event()
            self._waiting = threading.Thread(
                target=_wait, args=(weakref.ref(self), self._name, begun), name="specdec-compile", daemon=True
            )
            self._waiting.start()
        atexit.register(begun.wait, _PATIENCE)

    def spent(self, seconds: float) -> None:
        """Notes the time of a pass without compiled code."""
        if self._after < math.inf:
            self._spent[0] += seconds
            if self._spent[0] >= self._after:
                self._after = math.inf
                self.compile()

    @property
    def ready(self) -> bool:
        return self._passes is not None

    def wait(self, timeout: float | None = None) -> bool:
        """Waits up to `timeout` seconds until compiling has ended, if it was begun; returns `ready`."""
        if self._waiting is not None:
            self._waiting.join(timeout)
        return self.ready

    def __call__(self, given: PassInputs) -> list[Tensor]:
        """Logits `[1, kept, vocab]` and hidden states, as of `RaggedModel.forward`."""
        return self._passes.run(given.tensors)  # type: ignore[no-any-return]

    def draft_chain(
        self, first: PassInputs, steps: StepInputs, rules: Sequence[ChainRule], embeddings: Tensor | None
    ) -> Chained:
        """Drafts chains: the first pass has inputs `first`; `embeddings` are those of a head (`PackedLinear.table`)."""
        encoders = [table[:, :, first.kept] for table in first.encoders]
        others = [side for pair in (*first.buffers, *first.frames) for side in pair]
        numbers = [_numbers(rule) for rule in rules]
        given = first.tensors, steps.positions, steps.tables, encoders, others, numbers, embeddings
        tokens, probabilities, scores = self._passes.draft_chain(*given)
        guesses = [list(zip(*own, strict=True)) for own in zip(tokens, probabilities, strict=True)]
        found = iter(scores)
        q = [next(found).softmax(-1) if rule.needs_q else None for rule in rules]
        return Chained(guesses, q)

    @cached_property
    def _code(self) -> KeptCode:
        """The kept code, named by the structure of the model as loaded; raises Lack without a home folder."""
        return KeptCode(code_key(self._model))

    @property
    def _name(self) -> str:
        return type(self._model.model).__name__

    @cached_property
    def _joined(self) -> RaggedModel:
        """The model that is compiled, made before the first pass: weights that move later count as changed."""
        _ = self._code  # its key must not depend on tensors that joining adds
        return self._join()

    def _advances(self, lock: IO[str], tried: bool) -> bool:
        """Loads the code, or hands the `lock` to a process that makes it, unless that was `tried` in vain."""
        if self._loads():
            _log.debug("the passes of %s run compiled from now on", self._name)
            return True
        failure = self._code.failure()
        if tried or (failure and not self._insists):
            raise UnsupportedError(failure or "their compiler was killed")
        self._code.begin(self._joined, lock)
        remedy = "" if self._insists else f" ({_SWITCH}=0 prevents it)"
        _tell(f"compiling the passes of {self._name} in the background, once: about a minute{remedy}")
        return False

    def _loads(self) -> bool:
        """Loads kept code, if any; deletes it where that fails. Raises Lack."""
        code = self._code
        if code.exists:
            try:
                self._passes = self._loaded()
            except Exception as error:
                where = f"the compiled passes of {self._name} in {code.folder}"
                _log.warning("%s cannot be used and are deleted: %s", where, error)
                code.fail(str(error))
                with suppress(OSError):  # not ours to write
                    code.code.unlink(missing_ok=True)
        return self.ready

    def _loaded(self) -> Any:
        """The compiled code over this model's weights; UnsupportedError if it is broken or gives other logits."""
        self._code.check()
        made = torch.load(self._code.calls)
        tensors = tensors_of(self._joined) | made["constants"]
        held = [tensors[name] for name in made["held"]]
        inputs = len(example(self._joined)[0].tensors)
        passes = kernels.passes(str(self._code.code), made["calls"], made["outputs"], inputs, held)
        with torch.no_grad():
            logits, *states = self._joined(*example(self._joined)[0])
        found, *hidden = passes.run(example(self._joined)[0].tensors)  # anew, as passes write to buffers
        if not all(alike(*pair, self._joined) for pair in zip((found, *hidden), (logits, *states), strict=True)):
            raise UnsupportedError("compiled code gives other logits")
        return passes


def code_key(model: RaggedModel) -> str:
    """The key of compiled code: models with equal ones run the same code, over weights of their own."""
    config = model.model.config.to_json_string(use_diff=False)
    parts = [torch.__version__, transformers.__version__, kernels.digest(), _own_code()]
    parts += [f"{model.widths} {model.states}", *(line for line in config.splitlines() if "_name_or_path" not in line)]
    sources = set[str]()  # modules of Python that define the model's modules and the functions put into them
    for name, module in model.named_modules():
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        called = [value for _, value in sorted(vars(module).items()) if isinstance(value, _FUNCTIONS)]
        called += [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("transformers.")]
        names = [f"{one.__module__}.{getattr(one, '__qualname__', type(one).__qualname__)}" for one in called]
        own = vars(module).keys() - _OF_ALL - {"name_or_path"}
        constants = [(n, found) for n in sorted(own) if (found := _constant(vars(module)[n])) is not None]
        parts.append(f"{name} {type(module).__module__}.{type(module).__qualname__} {constants} {names}")
        sources |= {kind.__module__ for kind in type(module).__mro__} | {one.__module__ for one in called}
    for name, tensor in tensors_of(model).items():
        parts.append(f"{name} {tensor.dtype} {list(tensor.shape)} {tensor.stride()}")
    parts += [_digest([file]) for file in sorted(_files(sources))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def compiling(model: RaggedModel) -> str | None:
    """That a process compiles this model now, or why one failed to within the last day; None if neither is so."""
    try:
        code = KeptCode(code_key(model))
        if code.is_compiled_now:
            return "it is compiled in the background now"
        failure = code.failure()
        return failure and f"it could not be compiled, and is tried again a day later: {failure}"
    except kernels.Lack:
        return None


def _constant(value: Any) -> str | None:
    """A plain value, or a collection of such, as text that equal values share in every process; None for others."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, dict):
        value = value.items()
    elif not isinstance(value, list | tuple | set | frozenset):
        return None
    parts = [_constant(one) for one in value]
    return None if None in parts else str(sorted(filter(None, parts)) if isinstance(value, set | frozenset) else parts)


def _digest(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@cache
def _own_code() -> str:
    """A digest of the Python code that defines passes."""
    root = Path(__file__).parents[2]
    return _digest(sorted(file for room in ("kernels", "models") for file in (root / room).rglob("*.py")))


def _files(modules: Iterable[str]) -> set[Path]:
    """The files of these modules, but for releases' own; of remote code the whole folder."""
    files = set[Path]()
    for name in modules:
        package = name.partition(".")[0]
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and package not in _RELEASED:
            remote = package == TRANSFORMERS_DYNAMIC_MODULE_NAME
            files.update(Path(file).parent.glob("*.py") if remote else [Path(file)])
    return files


def _wait(reference: weakref.ref[CompiledForward], name: str, begun: threading.Event) -> None:
    """Loads a model's code as soon as it exists, and has it compiled unless a process does so; runs in a thread.

    It holds no model while it waits. `begun` is set once a process compiles or none will.
    """
    try:
        for tried in (False, True):
            forward = reference()
            if forward is None:
                return
            code = forward._code
            del forward
            if tried or code.is_compiled_now:
                begun.set()
            with code.alone() as lock:
                forward = reference()
                if forward is None or forward._advances(lock, tried):
                    return
                del forward
    except Exception as error:
        if threading.main_thread().is_alive():  # else there is no reader
            _tell(f"the passes of {name} are not compiled, they run as before: {error}")
    finally:
        begun.set()


@cache
def _tell(line: str) -> None:
    """Logs a line once: target and draft often have the same class."""
    _log.warning(line)


def _seconds() -> float:
    """`$SPECDEC_COMPILE_AFTER`; raises OptionError if that is no number."""
    named = os.environ.get(_AFTER) or _SECONDS
    try:
        return float(named)
    except ValueError:
        raise OptionError.of(_AFTER, "a number of seconds", named) from None


def _numbers(rule: ChainRule) -> tuple[object, ...]:
    """A rule as passes.cpp takes it."""
    filters, address, first = rule.choice
    noise = [] if address is None else [kernels.signed(address), first]
    chosen = [(name, [*map(float, numbers)]) for name, numbers in filters], noise
    budget = rule.budget
    bins = [*budget.edges], [*budget.bases], [*budget.rates]
    costs = budget.node_cost / budget.later, budget.pass_cost / budget.later
    return *chosen, rule.most, rule.width, [*rule.ends], *bins, *costs, budget.needs_confidence, rule.needs_q
