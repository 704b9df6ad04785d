"""The process: uvicorn with a graceful shutdown, and the log."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import os
import re
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from specdec.errors import SpecdecError
from specdec.server.connections import HttpProtocol
from specdec.server.metrics import trace
from specdec.server.settings import ServeSettings
from specdec.server.state import LOG, State

_ERROR_SECONDS = 3.0  # seconds after the drain for cancelled requests to send their errors
_ACCEPTED = 25  # connections accepted per iteration of the loop
_TICKS = 5  # tenths of a second between two checks for disconnected clients
_BACKLOG = 1024  # connections that wait in the kernel
_WARN_SECONDS = 10.0  # at most one warning about failed accepts in that time


def serve(app: FastAPI, settings: ServeSettings) -> None:
    """Serves until a signal; running requests then have `drain_seconds`."""
    start_log(settings.log)
    trace(app)
    _allow_files()
    server_of(app, settings).run()


def check_address(settings: ServeSettings) -> None:
    """Raises SpecdecError where the host is not of this machine, or the port is taken."""
    host, port = settings.host, settings.port

    async def bind() -> None:
        """Binds as uvicorn does, without listening."""
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port, start_serving=False)
        server.close()

    try:
        asyncio.run(bind())
    except socket.gaierror as error:
        raise SpecdecError(
            f"host {host!r} cannot be found ({error.strerror}): pass an address of this machine"
        ) from None
    except OSError as error:
        why = os.strerror(error.errno or errno.EADDRNOTAVAIL)  # newer Pythons try all addresses, and name no cause
        raise SpecdecError(
            f"port {port} of {host} cannot be had ({why}): end what listens there, or pass another --port (0 takes a "
            "free one) or --host"
        ) from None


def server_of(app: FastAPI, settings: ServeSettings) -> uvicorn.Server:
    """A server of the application, not started."""
    limits, state = settings.limits, app.state.server
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=partial(HttpProtocol, state=state),  # type: ignore[arg-type]
        ws="websockets-sansio",
        ws_max_size=limits.body_bytes,
        ws_per_message_deflate=False,
        h11_max_incomplete_event_size=limits.header_bytes,
        limit_concurrency=limits.connections,
        backlog=_ACCEPTED,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        log_config=None,
    )
    return _Server(config, state)


def _allow_files() -> None:
    """Raises the limit of open files to the system's: shells often set a lower one."""
    with suppress(ImportError, OSError, ValueError):  # no `resource` on Windows; macOS may refuse the limit it names
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Server(uvicorn.Server):
    """uvicorn, listening once all models have decoded, with a drain after the first signal."""

    def __init__(self, config: uvicorn.Config, state: State) -> None:
        super().__init__(config)
        self._state, self._limits, self._warned = state, state.settings.limits, float("-inf")
        self._closes = self._ends = 0.0

    async def startup(self, sockets: Any = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._failed)
        if not await self._warm_up():
            return
        await super().startup(sockets)
        for server in self.servers:
            for listener in server.sockets:
                with socket.fromfd(listener.fileno(), listener.family, listener.type) as copy:
                    copy.listen(_BACKLOG)
                host, port = listener.getsockname()[:2]
                LOG.info("listening on http://%s:%s, %s", host, port, ", ".join(map(repr, self._state.hosts)))

    async def on_tick(self, counter: int) -> bool:
        """Whether the server ends now; runs every tenth of a second."""
        if counter % _TICKS == 0:
            self._drop_left()
        return await super().on_tick(counter) and time.monotonic() >= self._closes

    def _drop_left(self) -> None:
        """Closes connections whose client has left while reading is paused, which the event loop does not notice."""
        connections: dict[int, HttpProtocol] = {}
        for connection in self.server_state.connections:
            if isinstance(connection, HttpProtocol) and connection.flow.read_paused:
                connections[connection.transport.get_extra_info("socket").fileno()] = connection
        if connections and hasattr(select, "POLLRDHUP"):  # Linux
            polled = select.poll()
            for descriptor in connections:
                polled.register(descriptor, select.POLLRDHUP)
            for descriptor, _ in polled.poll(0):
                connections[descriptor].transport.abort()

    async def shutdown(self, sockets: Any = None) -> None:
        """Waits for running requests until the drain ends."""
        self._begin_drain(0.0)
        rest = max(self._ends - time.monotonic(), 0.0)
        asyncio.get_running_loop().call_later(rest, self._stop)
        self.config.timeout_graceful_shutdown = math.ceil(rest + _ERROR_SECONDS)
        await super().shutdown(sockets)
        if cut := self._state.cut:
            LOG.warning("stopped, %d request%s cut", cut, "s were" if cut > 1 else " was")
        else:
            LOG.info("stopped")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins the drain; a second signal closes the listener at once, Ctrl-C also ends the drain.

        uvicorn ends at a second Ctrl-C in the midst of the requests, with their tracebacks; here at a third.
        """
        if self._state.draining and sig == signal.SIGINT and not self._state.stopping:
            self._closes = 0.0
            asyncio.get_running_loop().call_soon_threadsafe(self._stop)
            return
        if self._state.draining:
            self._closes = 0.0
        else:
            LOG.info(
                "%s: no new requests, running ones have %g s", signal.Signals(sig).name, self._limits.drain_seconds
            )
            self._begin_drain(self._limits.notice_seconds if sig == signal.SIGTERM else 0.0)
        super().handle_exit(sig, frame)

    def _begin_drain(self, notice: float) -> None:
        """Refuses new requests; the listener stays for `notice` seconds, so that load balancers see it in `/ready`."""
        if not self._state.draining:
            self._state.draining, now = True, time.monotonic()
            self._closes, self._ends = now + min(notice, self._limits.drain_seconds), now + self._limits.drain_seconds

    def _stop(self) -> None:
        self._state.stop()
        for connection in list(self.server_state.connections):
            if isinstance(connection, HttpProtocol):  # uvicorn closes WebSockets
                connection.stop()

    async def _warm_up(self) -> bool:
        """Decodes a token with every model; False if a signal ended the wait."""
        work = asyncio.gather(*(host.warm_up() for host in self._state.hosts.values()), return_exceptions=True)
        while not (work.done() or self.should_exit):
            await asyncio.wait({work}, timeout=0.1)
        if not work.done():
            work.cancel()
            return False
        for error in work.result():
            if isinstance(error, BaseException):
                LOG.error("a model cannot decode", exc_info=error)
        return True

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handles uncaught errors of the loop; a failed accept may repeat thousands of times."""
        if not context["message"].startswith("socket.accept()"):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._warned >= _WARN_SECONDS:
            self._warned = time.monotonic()
            LOG.warning("no connection can be accepted: the process has no free file descriptor")


def start_log(kind: str) -> None:
    """Logs to stderr, as "text" or "json"; "none": only warnings. The library's log goes the same way."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if kind == "json" else _Text("%(asctime)s %(levelname)s %(message)s"))
    handler.setLevel(logging.WARNING if kind == "none" else logging.INFO)
    LOG.setLevel(logging.INFO)
    library = logging.getLogger("specdec")
    library.handlers, library.propagate = [handler], False


class _Text(logging.Formatter):
    """Time, level, and the message, or the facts as NAME=VALUE."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        if facts := getattr(record, "facts", None):
            record.message = " ".join(f"{name}={_bare(value)}" for name, value in facts.items() if value is not None)
        return super().formatMessage(record)


def _bare(value: Any) -> str:
    """A value without quotes, unless it has other characters than ids, paths and addresses have."""
    text = str(value)
    return text if re.fullmatch(r"[\w.:/{}-]+", text, re.ASCII) else json.dumps(text)


class _Json(logging.Formatter):
    """One JSON object per line: time, level, and the facts or the message."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"
        facts = getattr(record, "facts", None) or {"message": record.getMessage()}
        if record.exc_info:
            facts = {**facts, "exception": self.formatException(record.exc_info)}
        return json.dumps({"time": stamp, "level": record.levelname.lower(), **facts}, ensure_ascii=False)
