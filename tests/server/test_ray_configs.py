"""The configs for Ray Serve, checked by Ray and by the server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from specdec.errors import SpecdecError
from specdec.server import read_settings
from specdec.server.ray_serve import application

CONFIGS = Path(__file__).parents[2] / "configs" / "serve"
RAY, KUBERAY = (yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()) for name in ("ray", "kuberay"))
BOTH = {"ray": RAY, "kuberay": yaml.safe_load(KUBERAY["spec"]["serveConfigV2"])}


@pytest.mark.parametrize("name", BOTH)
def test_the_server_accepts_its_arguments(name: str) -> None:
    [app] = BOTH[name]["applications"]
    settings = read_settings({"host": "0.0.0.0", **app["args"]})
    assert settings.is_local == (name == "ray")
    assert settings.limits.request_seconds == BOTH[name]["http_options"]["request_timeout_s"]
    assert app["import_path"] == "specdec.server.ray_serve:build"


@pytest.mark.parametrize("name", BOTH)
def test_ray_accepts_the_config(name: str) -> None:
    """By the schema of `serve deploy`; the deployment is the one that `build` names."""
    schema = pytest.importorskip("ray.serve.schema", reason="the extra `ray` is not installed")
    [app] = schema.ServeDeploySchema.model_validate(BOTH[name]).applications
    assert [deployment.name for deployment in app.deployments] == ["specdec"]
    with pytest.raises(ValueError, match="import_path"):
        schema.ServeDeploySchema.model_validate({"applications": [{"name": "x", "import_path": "no path"}]})


def test_ray_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line with the way out: it was Python's own ModuleNotFoundError."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SpecdecError, match=r"pip install -e '\.\[ray\]'"):
        application({"models": []})
