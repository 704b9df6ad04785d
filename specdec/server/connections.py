"""Time limits on connections: for a request's head, and for a send."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from specdec.server.state import LOG, LOST, State


class HttpProtocol(H11Protocol):
    """HTTP/1.1 by h11, with timeouts for the head of a request and for every send.

    A client that pipelines requests gets one answer, then the connection is closed.
    """

    def __init__(self, *args: Any, state: State, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = state.settings.limits
        self.logger = _LOG
        self._lost = asyncio.Event()
        self.app_state = {**self.app_state, LOST: self._lost}
        self._head: asyncio.TimerHandle | None = None
        self._send: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Waits for a request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # `pause_writing` at the first byte that the socket does not take
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._lost.set()
        for timer in (self._head, self._send, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Reads data."""
        super().data_received(data)
        if not self.is_idle and not self.cycle.more_body and self.conn.trailing_data[0]:
            self.cycle.keep_alive = False  # what is pipelined hides that the client leaves

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Leaves the connection to a WebSocket, which has no head to wait for, and pings its client."""
        if self._head is not None:
            self._head.cancel()
        super().handle_websocket_upgrade(event)

    def _should_upgrade_to_ws(self) -> bool:
        """Above the limit of connections, the request is refused as any other."""
        most = self.limit_concurrency
        return super()._should_upgrade_to_ws() and (most is None or len(self.connections) < most)

    def on_response_complete(self) -> None:
        """Waits for the next request."""
        self._await_head()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client did not read all that was sent: it has `send_seconds`."""
        super().pause_writing()
        self._send = self.loop.call_later(self._limits.send_seconds, self._give_up_sending)

    def resume_writing(self) -> None:
        """The client has read it."""
        super().resume_writing()
        if self._send is not None:
            self._send.cancel()

    def send_400_response(self, msg: str) -> None:
        """Refuses what h11 cannot parse, unless an answer has begun, and closes the connection."""
        if self.cycle is not None:  # it must not answer, too
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def stop(self) -> None:
        """Closes the connection of a request whose body is incomplete."""
        if not self.is_idle and self.cycle.more_body:
            self.transport.abort()

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
        self.transport.abort()


_LOG = LOG.getChild("http")
_LOG.setLevel("ERROR")  # every request has its own line in the log
