"""Tests that are coroutines run as they are; a server in a process of its own; a file of keys."""

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.process import KEY, OTHER_KEY, Process, serving
from tests.server.served import run


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with serving(tmp_path_factory.mktemp("served")) as process:
        yield process


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """Two keys, one of them with a name."""
    path = tmp_path / "keys"
    path.write_text(f"# ours\n{KEY}\nbob: {OTHER_KEY}\n")
    return path


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """In a loop of their own, no longer than they should."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    run(test(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}))
    return True
