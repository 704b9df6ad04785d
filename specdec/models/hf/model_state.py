"""Whether a model still computes what it did: what is remembered of a model belongs to one state of it.

Adapters that are switched, weights that are written to, hooks and patched methods change what a model computes between
two calls, and nothing announces it. So a state is read anew for every call.
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
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PretrainedConfig, PreTrainedModel

from specdec.models.hf.patching import CHANGING, original_attributes
from specdec.models.hf.private_api import CAPTURING

_SAMPLE = 16  # values of each tensor: writes to whole tensors change some of them
_DEEPEST = 4  # collections within collections that are read
_SCALARS = frozenset({int, float, complex, bool, str, bytes, type(None)})
_COLLECTIONS = frozenset({list, tuple, dict, set, frozenset})
_OF_PASSES = {"max_seq_len_cached", "_output_capturing_hooks_installed", "_previous_max_cache_length"}  # which set them
_NO_SETTINGS = _OF_PASSES.union(vars(nn.Module()))
_OF_OUTPUTS = frozenset({"use_cache", "output_attentions", "output_hidden_states", "return_dict", "_output_attentions"})
_KNOWN = frozenset({"torch", "transformers", "accelerate", "peft", "bitsandbytes", "specdec", "builtins"})
_serials: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # of functions: addresses are used again
_next_serial = itertools.count()


@dataclass(frozen=True)
class ModelState:
    """Digests of what a model's output depends on; equal ones are of models that compute the same.

    `values` is a sample of each weight: a write through `.data` to a few values of a large tensor may go unseen. `rest`
    are addresses and versions of weights, configs, and what is private to modules. `is_readable` is False where
    something may change unseen: a caller's own hook or method, an object or tensor of unknown kind.
    """

    modules: bytes
    hooks: bytes
    settings: bytes
    values: bytes
    rest: bytes
    is_readable: bool

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """The state of a model; never raises."""
        return _Reading(model).state

    def changed(self, since: ModelState) -> list[str]:
        """The names of the parts that differ and that a copy made of the model does not follow."""
        parts = ("modules", "hooks", "settings", "values")
        return [name for name in parts if getattr(self, name) != getattr(since, name)]

    @cached_property
    def digest(self) -> bytes:
        """Of all parts."""
        return _digest([getattr(self, one.name) for one in fields(self)])


class _Reading:
    """One walk over a model; `state` is what it found."""

    def __init__(self, model: nn.Module) -> None:
        self.readable = True
        self._modules, self._hooks, self._settings, self._rest = list[Any](), list[Any](), list[Any](), list[Any]()
        self._tensors, self._others = list[Tensor](), list[Tensor]()
        self._configs: dict[int, PretrainedConfig] = {}
        self._hook_all(-1, torch_module._global_forward_hooks)
        self._hook_all(-1, torch_module._global_forward_pre_hooks)
        with CHANGING:
            for number, module in enumerate(model.modules()):
                self._module(number, module)
        for config in self._configs.values():
            named = sorted(vars(config).keys() - _OF_OUTPUTS)
            self._rest += [(name, self._plain(vars(config)[name])) for name in named]
        values, known = self._sample(self._tensors)
        others, known_others = self._sample(self._others)
        rest = _digest([*self._rest, known, known_others, others])
        modules, hooks, settings = _digest(self._modules), _digest(self._hooks), _digest(self._settings)
        self.state = ModelState(modules, hooks, settings, values, rest, self.readable)

    def _module(self, number: int, module: nn.Module) -> None:
        kind = type(module)
        self._modules += (id(kind), _serial(kind.forward), *module._modules)
        if module._forward_hooks:
            self._hook_all(number, module._forward_hooks)
        if module._forward_pre_hooks:
            self._hook_all(number, module._forward_pre_hooks)
        self._tensors += [t for t in module._parameters.values() if t is not None]
        for name, tensor in module._buffers.items():
            if tensor is not None:  # passes may make those anew that are not saved, as frequencies of rotations are
                (self._others if name in module._non_persistent_buffers_set else self._tensors).append(tensor)
        own = vars(module)
        of_layer = not isinstance(module, PreTrainedModel)
        for name in sorted(own.keys() - _NO_SETTINGS):
            for value in original_attributes(own[name]):
                self._attribute(number, name, value, of_layer and not name.startswith(("_", "gradient_checkpointing")))

    def _hook_all(self, number: int, hooks: Any) -> None:
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
        """What `marshal` takes in the place of a value; tensors are noted, and what nobody knows makes unreadable."""
        kind = type(value)
        if kind in _SCALARS:
            return value
        if depth < _DEEPEST and kind in _COLLECTIONS:
            if kind is dict:
                return [(self._plain(k, depth + 1), self._plain(v, depth + 1)) for k, v in value.items()]
            if kind in (set, frozenset):
                return sorted(map(repr, value))
            return [self._plain(one, depth + 1) for one in value]
        if isinstance(value, Tensor):
            self._others.append(value)
            return None
        if hasattr(value, "tolist"):  # numpy's
            return repr(value.tolist())
        if isinstance(value, int | float | str):  # of classes of their own
            return repr(value)
        self._trust(value)
        return repr(value) if isinstance(value, torch.dtype | torch.device) else None

    def _trust(self, value: Any) -> None:
        """Code and objects of the libraries below are known; others may depend on anything."""
        value = value.func if isinstance(value, partial) else value
        module = getattr(value, "__module__", None) or type(value).__module__
        if str(module).partition(".")[0] not in _KNOWN:
            self.readable = False

    def _sample(self, tensors: Sequence[Tensor]) -> tuple[bytes, Any]:
        """A digest of a sample of values, and the tensors' addresses and versions."""
        known: list[Any] = []
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        read = blake2b(digest_size=16)
        with torch.no_grad():
            for tensor in tensors:
                try:
                    known.append((tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version, *tensor.shape))
                    if (sample := _sampled(tensor)) is not None:
                        groups.setdefault((tensor.device, tensor.dtype), []).append(sample)
                except (RuntimeError, NotImplementedError, TypeError):  # of kinds that have no plain memory
                    self.readable = False
            for (_, dtype), samples in groups.items():
                read.update(f"{dtype} {len(samples)}".encode())
                try:
                    read.update(torch.cat(samples).view(torch.uint8).cpu().numpy().tobytes())
                except (RuntimeError, NotImplementedError, TypeError):
                    self.readable = False
        return read.digest(), known


def _sampled(tensor: Tensor) -> Tensor | None:
    """Some values, from all over its memory; None of what is read for each pass, or has a way of its own."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or not tensor.numel():
        return None
    count = tensor.numel()
    if not tensor.is_contiguous():  # its memory in order, where it is one piece
        count = min(count, tensor.untyped_storage().nbytes() // tensor.element_size() - int(tensor.storage_offset()))
    return torch.as_strided(tensor.detach(), (min(_SAMPLE, count),), (max(count // _SAMPLE, 1),))


def float32_is_rounded(device: torch.device) -> bool:
    """Whether matrix products of float32 on this device are computed in fewer bits, as torch's settings allow it."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    precision = backend.matmul.fp32_precision
    return precision == "bf16" or (precision == "tf32" and device.type == "cuda")


@cache
def _device_types() -> tuple[str, ...]:
    """Those that this machine computes on."""
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if here is None else ("cpu", here.type)


@contextmanager
def plain_modes() -> Iterator[None]:
    """While it lasts, this thread computes as a new one would: no autocast, default device or gradients of a caller."""
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.no_grad())
        for kind in _device_types():
            modes.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            modes.enter_context(torch.device("cpu"))
        yield


def _serial(function: Any) -> int:
    """A number of its own for every function, for as long as it lives."""
    try:
        return _serials.setdefault(function, next(_next_serial))
    except Exception:  # it cannot be referred to weakly, or compares in its own way
        return id(function)


def _digest(values: list[Any]) -> bytes:
    return blake2b(marshal.dumps(values, 2), digest_size=16).digest()
