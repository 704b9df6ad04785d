"""Time limits on connections: for a request's head, and for a send."""

from __future__ import annotations

import asyncio
import secrets
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from specdec.server.answers import encoded
from specdec.server.errors import ApiError, unavailable
from specdec.server.state import LOG, LOST, State, origin_of


class HttpProtocol(H11Protocol):
    """HTTP/1.1 by h11, with timeouts for the head of a request and for every send.

    A client that pipelines requests gets one answer, then the connection is closed.
    """

    def __init__(self, *args: Any, state: State, **more: Any) -> None:
        super().__init__(*args, **more)
        self._state, self._limits = state, state.settings.limits
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

    def _refuse(self, error: ApiError) -> None:
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
            facts = {"request_id": own, "method": "unknown", "path": "unknown", "status": error.status_code}
            client = origin_of((self.client or ("",))[0])
            self._state.note(**facts, seconds=0.0, bytes=len(body), client=client, key=None, error=error.code)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


_LOG = LOG.getChild("http")
_LOG.setLevel("ERROR")  # every request has its own line in the log
