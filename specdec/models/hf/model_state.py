"""Whether a model still computes what it did: what is remembered of a model belongs to one state of it.

Adapters that are switched, weights that are written to, hooks and patched methods change what a model computes between
two calls, and nothing announces it. So a state is read anew for every call.
"""

from __future__ import annotations

import itertools
import marshal
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import cache, cached_property
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PretrainedConfig

from specdec.models.hf.patching import settled
from specdec.models.hf.private_api import CAPTURING

_SAMPLE = 16  # values of each tensor: writes to whole tensors change some of them
_SCALARS = frozenset({int, float, bool, str, bytes, type(None)})
_OF_PASSES = {"max_seq_len_cached", "_output_capturing_hooks_installed"}  # which passes set
_NO_SETTINGS = _OF_PASSES.union(vars(nn.Module()))
_OF_OUTPUTS = frozenset({"use_cache", "output_attentions", "output_hidden_states", "return_dict", "_output_attentions"})
_serials: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # of functions: addresses are used again
_next_serial = itertools.count()


@dataclass(frozen=True)
class ModelState:
    """Digests of what a model's output depends on; equal ones are of models that compute the same.

    `weights` is read from addresses, versions and a sample of values: a write through `.data` to a few values of a
    large tensor may go unseen.
    """

    modules: bytes
    hooks: bytes
    settings: bytes
    weights: bytes

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """The state of a model that no pass of ours is changing."""
        modules, hooks, settings, tensors = list[Any](), list[Any](), list[Any](), list[Tensor]()
        hooks.append([*torch_module._global_forward_hooks, *torch_module._global_forward_pre_hooks])
        configs: dict[int, PretrainedConfig] = {}
        for number, module in enumerate(model.modules()):
            modules += (id(type(module)), *module._modules)
            for hooked in (module._forward_hooks, module._forward_pre_hooks):
                for key, hook in hooked.items():
                    if getattr(hook, "__module__", "") != CAPTURING:
                        hooks.append((number, key))
            tensors += [t for t in module._parameters.values() if t is not None]
            passing = module._non_persistent_buffers_set  # made anew by passes, as frequencies of rotations are
            tensors += [t for n, t in module._buffers.items() if t is not None and n not in passing]
            for name, value in settled(module).items():
                if name in _NO_SETTINGS:
                    continue
                if type(value) in _SCALARS:
                    settings += (name, value)
                elif isinstance(value, PretrainedConfig):
                    configs[id(value)] = value
                elif callable(value):
                    hooks.append((number, name, _serial(value)))
                elif isinstance(value, Sequence | Mapping | AbstractSet):
                    settings += (name, _plain(value))
        for config in configs.values():
            settings += [(n, _plain(value)) for n, value in vars(config).items() if n not in _OF_OUTPUTS]
        return cls(_digest(modules), _digest(hooks), _digest(settings), _weights(tensors))

    def differences(self, other: ModelState) -> list[str]:
        """The names of the parts that differ."""
        return [one.name for one in fields(self) if getattr(self, one.name) != getattr(other, one.name)]

    @cached_property
    def digest(self) -> bytes:
        """Of all parts."""
        return _digest([getattr(self, one.name) for one in fields(self)])


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


def _weights(tensors: Sequence[Tensor]) -> bytes:
    """A digest of addresses, versions and samples."""
    known = [(t.data_ptr(), 0 if t.is_inference() else t._version, str(t.dtype), *t.shape) for t in tensors]
    read = blake2b(marshal.dumps(known, 2), digest_size=16)
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    with torch.no_grad():
        for tensor in _readable(tensors):
            step = max(tensor.numel() // _SAMPLE, 1)
            sample = torch.as_strided(tensor.detach(), (min(_SAMPLE, tensor.numel()),), (step,))
            groups.setdefault((tensor.device, tensor.dtype), []).append(sample)
        for samples in groups.values():
            read.update(torch.cat(samples).view(torch.uint8).cpu().numpy().tobytes())
    return read.digest()


def _readable(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Those whose values lie in memory one after the other; other classes than torch's have their own ways."""
    for tensor in tensors:
        if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta and tensor.is_contiguous() and tensor.numel():
            yield tensor


def _plain(value: Any) -> Any:
    """Scalars and collections of them as they are, for `marshal`; None in the place of anything else."""
    if type(value) in _SCALARS:
        return value
    if isinstance(value, Mapping):
        return [(_plain(key), _plain(one)) for key, one in value.items()]
    if isinstance(value, AbstractSet):
        return sorted(map(repr, value))
    if isinstance(value, Sequence):
        return [_plain(one) for one in value]
    return None


def _serial(function: Any) -> int:
    """A number of its own for every function, for as long as it lives."""
    try:
        return _serials.setdefault(function, next(_next_serial))
    except TypeError:  # it cannot be referred to weakly, or compares in its own way
        return id(function)


def _digest(values: list[Any]) -> bytes:
    return blake2b(marshal.dumps(values, 2), digest_size=16).digest()
