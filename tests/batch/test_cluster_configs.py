"""The configs for clusters: what Ray Serve and the server itself would say of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.batch.ray.serve import Replicas
from specdec.errors import OptionError
from specdec.server import read_settings

CONFIGS = Path(__file__).parents[2] / "configs" / "serve"
RAY, KUBERAY = (yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()) for name in ("ray", "kuberay"))
BOTH = {"ray": RAY, "kuberay": yaml.safe_load(KUBERAY["spec"]["serveConfigV2"])}


@pytest.mark.parametrize("name", BOTH)
def test_the_server_accepts_its_arguments(name: str) -> None:
    """They are settings of a server, and of its replicas."""
    [app] = BOTH[name]["applications"]
    keys = {"host": "0.0.0.0", **app["args"]}
    replicas = Replicas.of_keys(keys)
    settings = read_settings(keys)
    assert (replicas.least, replicas.most, replicas.cpus) == (1, 4, 2)
    assert settings.is_local == (name == "ray")
    assert settings.limits.request_seconds == BOTH[name]["http_options"]["request_timeout_s"]
    assert app["import_path"] == "specdec.batch.ray.serve:build"


@pytest.mark.parametrize("name", BOTH)
def test_ray_accepts_the_config(name: str) -> None:
    """By the schema of `serve deploy`."""
    schema = pytest.importorskip("ray.serve.schema", reason="the extra `ray` is not installed")
    assert schema.ServeDeploySchema.model_validate(BOTH[name]).applications[0].name == "specdec"
    with pytest.raises(ValueError, match="import_path"):
        schema.ServeDeploySchema.model_validate({"applications": [{"name": "x", "import_path": "no path"}]})


def test_replicas_are_read() -> None:
    """A number, a range, or auto; what is left are keys of the server."""
    assert Replicas.of_keys({"replicas": 3}).options(8)["num_replicas"] == 3
    scale = Replicas.of_keys({"replicas": "2-5"}).options(8)["autoscaling_config"]
    delays = {"upscale_delay_s": 30.0, "downscale_delay_s": 600.0, "look_back_period_s": 30.0}
    assert scale == {"min_replicas": 2, "max_replicas": 5, "target_ongoing_requests": 4.0, **delays}
    auto = Replicas.of_keys({"replicas": "auto"})
    assert (auto.least, auto.most) == (1, None)
    keys: dict[str, Any] = {"replicas": "1-2", "replica_up_seconds": 2, "replica_surge": True, "port": 1}
    options = Replicas.of_keys(keys).options(8)
    assert keys == {"port": 1}
    assert options["max_surge_percent"] == 1
    assert options["autoscaling_config"]["look_back_period_s"] == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("replicas", count) for count in ("0", "4-2", "many", "-1"))]
    + [("replica_up_seconds", seconds) for seconds in (0, -1.0, "soon", float("nan"))],
)
def test_wrong_keys_of_replicas(name: str, value: Any) -> None:
    """Each is named."""
    with pytest.raises(OptionError, match=name):
        Replicas.of_keys({"replicas": "1-2", name: value})
