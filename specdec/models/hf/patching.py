"""Temporarily replaces methods of a model's modules, only for the calling thread.

While some pass needs it, a module's instance holds a stand-in that calls the replacement of the calling thread, if any;
the last pass removes it. So other threads, and calls after an exception, see the original, and nothing is left on the
user's model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

Method = tuple[nn.Module, str]
CHANGING = threading.Lock()  # held while attributes of modules are replaced


class _Overrides(threading.local):
    methods: Mapping[Method, Callable[..., Any]] = {}


_overrides = _Overrides()


@contextmanager
def override(methods: Mapping[Method, Callable[..., Any]]) -> Iterator[None]:
    """Context in which this thread's calls of these `(module, name)` methods call the given functions."""
    before, _overrides.methods = _overrides.methods, {**_overrides.methods, **methods}
    stand_ins = []
    try:
        with CHANGING:
            for method in methods:
                stand_ins.append(_StandIn.install(method))
        yield
    finally:
        with CHANGING:
            for stand_in in stand_ins:
                stand_in.leave()
        _overrides.methods = before


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """A module's own attributes, without stand-ins."""
    with CHANGING:
        state = dict(vars(module))
    stand_ins = {name: value for name, value in state.items() if type(value) is _StandIn}
    originals = {name: stand_in.original for name, stand_in in stand_ins.items() if stand_in.on_instance}
    return {name: value for name, value in state.items() if name not in stand_ins} | originals


class _StandIn:
    """The stand-in for a method of a module's instance, used by `users` passes."""

    def __init__(self, method: Method) -> None:
        module, name = self.method = method
        self.original, self.users = getattr(module, name), 0
        self.on_instance = name in vars(module)  # accelerate's hooks set one

    @classmethod
    def install(cls, method: Method) -> _StandIn:
        """The method's stand-in, with one more user; set directly, as `nn.Module.__setattr__` is slow."""
        module, name = method
        stand_in = vars(module).get(name)
        if not isinstance(stand_in, cls) or stand_in.method[0] is not module:
            stand_in = vars(module)[name] = cls(method)
        stand_in.users += 1
        return stand_in

    def leave(self) -> None:
        """Removes one user; after the last one the module is as before, unless the method was replaced meanwhile."""
        module, name = self.method
        self.users -= 1
        if self.users == 0 and vars(module).get(name) is self:
            if self.on_instance:
                vars(module)[name] = self.original
            else:
                del vars(module)[name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _overrides.methods.get(self.method, self.original)(*args, **kwargs)
