"""State shared by all requests of a server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from ipaddress import IPv6Address
from typing import Any, TypeVar

from starlette.requests import HTTPConnection, Request

from specdec.errors import closest_name
from specdec.server.admission import Admission, Clients
from specdec.server.errors import CLIENT_LEFT, ApiError, unavailable
from specdec.server.items import Conversations
from specdec.server.keys import Keys
from specdec.server.metrics import Metrics
from specdec.server.models import Host
from specdec.server.settings import ServeSettings, address_of
from specdec.server.speech import SpeechModel
from specdec.server.text import TextModel

M = TypeVar("M", TextModel, SpeechModel)
LOG = logging.getLogger("specdec.server")
ERROR = "specdec.error"  # in the scope: the code of the request's error, for the log
LOST = "connection_lost"  # in `request.state`: the event that the request's connection is lost
_UPLOADS_AHEAD = 6  # recordings that may be uploaded before their turn to be transcribed
_LONGEST = 64  # characters of a client's address


def unknown_model(name: str, names: Iterable[str]) -> str:
    """That no model has this name, and the nearest of the names."""
    near = closest_name(name := name[:128], names)  # a comparison of long names takes long
    return f"there is no model {name!r} here" + (f" (did you mean {near!r}?)" if near else "")


class State:
    """Settings, models by name, keys and metrics; `draining`: no new requests; `stopping`: the time to drain is up."""

    def __init__(self, settings: ServeSettings, models: Sequence[TextModel | SpeechModel]) -> None:
        self.settings, self.metrics = settings, Metrics()
        self.hosts = {model.name: Host(model, settings.limits) for model in models}
        self.keys = None if settings.api_key_file is None else Keys(settings.api_key_file)
        self.clients = Clients(settings.limits.per_key)
        recordings = sum(host.turns.free for host in self.hosts.values() if host.model.task == "speech")
        self.uploads = Admission(recordings + _UPLOADS_AHEAD, settings.limits.waiting)
        self.conversations = Conversations()
        self.draining = self.stopping = False
        self.cut = 0  # requests that the server gave up when it stopped
        self.ends = ExitStack()  # closed after the last request: a signal leaves the process no time after that
        self._tasks: set[asyncio.Task[Any]] = set()
        self.metrics.watch(self.hosts, self.uploads)
        for host in self.hosts.values():
            self.ends.callback(host.close)

    def host(self, name: str | None, kind: type[M]) -> tuple[Host, M]:
        """The model of this name (None: the first of its kind); raises a 404, or a 400 for a model of another kind."""
        task = kind.task
        candidates = [host for host in self.hosts.values() if isinstance(host.model, kind)]
        match = next(iter(candidates), None) if name is None else self.hosts.get(name)
        if match is None:
            names = ", ".join(repr(host.model.name) for host in candidates)
            available = f"models for {task} are {names}" if candidates else f"no model of this server is for {task}"
            message = available if name is None else f"{unknown_model(name, self.hosts)}; {available}"
            raise ApiError(404, message, param="model", code="model_not_found")
        if not isinstance(match.model, kind):
            message = f"the model {name!r} is for {match.model.task}, and this endpoint is for {task}"
            raise ApiError(400, message, param="model", code="wrong_model")
        return match, match.model

    def track(self, task: asyncio.Task[Any]) -> None:
        """Cancels the task when the server stops, at once if it already has."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self.stopping:  # after its first step: a task that never ran would not close its generators
            self.cut += 1
            task.get_loop().call_soon(task.cancel)

    def stop(self) -> None:
        self.stopping, self.cut = True, len(self._tasks)
        for task in self._tasks:
            task.cancel()

    def admit(self) -> None:
        """Raises a 503 once the server is shutting down."""
        if self.draining:
            raise unavailable("the server is shutting down")

    def given_up(self) -> ApiError:
        """The error of a request whose task was cancelled."""
        if self.stopping:
            return unavailable("the server is shutting down")
        return ApiError(499, "the client has left", code=CLIENT_LEFT)


def state_of(request: Request) -> State:
    state: State = request.app.state.server
    return state


def client_of(request: HTTPConnection) -> str:
    """The client: the name of its key, or its address without keys. Clients share no prefix cache."""
    key_name: str | None = request.scope.get("specdec.key")
    return sender_of(request) if key_name is None else key_name


def sender_of(request: HTTPConnection) -> str:
    """The client's address, which trusted proxies name for their clients; empty without any.

    An IPv6 address stands for its /64, which one host or home owns.
    """
    text = "" if request.client is None else request.client.host
    address = address_of(text)
    if isinstance(address, IPv6Address):
        return f"{IPv6Address(int(address) >> 64 << 64)}/64"
    return text[:_LONGEST] if address is None else str(address)
