"""Tiny models: a second thread only waits for the first. Models that this user trained are not looked at.

What is known of model families is tried once per test run."""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the libraries are imported

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from specdec import kernels
from specdec.core import draft_schedules
from specdec.models.hf import probe_cache
from tests.folders import saved_model
from tests.tiny import threads

CORE = ("core", "engine", "decoding", "proposers")
gc.disable()  # until all is imported


def pytest_collection_finish() -> None:
    """The collector passes over all that was imported from now on, which took a third of a second each time."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the loop, by their folders, are of the tier `core`, but for slow ones."""
    for item in items:
        if Path(item.path).relative_to(Path(__file__).parent).parts[0] in CORE and not item.get_closest_marker("slow"):
            item.add_marker("core")


@pytest.fixture(scope="session", autouse=True)
def _surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels are built once for all runs; where a test names no schedule, drafting depends on no measured time."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    with pytest.MonkeyPatch.context() as patch, threads(1):
        patch.setenv("SPECDEC_PROBES", str(tmp_path_factory.mktemp("probes")))
        patch.setenv("SPECDEC_KERNELS", os.environ.get("SPECDEC_KERNELS") or str(home / "specdec" / "kernels"))
        patch.setenv("SPECDEC_PACKED", str(tmp_path_factory.mktemp("packed")))
        patch.setattr(draft_schedules, "DEFAULT", "heuristic")
        kernels.available()  # before a test that looks at what is printed
        yield


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target and a draft that disagrees with it, on disk, where nobody writes."""
    root = tmp_path_factory.mktemp("models")
    return saved_model(root / "target"), saved_model(root / "draft", seed=1)


@pytest.fixture(params=[True, False], ids=["compiled", "torch"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways in which the processor filters and draws."""
    if request.param and not kernels.available():
        pytest.skip(str(kernels.lack()))
    monkeypatch.setattr(kernels, "available", lambda: request.param)


@pytest.fixture
def built() -> None:
    """Where kernels cannot be built, what is about them is left out."""
    if missing := kernels.lack():
        pytest.skip(str(missing))


@pytest.fixture
def fresh_verdicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing is known from before; the folder."""
    path = tmp_path / "kept" / "probes"
    monkeypatch.setenv("SPECDEC_PROBES", str(path))
    monkeypatch.setattr(probe_cache, "_results", {})
    return path


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no home folder, and no other one for caches."""

    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names for which a hub was asked, one that is away."""
    names: list[str] = []

    def away(name: str, *_: Any, **__: Any) -> Any:
        names.append(name)
        raise LocalEntryNotFoundError("nobody answers")

    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", away)
    return names


@pytest.fixture(scope="session")
def _nowhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders that are not there, a new one each time."""
    root = tmp_path_factory.mktemp("no-cache")
    return (root / str(number) for number in count())


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch, _nowhere: Iterator[Path]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(next(_nowhere)))


@pytest.fixture
def called(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs `specdec` with these words, which must end with this exit code; returns what it printed, `out` and `err`."""
    from specdec.cli.commands import run_command

    def call(*words: object, code: int = 0) -> Any:
        found = run_command([str(word) for word in words])
        printed = capsys.readouterr()
        assert found == code, printed.err
        return printed

    return call
