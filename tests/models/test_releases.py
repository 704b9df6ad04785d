"""The oldest and the newest releases that `pyproject.toml` allows pass the tests of what libraries do not promise.

torch is the one that is installed: another brings gigabytes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from tests.models.test_compat import ROOT, requirements

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def wanted(which: str) -> list[str]:
    """What pip is asked for: the lower bounds, or anything within the bounds."""
    others = [need for need in requirements() if need.name != "torch"]
    pinned = [f"{need.name}=={lowest(need)}" if which == "lowest" else str(need) for need in others]
    return [f"torch=={torch.__version__.partition('+')[0]}", *pinned]


def lowest(need: Requirement) -> str:
    """The lower bound."""
    [bound] = [bound.version for bound in need.specifier if bound.operator == ">="]
    return bound


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of an environment that finds what it lacks in this one."""
    venv.create(tmp_path / "venv", with_pip=True)
    [packages] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    here = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "zz_this_one.pth").write_text("\n".join(here), encoding="utf-8")
    return tmp_path / "venv" / "bin" / "python"


@pytest.mark.parametrize("which", ["lowest", "newest"])
def test_other_releases(which: str, python: Path) -> None:
    """`tests/models/test_compat.py` passes with them; without a package index there is nothing to try."""
    upgrade = ["--upgrade", "--upgrade-strategy", "eager"] if which == "newest" else []
    command = [python, "-m", "pip", "install", "--retries", "1", *upgrade, *wanted(which)]
    installed = subprocess.run(command, capture_output=True, text=True)
    if installed.returncode:
        why = installed.stderr.strip().splitlines()[-1]
        assert "ResolutionImpossible" not in why, installed.stderr
        pytest.skip(f"pip could not install them: {why}")
    if "Successfully installed" not in installed.stdout:
        pytest.skip("these are the releases that all tests run with")
    tests = [python, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/models/test_compat.py"]
    done = subprocess.run(tests, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, f"{installed.stdout.splitlines()[-1]}\n{done.stdout[-4000:]}{done.stderr[-1000:]}"
