"""Tests that are coroutines run as they are; a server in a process of its own."""

import inspect
from collections.abc import Iterator

import pytest

from tests.server.process import Process, serving
from tests.server.served import run


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with serving(tmp_path_factory.mktemp("served")) as process:
        yield process


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """In a loop of their own, no longer than they should."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    run(test(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}))
    return True
