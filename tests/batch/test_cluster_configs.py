"""The configs for clusters: what Ray Serve, Kubernetes and the server itself would say of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.batch.ray.serve import Replicas
from specdec.errors import OptionError
from specdec.server import read_settings

CONFIGS = Path(__file__).parents[2] / "configs" / "serve"
RAY = yaml.safe_load((CONFIGS / "ray.yaml").read_text())
KUBERAY = yaml.safe_load((CONFIGS / "kuberay.yaml").read_text())
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


def test_kubernetes_accepts_the_manifest() -> None:
    """By KubeRay's definition of a RayService, which is a megabyte: KUBERAY_CRD names the file.

    It is helm-chart/kuberay-operator/crds/ray.io_rayservices.yaml in github.com/ray-project/kuberay.
    """
    file = os.environ.get("KUBERAY_CRD")
    if file is None:
        pytest.skip("KUBERAY_CRD does not name the definition of a RayService")
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    definition = yaml.load(Path(file).read_text(), yaml.CSafeLoader)
    [version] = [v for v in definition["spec"]["versions"] if f"ray.io/{v['name']}" == KUBERAY["apiVersion"]]
    schema = strict(version["schema"]["openAPIV3Schema"])
    jsonschema.validate(KUBERAY, schema)
    KUBERAY["spec"]["rayClusterConfig"]["headGroupSpec"]["templates"] = {}
    with pytest.raises(jsonschema.ValidationError, match="templates"):
        jsonschema.validate(KUBERAY, schema)


def strict(schema: Any) -> Any:
    """The schema as `kubectl --validate=strict` has it: fields that it does not name are errors."""
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(value) for name, value in schema.items()}
    if "properties" in made:
        made["properties"] = {name: strict(value) for name, value in schema["properties"].items()}
        known = schema["properties"].keys() == {"apiVersion", "kind"}
        made.setdefault("additionalProperties", bool(schema.get("x-kubernetes-preserve-unknown-fields") or known))
    return made


def test_replicas_are_read() -> None:
    """A number, a range, or auto."""
    assert (Replicas.of("3").options(8)["num_replicas"], Replicas.of(3).most) == (3, 3)
    scale = Replicas.of("2-5").options(8)["autoscaling_config"]
    delays = {"upscale_delay_s": 30.0, "downscale_delay_s": 600.0, "look_back_period_s": 30.0}
    assert scale == {"min_replicas": 2, "max_replicas": 5, "target_ongoing_requests": 4.0, **delays}
    assert (Replicas.of("auto").least, Replicas.of(None).most) == (1, None)
    for wrong in ("0", "4-2", "many", "-1"):
        with pytest.raises(OptionError, match="replicas"):
            Replicas.of(wrong)
    for unsound in (0, -1.0, "soon", float("nan")):
        with pytest.raises(OptionError, match="replica_up_seconds"):
            Replicas.of("1-2", up_seconds=unsound)


def test_keys_of_replicas_are_taken_out() -> None:
    """What is left are keys of the server."""
    keys: dict[str, Any] = {"replicas": "1-2", "replica_up_seconds": 2, "replica_surge": True, "port": 1}
    replicas = Replicas.of_keys(keys)
    assert keys == {"port": 1}
    assert (replicas.most, replicas.up_seconds, replicas.down_seconds, replicas.surge) == (2, 2, 600.0, True)
    assert replicas.options(8)["max_surge_percent"] == 1
    assert replicas.options(8)["autoscaling_config"]["look_back_period_s"] == 2
