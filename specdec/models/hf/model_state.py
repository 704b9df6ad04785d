"""Digests of a model's state: what is cached for a model is valid in one state of it.

Switched adapters, written weights, hooks and patched methods change what a model computes, without notice. So the state
is read anew for every call.
"""

from __future__ import annotations

import itertools
import marshal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import cache, cached_property, partial
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specdec.models.hf.device_hooks import offloaded_weights
from specdec.models.hf.patching import CHANGING, original_attributes
from specdec.models.hf.private_api import CAPTURING, attention_of

_SAMPLE = 16  # values of each tensor: a write to the whole tensor changes some of them
_DEEPEST = 4  # nested collections that are read
_SCALARS = frozenset({int, float, complex, bool, str, bytes, type(None)})
_COLLECTIONS = frozenset({list, tuple, dict, set, frozenset})
# set by passes
_OF_PASSES = {"max_seq_len_cached", "rope_deltas", "_output_capturing_hooks_installed", "_previous_max_cache_length"}
_NO_SETTINGS = _OF_PASSES.union(vars(nn.Module()))
_OF_OUTPUTS = frozenset({"use_cache", "output_attentions", "output_hidden_states", "return_dict", "_output_attentions"})
_KNOWN = frozenset({"torch", "transformers", "accelerate", "peft", "bitsandbytes", "specdec", "builtins"})
_serials: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # of functions, as addresses are reused
_next_serial = itertools.count()


@dataclass(frozen=True)
class ModelState:
    """Digests of all that a model's output depends on; models with equal ones compute the same.

    `values` samples each weight: a write through `.data` to a few values of a large tensor may go unseen. `rest` covers
    addresses and versions of weights, configs, and private attributes. `is_readable` is False if something may change
    unseen: a caller's hook or method, an object or tensor of unknown kind.
    """

    modules: bytes
    hooks: bytes
    settings: bytes
    values: bytes
    rest: bytes
    is_readable: bool

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        return _Reading(model).state

    def changed(self, since: ModelState) -> list[str]:
        """The names of the parts that differ and that copies of the model do not follow."""
        parts = ("modules", "hooks", "settings", "values")
        return [name for name in parts if getattr(self, name) != getattr(since, name)]

    @cached_property
    def digest(self) -> bytes:
        return _digest([getattr(self, one.name) for one in fields(self)])


class StateReader:
    """Reads the state of one model repeatedly; holds the model weakly, and the last reading as long as it lives."""

    def __init__(self, model: nn.Module) -> None:
        self._last = last = list[_Reading]()
        self.model: Any = ref(model, lambda _: last.clear())

    def read(self) -> ModelState | None:
        """The current state; None if the model was deleted."""
        model = self.model()
        if model is None:
            return None
        last = next(iter(self._last), None)
        if last is None or not last.holds():
            self._last[:] = [last := _Reading(model)]
        return last.state


class _Reading:
    """One walk over a model; `state` is its result."""

    def __init__(self, model: nn.Module) -> None:
        self.readable = True
        self._modules, self._hooks, self._settings, self._rest = list[Any](), list[Any](), list[Any](), list[Any]()
        self._live, self._contents = list[Any](), list[Any]()  # collections, and copies of them
        self._objects: list[tuple[Any, Any, Any]] = []  # objects in them: equal ones may be replaced
        self._forwards: dict[Any, Any] = {}
        self._configs: dict[int, PretrainedConfig] = {}
        self._offloaded: dict[int, dict[str, Any]] = {}
        self._tensors, self._others = list[Tensor](), list[Tensor]()
        self._hook_all(-1, torch_module._global_forward_hooks)
        self._hook_all(-1, torch_module._global_forward_pre_hooks)
        with CHANGING:
            for number, module in enumerate(model.modules()):
                self._module(number, module)
        self._shared()
        self._samples = _Sample(self._tensors), _Sample(self._others)
        self._found = [sample.read() for sample in self._samples]
        (known, values), others = self._found
        parts = self._modules, self._hooks, self._settings, values, [*self._rest, known, *others]
        modules, hooks, settings, of_values, rest = map(_digest, parts)
        readable = self.readable and all(sample.complete for sample in self._samples)
        self.state = ModelState(modules, hooks, settings, of_values, rest, readable)

    def holds(self) -> bool:
        """Whether another walk would give the same state, in a third of its time."""
        try:
            with CHANGING:
                same = (
                    self._live == self._contents
                    and all(held[key] is value for held, key, value in self._objects)
                    and all(kind.forward is forward for kind, forward in self._forwards.items())
                )
            return (
                same
                and self._attention_functions() == self._attentions
                and [sample.read() for sample in self._samples] == self._found
            )
        except Exception:  # comparing tensors, or reading freed ones
            return False

    def _shared(self) -> None:
        """Reads what modules share: configs, the attention functions that they name, offloaded weights."""
        for config in self._configs.values():
            self._note(vars(config))
            named = sorted(vars(config).keys() - _OF_OUTPUTS)
            self._rest += [(name, self._plain(vars(config)[name])) for name in named]
        self._attentions = self._attention_functions()
        for function in self._attentions:
            self._hooks.append(_serial(function))
            self._trust(function)
        for weights in self._offloaded.values():
            self._rest.append(self._plain(weights))

    def _attention_functions(self) -> list[Any]:
        """The functions that transformers' layers call for the configs' attentions."""
        kinds = sorted({attention_of(config) for config in self._configs.values()})
        interfaces = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
        return [interface[kind] for interface in interfaces for kind in kinds if kind in interface]

    def _note(self, held: Any) -> None:
        self._live.append(held)
        self._contents.append(held.copy())
        if not isinstance(held, set):
            pairs = held.items() if isinstance(held, dict) else enumerate(held)
            self._objects += [(held, k, v) for k, v in pairs if type(v) not in _SCALARS and k not in _NO_SETTINGS]

    def _module(self, number: int, module: nn.Module) -> None:
        kind: Any = type(module)
        if kind not in self._forwards and _is_known(kind):  # a caller may have put another one into a known class
            self._trust(kind.forward)
        self._forwards[kind] = kind.forward
        self._modules += (id(kind), _serial(kind.forward), *module._modules)
        for held in (vars(module), module._modules, module._parameters, module._buffers):
            self._note(held)
        self._hook_all(number, module._forward_hooks)
        self._hook_all(number, module._forward_pre_hooks)
        self._tensors += [t for t in module._parameters.values() if t is not None]
        for name, tensor in module._buffers.items():
            if tensor is not None:  # passes may replace non-persistent ones, such as rotary frequencies
                (self._others if name in module._non_persistent_buffers_set else self._tensors).append(tensor)
        self._offloaded.update({id(weights): weights for weights in offloaded_weights(module)})
        own = vars(module)
        of_layer = not isinstance(module, PreTrainedModel)
        for name in sorted(own.keys() - _NO_SETTINGS):
            for value in original_attributes(own[name]):
                self._attribute(number, name, value, of_layer and not name.startswith(("_", "gradient_checkpointing")))

    def _hook_all(self, number: int, hooks: Any) -> None:
        self._note(hooks)
        for key, hook in hooks.items():
            if getattr(hook, "__module__", "") != CAPTURING:
                self._hooks.append((number, key))
                self._trust(hook)

    def _attribute(self, number: int, name: str, value: Any, followed: bool) -> None:
        if type(value) in _SCALARS:
            (self._settings if followed else self._rest).extend((name, value))
        elif isinstance(value, PretrainedConfig):
            self._configs[id(value)] = value
        elif callable(value) and not isinstance(value, nn.Module):
            (self._hooks if followed or name == "forward" else self._rest).append((number, name, _serial(value)))
            self._trust(value)
        else:
            (self._settings if followed else self._rest).extend((name, self._plain(value)))

    def _plain(self, value: Any, depth: int = 0) -> Any:
        """A value that `marshal` accepts for `value`; notes tensors, and unknown objects as unreadable."""
        kind = type(value)
        if kind in _SCALARS:
            return value
        if depth < _DEEPEST and kind in _COLLECTIONS:
            if kind not in (tuple, frozenset):
                self._note(value)
            if kind is dict:
                return [(self._plain(k, depth + 1), self._plain(v, depth + 1)) for k, v in value.items()]
            if kind in (set, frozenset):
                return sorted(map(repr, value))
            return [self._plain(one, depth + 1) for one in value]
        if isinstance(value, Tensor):
            self._others.append(value)
            return None
        if hasattr(value, "tolist"):  # NumPy
            return repr(value.tolist())
        if isinstance(value, int | float | str):  # subclasses
            return repr(value)
        self._trust(value)
        return repr(value) if isinstance(value, torch.dtype | torch.device) else None

    def _trust(self, value: Any) -> None:
        """Marks the state unreadable unless the value is from a known library."""
        value = value.func if isinstance(value, partial) else value
        while value is not None:
            if not _is_known(value):
                self.readable = False
            value = getattr(value, "__wrapped__", None)


class _Sample:
    """Sampled values of tensors with their addresses; `complete` if all tensors could be read."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.complete, self._tensors = True, tensors
        self._groups: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, int, int]]] = {}
        for tensor in tensors:
            if (part := _part(tensor)) is not None:
                self._groups.setdefault((tensor.device, tensor.dtype), []).append((tensor, *part))

    def read(self) -> tuple[list[Any], list[Any]]:
        """Addresses, versions and shapes of the tensors, and the sampled values."""
        known, values = list[Any](), list[Any]()
        with torch.no_grad():
            for tensor in self._tensors:
                try:
                    version = 0 if tensor.is_inference() else tensor._version
                    known.append((tensor.data_ptr(), version, *tensor.shape, *tensor.stride()))
                except (RuntimeError, NotImplementedError, TypeError):  # tensors without plain memory
                    self.complete = False
            for (_, dtype), parts in self._groups.items():
                try:
                    some = torch.cat([torch.as_strided(tensor, (size,), (step,)) for tensor, size, step in parts])
                    values.append((str(dtype), some.view(torch.uint8).cpu().numpy().tobytes()))
                except (RuntimeError, NotImplementedError, TypeError):
                    self.complete = False
        return known, values


def _part(tensor: Tensor) -> tuple[int, int] | None:
    """How many values to sample, and their distance; None for meta tensors and tensor subclasses."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or not tensor.numel():
        return None
    count = tensor.numel()
    if not tensor.is_contiguous():  # sampled in the order of memory
        count = min(count, tensor.untyped_storage().nbytes() // tensor.element_size() - int(tensor.storage_offset()))
    return min(_SAMPLE, count), max(count // _SAMPLE, 1)


def float32_is_rounded(device: torch.device) -> bool:
    """Whether torch's settings let float32 matrix products on this device round to fewer bits."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    precision = backend.matmul.fp32_precision
    return precision == "bf16" or (precision == "tf32" and device.type == "cuda")


@cache
def _device_types() -> tuple[str, ...]:
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if here is None else ("cpu", here.type)


@contextmanager
def plain_modes() -> Iterator[None]:
    """Context with the modes of a new thread: no autocast, default device or gradients of a caller."""
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.no_grad())
        for kind in _device_types():
            modes.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            modes.enter_context(torch.device("cpu"))
        yield


def _is_known(value: Any) -> bool:
    """Whether a function, class or object is of the libraries that are known; `functools.wraps` lends others' names."""
    named = getattr(value, "__module__", None) or type(value).__module__
    lies = getattr(getattr(value, "__func__", value), "__globals__", {}).get("__name__", named)
    return all(str(module).partition(".")[0] in _KNOWN for module in (named, lies))


def _serial(function: Any) -> int:
    """A unique number for a function as long as it lives."""
    try:
        return _serials.setdefault(function, next(_next_serial))
    except Exception:  # no weak references, or its own comparison
        return id(function)


def _digest(values: list[Any]) -> bytes:
    return blake2b(marshal.dumps(values, 2), digest_size=16).digest()
