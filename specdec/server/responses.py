"""Responses that stop when their client disconnects: bodies, and streams of events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec.server.answers import event
from specdec.server.direct_socket import Wire, until_lost
from specdec.server.errors import ApiError, reported, too_late
from specdec.server.state import ERROR, State, state_of

PING = 15.0
"""Seconds without an event after which a comment keeps a stream alive."""
_DONE = b"data: [DONE]\n\n"

T = TypeVar("T")


async def watched(request: Request, work: Coroutine[Any, Any, T], *, unread: bool = False) -> T:
    """The result of `work`, which is cancelled when the client disconnects, after `request_seconds`, or at a shutdown.

    `unread`: the request's body has not been received, and stays so.
    """
    state, task = state_of(request), asyncio.ensure_future(work)
    state.track(task)
    gone = asyncio.ensure_future(until_lost(request.scope) if unread else _left(request.receive))
    try:
        await asyncio.wait({task, gone}, timeout=_patience(state), return_when=asyncio.FIRST_COMPLETED)
        if task.done() and not task.cancelled():
            return task.result()
        late = not gone.done() and not task.done()
        await _cancel(task)
        raise too_late(_patience(state)) if late else state.given_up()
    finally:
        gone.cancel()
        await _cancel(task)


class EventStream(Response):
    """Events as they come, then `[DONE]`; an error becomes the last event, comments fill silence.

    Between the first and the last of `events`, other events may be written directly through `wire`.
    """

    def __init__(self, state: State, events: AsyncGenerator[bytes, None], wire: Wire | None = None) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._state, self._events, self._wire = state, events, wire
        self._last, self._sending = time.monotonic(), False
        self._error: str | None = None  # the code of the last event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends all events; cancels the work when the client disconnects."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if self._wire is not None:
            self._wire.open()
        task = asyncio.ensure_future(self._produce(send))
        self._state.track(task)
        gone = asyncio.ensure_future(_left(receive))
        end, late = time.monotonic() + _patience(self._state), False
        try:
            while not (task.done() or gone.done()):
                rest = end - time.monotonic()
                await asyncio.wait({task, gone}, timeout=min(PING, max(rest, 0)), return_when=asyncio.FIRST_COMPLETED)
                if rest <= 0 and not task.done():
                    await _cancel(task)
                    late = True
                elif not task.done() and not self._sending and self._silence >= PING:
                    await self._keep_alive(send)
            if task.cancelled() and not gone.done():
                await self._fail(send, too_late(_patience(self._state)) if late else self._state.given_up())
        finally:
            gone.cancel()
            await _cancel(task)
            scope[ERROR] = self._error
            if self._wire is not None:
                self._wire.close()
        if not gone.done() or gone.cancelled():
            with suppress(OSError):
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    @property
    def _silence(self) -> float:
        return time.monotonic() - max(self._last, 0.0 if self._wire is None else self._wire.last)

    async def _keep_alive(self, send: Send) -> None:
        comment = b": alive\n\n"
        if self._wire is None:
            await self._send(send, comment)
        elif not self._wire.send(comment):  # the loop is still writing: no comment needed
            self._wire.passed()

    async def _produce(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                async for event in events:
                    await self._send(send, event)
                await self._send(send, _DONE)
            except OSError:  # the client has left
                return
            except Exception as error:
                await self._fail(send, reported(error))

    async def _fail(self, send: Send, error: ApiError) -> None:
        self._error = error.code
        with suppress(OSError):
            await self._send(send, event(error.body))

    async def _send(self, send: Send, event: bytes) -> None:
        self._sending = True
        try:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            self._sending, self._last = False, time.monotonic()


def _patience(state: State) -> float:
    return state.settings.limits.request_seconds


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Future[Any]) -> None:
    """Cancels a task and waits for its end; ignores its error."""
    task.cancel()
    with suppress(BaseException):
        await task
