"""Tests that are coroutines run as they are."""

import inspect

import pytest

from tests.server.served import run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """In a loop of their own, no longer than they should."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    run(test(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}))
    return True
