"""Packed layers that read the same input share one call: query, key and value, or gate and up.

A call costs microseconds before any weight is read, which adds up in a pass over one token. A trial pass shows which
layers read the same tensor. Their weights then lie in one piece, of which the layers apart hold views.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn

from specdec.kernels import PackedLinear
from specdec.models.hf.derived import shallow_copy

_JOINED: WeakValueDictionary[tuple[int, ...], PackedLinear] = WeakValueDictionary()
"""Joined layers by the addresses of their parts: other models over the same layers reuse them."""


class _Last(threading.local):
    last: tuple[Tensor, Tensor] | None = None

    def __reduce__(self) -> tuple[type[_Last], tuple[()]]:
        return _Last, ()


class Joint(nn.Module):
    def __init__(self, layer: PackedLinear) -> None:
        super().__init__()
        self.layer, self.memo = layer, _Last()

    def of(self, x: Tensor, last: bool) -> Tensor:
        """All outputs `[..., outputs]`; kept for the next reader of `x`, unless this is the `last`."""
        held = self.memo.last
        outputs: Tensor = held[1] if held is not None and held[0] is x else self.layer(x)
        self.memo.last = None if last else (x, outputs)
        return outputs


class OutputSlice(nn.Module):
    """One layer of a joint one: its outputs from `begin` to before `end`; `last`: no other reads the input after it."""

    def __init__(self, joint: Joint, begin: int, end: int, *, last: bool) -> None:
        super().__init__()
        self.joint, self.begin, self.end, self.last = joint, begin, end, last

    def forward(self, x: Tensor) -> Tensor:
        """`[..., inputs]` to `[..., end - begin]`."""
        return self.joint.of(x, self.last)[..., self.begin : self.end]


@contextmanager
def readers(model: Any) -> Iterator[list[list[str]]]:
    """Context of one pass: gathers the names of packed layers, in lists of those that read the same input."""
    calls: list[tuple[object, list[str]]] = []
    found: list[list[str]] = []

    def note(name: str, x: object) -> None:
        if calls and calls[-1][0] is x and calls[-1][1][0].rpartition(".")[0] == name.rpartition(".")[0]:
            calls[-1][1].append(name)
        else:
            calls.append((x, [name]))

    hooks = [
        module.register_forward_pre_hook(lambda _, given, name=name: note(name, given[0] if given else given))
        for name, module in model.named_modules()
        if isinstance(module, PackedLinear)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
    counts = Counter(name for _, names in calls for name in names)
    found += [names for _, names in calls if len(names) > 1 and all(counts[name] == 1 for name in names)]


def fuse_layers(model: Any, others: Sequence[Any], names: Sequence[str]) -> None:
    """Fuses these layers of `model`, a shallow copy of `others`, if their weights can lie in one piece."""
    layers = [model.get_submodule(name) for name in names]
    joined = join_layers(layers, others, names)
    if joined is None:
        return
    joint, begin = Joint(joined), 0
    for name, layer in zip(names, layers, strict=True):
        model.set_submodule(name, OutputSlice(joint, begin, begin + layer.outputs, last=name == names[-1]))
        begin += layer.outputs


def join_layers(layers: Sequence[PackedLinear], others: Sequence[Any], names: Sequence[str]) -> PackedLinear | None:
    """One layer with the outputs of all these, if their weights can lie in one piece; None if not.

    The layers of these `names` in the models `others` become views of it, too.
    """
    if not PackedLinear.can_join(layers):
        return None
    joined = _JOINED.get(_addresses(layers))
    if joined is None:
        joined = PackedLinear.join(layers)
    elif joined.way != layers[0].way:
        joined = shallow_copy(joined)
        joined.way = layers[0].way
    _JOINED[_addresses(layers)] = joined
    for name, layer in zip(names, layers, strict=True):
        for other in others:
            other.get_submodule(name)._buffers.update(layer._buffers)
    return joined


def _addresses(layers: Sequence[PackedLinear]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for layer in layers for tensor in layer.buffers())
