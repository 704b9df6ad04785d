"""Packed layers that read the same input share one call: query, key and value, or gate and up.

A call costs some microseconds before any weight is read, which adds up in a compiled pass over one token. (In the
backends below Python takes as long for the parts.) Which layers belong together shows in a pass: they are handed the
same tensor. The weight of all of them lies in one piece afterwards, of which the model's own layers hold their parts,
so nothing is there twice.
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
from specdec.models.hf.shallow_copy import shallow_copy

_JOINED: WeakValueDictionary[tuple[int, ...], PackedLinear] = WeakValueDictionary()
"""What was joined by now, by where its parts lie: other models over the same layers join them no second time."""


class _Said(threading.local):
    """What a joint layer was asked last in this thread, and its answer."""

    last: tuple[Tensor, Tensor] | None = None

    def __reduce__(self) -> tuple[type[_Said], tuple[()]]:
        return _Said, ()


class Joint(nn.Module):
    """Several layers in one."""

    def __init__(self, layer: PackedLinear) -> None:
        super().__init__()
        self.layer, self.said = layer, _Said()

    def of(self, x: Tensor, last: bool) -> Tensor:
        """All outputs `[..., outputs]`; kept for those who ask next, unless this is the `last` of them."""
        held = self.said.last
        outputs: Tensor = held[1] if held is not None and held[0] is x else self.layer(x)
        self.said.last = None if last else (x, outputs)
        return outputs


class Part(nn.Module):
    """One of the layers of a joint one: its outputs from number `begin` to before `end`; `last` of those in a pass."""

    def __init__(self, joint: Joint, begin: int, end: int, *, last: bool) -> None:
        super().__init__()
        self.joint, self.begin, self.end, self.last = joint, begin, end, last

    def forward(self, x: Tensor) -> Tensor:
        """`[..., inputs]` to `[..., end - begin]`."""
        return self.joint.of(x, self.last)[..., self.begin : self.end]


@contextmanager
def readers(model: Any) -> Iterator[list[list[str]]]:
    """Gathers the names of packed layers of a module that read the same input in the pass that is run meanwhile."""
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


def join(model: Any, own: Any, names: Sequence[str]) -> None:
    """Lets these layers of `model` share a call, if their weights can lie in one piece.

    It is a shallow copy of the model `own`, whose layers hold parts of that piece from then on.
    """
    layers = [model.get_submodule(name) for name in names]
    if not PackedLinear.can_join(layers):
        return
    joined = _JOINED.get(_addresses(layers))
    if joined is None:
        joined = PackedLinear.join(layers)
    elif joined.unpacks != layers[0].unpacks:
        joined = shallow_copy(joined)
        joined.unpacks = layers[0].unpacks
    _JOINED[_addresses(layers)] = joined
    joint, begin = Joint(joined), 0
    for name, layer in zip(names, layers, strict=True):
        own.get_submodule(name)._buffers.update(layer._buffers)
        model.set_submodule(name, Part(joint, begin, begin + layer.outputs, last=name == names[-1]))
        begin += layer.outputs


def _addresses(layers: Sequence[PackedLinear]) -> tuple[int, ...]:
    """Where all that these layers hold lies in memory."""
    return tuple(tensor.data_ptr() for layer in layers for tensor in layer.buffers())
