"""The process: uvicorn with a drain, and the log."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import signal
import socket
import sys
import time
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from specdec.errors import SpecdecError
from specdec.serve.settings import ServeSettings
from specdec.serve.state import LOG, State
from specdec.serve.tracing import trace
from specdec.serve.wire import lay

_MERCY = 5.0  # seconds in which given-up work may say so


def serve(app: FastAPI, settings: ServeSettings) -> None:
    """Serves until a signal ends it: what runs may end first, for as long as the settings say."""
    start_log(settings.log)
    trace(app)
    server_of(app, settings).run()


def check_address(settings: ServeSettings) -> None:
    """Raises SpecdecError where the host is none of this machine, or its port belongs to somebody else."""
    host, port = settings.host, settings.port
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise SpecdecError(
            f"host {host!r} cannot be found ({error.strerror}): pass an address of this machine"
        ) from None
    failures = [refusal for place in places if (refusal := _refusal(place)) is not None]
    taken = [one for one in failures if one.errno in (errno.EADDRINUSE, errno.EACCES)]
    if taken or len(failures) == len(places):  # a name may stand for an address of a family that is not here
        raise SpecdecError(
            f"port {port} of {host} cannot be had ({(taken or failures)[0].strerror}): end what listens there, or pass "
            "another --port (0 takes a free one) or --host"
        )


def _refusal(place: tuple[Any, ...]) -> OSError | None:
    """Why nothing can listen at this address; None where something can."""
    family, kind, protocol, _, address = place
    try:
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        return error
    return None


def server_of(app: FastAPI, settings: ServeSettings) -> uvicorn.Server:
    """What serves the application, not begun."""
    limits = settings.limits
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=_Protocol,
        ws="none",
        h11_max_incomplete_event_size=limits.header_bytes,
        timeout_graceful_shutdown=int(limits.drain_seconds + _MERCY) + 1,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        log_config=None,
    )
    return _Server(config, app.state.server, limits.drain_seconds)


class _Protocol(H11Protocol):
    """HTTP/1.1 by h11, which hands requests the wire that their streams go by."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        app: Any = self.app

        async def wired(scope: Scope, receive: Receive, send: Send) -> None:
            lay(scope, transport)
            await app(scope, receive, send)

        self.app: Any = wired


class _Server(uvicorn.Server):
    """At the first signal nothing new is begun, and when time is up what still runs is told so."""

    def __init__(self, config: uvicorn.Config, state: State, drain: float) -> None:
        super().__init__(config)
        self._state, self._drain = state, drain

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        for server in self.servers:
            for bound in server.sockets:
                host, port = bound.getsockname()[:2]
                LOG.info("listening on http://%s:%s", host, port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self._state.draining:
            self._state.draining = True
            LOG.info("%s: no new requests, those under way have %g s", signal.Signals(sig).name, self._drain)
            self._loop.call_soon_threadsafe(self._loop.call_later, self._drain, self._state.stop)
        super().handle_exit(sig, frame)


def start_log(kind: str) -> None:
    """Lines on stderr, as text or as JSON objects; "none" leaves warnings alone."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if kind == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    LOG.handlers = [handler]
    LOG.propagate = False
    LOG.setLevel(logging.WARNING if kind == "none" else logging.INFO)


class _Json(logging.Formatter):
    """One object per line: the time, the level, and the facts or the message."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"
        facts = getattr(record, "facts", None) or {"message": record.getMessage()}
        if record.exc_info:
            facts = {**facts, "exception": self.formatException(record.exc_info)}
        return json.dumps({"time": stamp, "level": record.levelname.lower(), **facts}, ensure_ascii=False)
