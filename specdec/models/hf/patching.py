"""Methods of a model's modules that are others while one of our passes runs, for the thread that runs it.

A module is touched only while some pass needs it: its instance gets a stand-in, which asks what the calling thread
wants, and loses it with the last pass. So other threads and calls after an exception see the original behaviour, and
nothing is left on the user's model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

Method = tuple[nn.Module, str]
CHANGING = threading.Lock()  # of modules


class _Wanted(threading.local):
    """What the passes of one thread put in the place of methods."""

    def __init__(self) -> None:
        self.methods: dict[Method, Callable[..., Any]] = {}


_wanted = _Wanted()


@contextmanager
def overridden(methods: Mapping[Method, Callable[..., Any]]) -> Iterator[None]:
    """While it lasts, this thread's calls of these `(module, name)` methods are calls of the given functions."""
    before, _wanted.methods = _wanted.methods, {**_wanted.methods, **methods}
    stand_ins = []
    try:
        with CHANGING:
            for method in methods:
                stand_ins.append(_StandIn.put(method))
        yield
    finally:
        with CHANGING:
            for stand_in in stand_ins:
                stand_in.leave()
        _wanted.methods = before


def settled(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module's instance as they are outside of passes."""
    with CHANGING:
        state = dict(vars(module))
    for name in [name for name, value in state.items() if type(value) is _StandIn]:
        stand_in = state.pop(name)
        if stand_in.own:
            state[name] = stand_in.original
    return state


def original_attributes(value: Any) -> tuple[Any, ...]:
    """An attribute of a module's instance as it is outside of passes; nothing where it has none then."""
    if type(value) is not _StandIn:
        return (value,)
    return (value.original,) if value.own else ()


class _StandIn:
    """What a module's instance has in the place of a method, for `users` passes."""

    def __init__(self, method: Method) -> None:
        module, name = self.method = method
        self.original, self.users = getattr(module, name), 0
        self.own = name in vars(module)  # as with accelerate's hooks

    @classmethod
    def put(cls, method: Method) -> _StandIn:
        """The method's stand-in with one more user. Written past `nn.Module.__setattr__`, which takes its time."""
        module, name = method
        found = vars(module).get(name)
        if not isinstance(found, cls) or found.method[0] is not module:
            found = vars(module)[name] = cls(method)
        found.users += 1
        return found

    def leave(self) -> None:
        """One user less; after the last one the module is as before, unless somebody has replaced the method since."""
        module, name = self.method
        self.users -= 1
        if self.users == 0 and vars(module).get(name) is self:
            if self.own:
                vars(module)[name] = self.original
            else:
                del vars(module)[name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _wanted.methods.get(self.method, self.original)(*args, **kwargs)
