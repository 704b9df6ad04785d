"""Packed layers that read the same input as one: query, key and value, or gate and up.

A call costs microseconds before any weight is read, which adds up in a pass over one token. The weights of joined
layers lie in one piece, and the single layers hold views of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from specdec.kernels import PackedLinear
from specdec.models.hf.derived import shallow_copy

_JOINED: WeakValueDictionary[tuple[int, ...], PackedLinear] = WeakValueDictionary()
"""Joined layers by the addresses of their parts: other models over the same layers reuse them."""


def join_layers(layers: Sequence[PackedLinear], copies: Sequence[Any], names: Sequence[str]) -> PackedLinear | None:
    """One layer with the outputs of all `layers`, if their weights can lie in one piece; None if not.

    The layers of these `names` in the models `copies` become views of it, too.
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
        for copy in copies:
            copy.get_submodule(name)._buffers.update(layer._buffers)
    return joined


def _addresses(layers: Sequence[PackedLinear]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for layer in layers for tensor in layer.buffers())
