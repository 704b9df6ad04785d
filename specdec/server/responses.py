"""Responses that stop when their client disconnects: bodies, and streams of events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from specdec.server.answers import event
from specdec.server.errors import CLIENT_LEFT, ApiError, reported
from specdec.server.state import ERROR, LOST, state_of

PING = 15.0
"""Seconds without an event after which a comment keeps a stream alive."""
_DONE = b"data: [DONE]\n\n"

T = TypeVar("T")


async def watched(request: Request, work: Awaitable[T], *, unread: bool = False) -> T:
    """The result of `work`, which is cancelled when the client disconnects, after `request_seconds`, or at a shutdown.

    `unread`: the request's body has not been received, and stays so.
    """
    state, task = state_of(request), asyncio.ensure_future(work)
    state.track(task)
    lost = getattr(request.state, LOST, asyncio.Event())  # no other server tells
    departure = asyncio.ensure_future(lost.wait() if unread else _left(request.receive))
    patience = state.settings.limits.request_seconds
    try:
        await asyncio.wait({task, departure}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        if task.done() and not task.cancelled():
            return task.result()
        late = not departure.done() and not task.done()
        await _cancel(task)
        if late:
            raise ApiError(504, f"the request took longer than {patience:g} s: ask for less", code="timeout")
        raise state.given_up()
    finally:
        departure.cancel()
        await _cancel(task)


class EventStream(StreamingResponse):
    """`first`, events as they come, then `[DONE]`; an error becomes the last event, comments fill silence."""

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._first, self._events, self._last = first, events, time.monotonic()

    @classmethod
    async def begin(cls, request: Request, events: AsyncGenerator[bytes, None]) -> EventStream:
        """The stream, once its first event exists; an error before it is raised here."""
        return cls(await watched(request, anext(events)), events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends all events; cancels the work when the client disconnects."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        error: ApiError | None = None
        try:
            await watched(Request(scope, receive), self._produce(send))
        except OSError:  # a send failed: the client has left
            pass
        except Exception as failure:
            error = reported(failure)
            scope[ERROR] = error.code
        if error is None or error.code != CLIENT_LEFT:
            with suppress(OSError):
                await self._send(send, b"" if error is None else event(error.body), last=True)

    async def _produce(self, send: Send) -> None:
        comments = asyncio.ensure_future(self._keep_alive(send))
        try:
            async with aclosing(self._events) as events:
                await self._send(send, self._first)
                async for event in events:
                    await self._send(send, event)
            await self._send(send, _DONE)
        finally:
            comments.cancel()

    async def _keep_alive(self, send: Send) -> None:
        with suppress(OSError):  # the client has left
            while True:
                await asyncio.sleep(PING)
                if time.monotonic() - self._last >= PING:
                    await self._send(send, b": alive\n\n")

    async def _send(self, send: Send, event: bytes, *, last: bool = False) -> None:
        await send({"type": "http.response.body", "body": event, "more_body": not last})
        self._last = time.monotonic()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Future[Any]) -> None:
    """Cancels a task and waits for its end; ignores its error."""
    task.cancel()
    with suppress(BaseException):
        await task
