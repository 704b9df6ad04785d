"""Releases: which are allowed, and that the oldest and newest of them pass the tests of what libraries do not promise.

torch is the one that is installed: another brings gigabytes.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from torch import nn
from transformers import AutoModelForCausalLM, GgufConfig

from tests.folders import saved_gguf

ROOT = Path(__file__).parents[2]
TESTS = [f"tests/models/test_{name}.py" for name in ("releases", "exact", "patching", "rotary", "streaming")]


def requirements() -> list[Requirement]:
    """What the package needs, of these libraries among others."""
    lines = (ROOT / "pyproject.toml").read_text().split("dependencies = [")[1].split("]")[0].splitlines()
    return [Requirement(line.strip().strip('",')) for line in lines if line.strip()]


def test_tested_releases_are_allowed() -> None:
    """Every dependency has an upper bound, and the releases of constraints.txt lie within all bounds."""
    pins = [line.split("#")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    tested = {pin.name: Version(next(iter(pin.specifier)).version) for pin in map(Requirement, pins)}
    for need in requirements():
        assert any(bound.operator == "<" for bound in need.specifier), f"{need.name} has no upper bound"
        assert tested[need.name] in need.specifier


@pytest.mark.filterwarnings("ignore")
def test_gguf_files(tmp_path: Path) -> None:
    """All weights become floats, whatever kernels are installed."""
    pytest.importorskip("gguf")
    saved_gguf(tmp_path / "model.gguf")
    options = {"gguf_file": "model.gguf", "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    assert type(model.lm_head) is nn.Linear
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("which", ["lowest", "newest"])
def test_other_releases(which: str, tmp_path: Path) -> None:
    """With the lower bounds, or anything within the bounds; without a package index there is nothing to try."""
    venv.create(tmp_path / "venv", with_pip=True)
    [packages] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    here = [path for path in sys.path if path.endswith("site-packages")]  # it finds here what it lacks
    (packages / "zz_this_one.pth").write_text("\n".join(here), encoding="utf-8")
    python, wanted = tmp_path / "venv" / "bin" / "python", [f"torch=={torch.__version__.partition('+')[0]}"]
    for need in (one for one in requirements() if one.name != "torch"):
        [lowest] = [bound.version for bound in need.specifier if bound.operator == ">="]
        wanted.append(f"{need.name}=={lowest}" if which == "lowest" else str(need))
    upgrade = ["--upgrade", "--upgrade-strategy", "eager"] if which == "newest" else []
    command = [python, "-m", "pip", "install", "--retries", "1", *upgrade, *wanted]
    installed = subprocess.run(command, capture_output=True, text=True)
    if installed.returncode:
        why = installed.stderr.strip().splitlines()[-1]
        assert "ResolutionImpossible" not in why, installed.stderr
        pytest.skip(f"pip could not install them: {why}")
    if "Successfully installed" not in installed.stdout:
        pytest.skip("these are the releases that all tests run with")
    tests = [python, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(tests, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, f"{installed.stdout.splitlines()[-1]}\n{done.stdout[-4000:]}{done.stderr[-1000:]}"
