"""The server on a cluster, by Ray Serve: several replicas of the application behind one address."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from specdec.batch.ray import between, connect, ray_module
from specdec.errors import EngineError, OptionError
from specdec.server import create_app, load, read_settings
from specdec.server.http import start_log
from specdec.server.state import State

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from ray.serve import Application

NAME = "specdec"
_BUSY = 0.5  # share of a replica's running requests above which another replica starts
_WINDOW_SECONDS = 30.0  # over which requests in flight are averaged, unless replicas come and go faster
_CHECK_SECONDS = 15.0  # between two health checks; each may take twice as long
_METRICS_SECONDS = 5.0
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


class Replica:
    """One copy of the server."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = read_settings(settings)
        start_log(self._settings.log)
        limits, share = self._settings.limits, self._settings.share
        self._models = [load(model, limits, share) for model in self._settings.models]

    def __serve_build_asgi_app__(self) -> Any:
        """The application; Ray Serve calls this once the models are loaded."""
        app = create_app(self._settings, self._models)
        self._state: State = app.state.server
        registry = self._state.metrics.registry
        threading.Thread(target=export_metrics, args=(registry,), name="specdec-metrics", daemon=True).start()
        return app

    async def check_health(self) -> None:
        """Raises where `/ready` would answer 503; Ray Serve then replaces the replica."""
        for name, host in self._state.hosts.items():
            if not await host.is_ready():
                raise RuntimeError(f"the model {name!r} does not decode")


def export_metrics(registry: CollectorRegistry) -> NoReturn:
    """Copies a server's metrics, without buckets of histograms, to Ray's by replica, every few seconds and for ever."""
    from ray.serve.metrics import Gauge

    gauges: dict[str, Gauge] = {}
    while True:
        time.sleep(_METRICS_SECONDS)
        for sample in (sample for family in registry.collect() for sample in family.samples):
            if sample.name.endswith(("_bucket", "_created")):
                continue
            if sample.name not in gauges:
                gauges[sample.name] = Gauge(sample.name, description=sample.name, tag_keys=tuple(sample.labels))
            gauges[sample.name].set(sample.value, tags=dict(sample.labels))


@dataclass(frozen=True)
class Replicas:
    """`least` to `most` replicas (None: the number of nodes), by requests in flight, each with `cpus` and `gpus`.

    A replica starts after `up_seconds` of load, and stops after `down_seconds` without. With `surge`, a new replica
    starts before the one it replaces stops, which needs room for one more. Raises OptionError.
    """

    least: int = 1
    most: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    up_seconds: float = 30.0
    down_seconds: float = 600.0
    surge: bool = False

    def __post_init__(self) -> None:
        for name in ("up_seconds", "down_seconds"):
            found = getattr(self, name)
            if not isinstance(found, int | float) or not 0 < found < math.inf:
                raise OptionError.of(f"replica_{name}", "a number above 0", found)

    @classmethod
    def of_keys(cls, keys: dict[str, Any]) -> Replicas:
        """Pops the fields from `keys`: `replicas` (4, "1-4" or "auto"), and `replica_cpus` and so on for the others."""
        each = ("cpus", "gpus", "up_seconds", "down_seconds", "surge")
        given = {name: value for name in each if (value := keys.pop(f"replica_{name}", None)) is not None}
        if (count := keys.pop("replicas", None)) in (None, "auto"):
            return cls(**given)
        least, most = between("replicas", str(count), "a number, two as in 1-4, or auto")
        return cls(least, most, **given)

    def options(self, running: int) -> dict[str, Any]:
        """Ray Serve's options, for replicas that run `running` requests at a time."""
        taken = {
            "ray_actor_options": {"num_cpus": self.cpus, "num_gpus": self.gpus},
            "max_surge_percent": int(self.surge),  # rounded up to one replica
        }
        if self.least == self.most:
            return {"num_replicas": self.least, **taken}
        scale = {
            "min_replicas": self.least,
            "max_replicas": self.most or sum(node["Alive"] for node in ray_module().nodes()),
            "target_ongoing_requests": max(1.0, running * _BUSY),
            "upscale_delay_s": self.up_seconds,
            "downscale_delay_s": self.down_seconds,
            "look_back_period_s": min(_WINDOW_SECONDS, self.up_seconds, self.down_seconds),
        }
        return {"autoscaling_config": scale, **taken}


def application(keys: Mapping[str, Any], replicas: Replicas) -> Application:
    """The server as an application of Ray Serve.

    Requests with the same header `X-Session-Id` go to one replica, which has their KV cache. Raises OptionError.
    """
    ray_module()
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    settings = read_settings(keys)
    running = settings.limits.running * len(settings.models)
    deployment = serve.deployment(serve.ingress()(Replica)).options(
        name=NAME,
        max_ongoing_requests=running + settings.limits.waiting,
        graceful_shutdown_timeout_s=settings.limits.drain_seconds,
        health_check_period_s=_CHECK_SECONDS,
        health_check_timeout_s=2 * _CHECK_SECONDS,
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
        **replicas.options(running),
    )
    return deployment.bind(settings.model_dump(mode="json"))


def build(args: Mapping[str, Any]) -> Application:
    """The application of a Ray Serve config, `import_path: specdec.batch.ray.serve:build`.

    `args`: the keys of `configs/serve.yaml`, with `host` as in the config's `http_options`; `replicas` (4, "1-4" or
    "auto"); the other fields of `Replicas`, prefixed with `replica_`. Raises OptionError.
    """
    keys = {"host": "0.0.0.0", **args}  # where proxies listen, unless the config's http_options say otherwise
    replicas = Replicas.of_keys(keys)
    return application(keys, replicas)


def deploy(keys: Mapping[str, Any], replicas: Replicas, address: str) -> None:
    """Deploys the server on the cluster at `address`; replaces a running one replica by replica.

    Returns once it serves. Raises OptionError, and EngineError where the replicas do not start.
    """
    settings = read_settings(keys)
    connect(address)
    from ray import serve

    http = {"host": settings.host, "port": settings.port, "request_timeout_s": settings.limits.request_seconds}
    serve.start(http_options=http)
    try:
        serve.run(application(keys, replicas), name=NAME, route_prefix="/")
    except RuntimeError as error:
        raise EngineError(f"the replicas did not come up: {' '.join(str(error).split())}") from None


def withdraw() -> None:
    """Removes the server from the cluster."""
    from ray import serve

    serve.shutdown()
