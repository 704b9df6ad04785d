"""Limits on connections: their number, the time for a request's head, the time for a send."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections import Counter
from enum import IntEnum
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from specdec.server.answers import encoded
from specdec.server.errors import ApiError, unavailable
from specdec.server.settings import address_of
from specdec.server.state import LOG, LOST, State, origin_of

_WARN_SECONDS = 10.0  # at most one warning of a kind in that time


class Repeated:
    """A warning about a frequent event, logged at most once every few seconds."""

    def __init__(self, message: str) -> None:
        self._message, self._times, self._last = message, 0, float("-inf")

    def __call__(self) -> None:
        """Counts the event; logs the warning and the count unless it was logged just now."""
        self._times += 1
        if time.monotonic() - self._last >= _WARN_SECONDS:
            self._last = time.monotonic()
            LOG.warning("%s (so far %d times)", self._message, self._times)


class Claim(IntEnum):
    """What a client loses with a connection; one at `WORK` is never closed for another."""

    IDLE = 0  # no request
    STALL = 1  # the server waits for the client to send or read a part of a request
    WORK = 2


class Connections:
    """The open connections, at most `most` in all and `per_client` of one client.

    At a limit, a new connection replaces one of its client (`per_client`) or of the client with the most connections
    (`most`): the one with the least claim, of these the longest inactive. If all are at work, the new one is refused.
    """

    def __init__(self, most: int, per_client: int) -> None:
        self.most, self.per_client = most, per_client
        self._client: dict[HttpProtocol, str] = {}  # the longest inactive first
        self._full = Repeated(
            f"all connections are taken ({most} in all, {per_client} of one client): quiet ones were closed, or "
            "new ones refused"
        )

    def __len__(self) -> int:
        return len(self._client)

    def add(self, one: HttpProtocol, client: str) -> bool:
        """Registers a new connection; False where it must be refused."""
        counts = Counter(self._client.values())
        crowded = counts[client] >= self.per_client
        if crowded or len(self) >= self.most:
            self._full()
            peers = [peer for peer, own in self._client.items() if own == client or not crowded]
            quiet = [peer for peer in peers if peer.claim < Claim.WORK]
            if not quiet:
                return False
            replaced = min(quiet, key=lambda peer: (-counts[self._client[peer]], peer.claim))  # the first of equals
            self.remove(replaced)
            replaced.drop()
        self._client[one] = client
        return True

    def moved(self, one: HttpProtocol) -> None:
        """Notes activity on a connection."""
        if one in self._client:
            self._client[one] = self._client.pop(one)

    def remove(self, one: HttpProtocol) -> None:
        self._client.pop(one, None)


class HttpProtocol(H11Protocol):
    """HTTP/1.1 by h11, with timeouts for the head of a request and for every send.

    A client that pipelines requests gets one answer, then the connection is closed.
    """

    def __init__(self, *args: Any, connections: Connections, state: State, **more: Any) -> None:
        super().__init__(*args, **more)
        self._all, self._state, self._limits = connections, state, state.settings.limits
        self.logger = _LOG
        self._lost = asyncio.Event()
        self.app_state = {**self.app_state, LOST: self._lost}
        self._head: asyncio.TimerHandle | None = None
        self._send: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def claim(self) -> Claim:
        """While a body waits unread (`read_paused`), the client need not send."""
        if self.is_idle:
            return Claim.IDLE
        stalls = self.flow.write_paused or (self.cycle.more_body and not self.flow.read_paused)
        return Claim.STALL if stalls else Claim.WORK

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Registers the connection, or refuses it with a 503."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # `pause_writing` at the first byte that the socket does not take
        self._await_head()
        host, port = self.client or ("", 0)
        address = address_of(host)
        is_proxy = address is not None and any(address in one for one in self._state.settings.trusted_proxies)
        client = f"{host}:{port}" if is_proxy else origin_of(host)  # a proxy has many clients: each port is one
        if not self._all.add(self, client):
            self._refuse(unavailable("all connections are taken: try again later"), noted=False)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._lost.set()
        self._all.remove(self)
        for timer in (self._head, self._send, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Reads data; that of a body counts as activity, that of a head does not."""
        super().data_received(data)
        if not self.is_idle:
            self._all.moved(self)
            if not self.cycle.more_body and self.conn.trailing_data[0]:  # pipelined requests would look like work
                self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        """Waits for the next request."""
        self._await_head()
        self._all.moved(self)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client did not read all that was sent: it has `send_seconds`."""
        super().pause_writing()
        self._all.moved(self)
        self._send = self.loop.call_later(self._limits.send_seconds, self._give_up_sending)

    def resume_writing(self) -> None:
        """The client has read it."""
        super().resume_writing()
        self._all.moved(self)
        if self._send is not None:
            self._send.cancel()

    def send_400_response(self, msg: str) -> None:
        """Refuses a request that h11 cannot parse."""
        status = getattr(sys.exc_info()[1], "error_status_hint", 400)
        message = "the headers are too large" if status == 431 else "this cannot be read as an HTTP/1.1 request"
        self._refuse(ApiError(status, message, code="too_large" if status == 431 else "invalid_http"))

    def drop(self) -> None:
        self.transport.abort()

    def stop(self) -> None:
        """Refuses a request whose body is incomplete; closes the connection if its answer has begun."""
        if self.is_idle or not self.cycle.more_body:
            return
        if self.cycle.response_started:
            self.drop()
        else:
            self._refuse(unavailable("the server is shutting down"))

    def _await_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
        self._head = self.loop.call_later(self._limits.head_seconds, self._give_up_head)

    def _give_up_head(self) -> None:
        if self.is_idle:
            self.transport.close()

    def _give_up_sending(self) -> None:
        LOG.warning(
            "a client did not read what it was sent within %g s: its connection is closed", self._limits.send_seconds
        )
        self.drop()

    def _refuse(self, error: ApiError, *, noted: bool = True) -> None:
        """Sends an error without the application, unless an answer has begun, and closes the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            own, body = secrets.token_hex(8), encoded(error.body)
            headers = {
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
                "X-Request-ID": own,
                "X-Content-Type-Options": "nosniff",
                "Connection": "close",
                **(error.headers or {}),
            }
            answer = h11.Response(status_code=error.status_code, headers=list(headers.items()), reason=b"")
            for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            if noted:
                facts = {"request_id": own, "method": "unknown", "path": "unknown", "status": error.status_code}
                client = origin_of((self.client or ("",))[0])
                self._state.note(**facts, seconds=0.0, bytes=len(body), client=client, key=None, error=error.code)
            else:
                self._state.metrics.requests.labels("unknown", str(error.status_code)).inc()
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


_LOG = LOG.getChild("http")
_LOG.setLevel("ERROR")  # every request has its own line in the log
