"""The server as an application of Ray Serve: several replicas behind one address."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specdec.errors import SpecdecError
from specdec.server.app import create_app
from specdec.server.http import start_log
from specdec.server.models import load_served
from specdec.server.settings import read_settings

if TYPE_CHECKING:
    from ray.serve import Application

_CHECK_SECONDS = 15.0  # between two health checks; each may take twice as long
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


class Replica:
    """One copy of the server."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = read_settings(settings)
        start_log(self._settings.log)
        limits, share = self._settings.limits, self._settings.share
        self._models = [load_served(model, limits, share) for model in self._settings.models]

    def __serve_build_asgi_app__(self) -> Any:
        """The application; Ray Serve calls this once the models are loaded."""
        app = create_app(self._settings, self._models)
        self._hosts = app.state.server.hosts
        return app

    async def check_health(self) -> None:
        """Raises where `/ready` would answer 503; Ray Serve then replaces the replica."""
        for name, host in self._hosts.items():
            if not await host.is_ready():
                raise RuntimeError(f"the model {name!r} does not decode")


def application(keys: Mapping[str, Any], **deployment: Any) -> Application:
    """The server with the settings `keys`, as those of `configs/serve.yaml`, for `ray.serve.run`.

    `deployment`: options of Ray's deployment, such as `num_replicas` and `ray_actor_options`. Requests with the same
    header `X-Session-Id` go to one replica, which has their KV cache. Raises OptionError, and SpecdecError without Ray.
    """
    try:
        from ray import serve
        from ray.serve.config import RequestRouterConfig
    except ImportError:
        raise SpecdecError("Ray Serve is not installed: pip install -e '.[ray]'") from None

    settings = read_settings({"host": "0.0.0.0", **keys})  # where proxies listen, unless Ray's `http_options` differ
    limits = settings.limits
    options: dict[str, Any] = {
        "name": "specdec",
        "max_ongoing_requests": limits.running * len(settings.models) + limits.waiting,
        "graceful_shutdown_timeout_s": limits.drain_seconds,
        "health_check_period_s": _CHECK_SECONDS,
        "health_check_timeout_s": 2 * _CHECK_SECONDS,
        "request_router_config": RequestRouterConfig(request_router_class=_ROUTER),
    }
    deployed = serve.deployment(serve.ingress()(Replica)).options(**options | deployment)
    return deployed.bind(settings.model_dump(mode="json"))


def build(args: Mapping[str, Any]) -> Application:
    """`application(args)`, as `import_path` of a Ray Serve config calls it: see `configs/serve/ray.yaml`."""
    return application(args)
