"""Checks of every request: API key, host, origin, sizes; and its line in the log.

Every route except a `PublicRoute` requires a key, and checks it before it reads the body.
"""

from __future__ import annotations

import json
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import anyio
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.server.errors import CLIENT_LEFT, ApiError, reported, unavailable
from specdec.server.responses import watched
from specdec.server.settings import host_of
from specdec.server.state import ERROR, LOG, State, client_of, sender_of, state_of

_ID = re.compile(r"[\w.-]{1,64}")
_LOCAL = {"localhost", "127.0.0.1", "[::1]", "::1"}
_FORM_BYTES = 2**16  # a form without its file has so many at most
_DIGITS = 20  # a Content-Length has so many at most
_WAYS = {
    "application/json": "send JSON in UTF-8 and the header `Content-Type: application/json`",
    "multipart/form-data": "send a form with the recording as `file`, as `curl -F file=@talk.wav` does",
}
_ENDS = "specdec.ends"  # in the scope: an ExitStack that closes when the request ends


class GuardedRoute(APIRoute):
    """A route with a JSON body, which checks the key and bounds the body first."""

    media = "application/json"
    is_public = False

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            state = state_of(request)
            if not self.is_public:
                authorise(request, state)
            try:
                if self.body_field is None:
                    return await handler(request)
                state.admit()
                request.scope[_ENDS].enter_context(state.clients.request(client_of(request)))
                _check_media(request, self.media)
                async with AsyncExitStack() as stack:
                    most = await self._arrival(request, state, stack)
                    return await handler(Request(request.scope, _bounded(request, state, most)))
            except (ApiError, RequestValidationError):
                raise
            except HTTPException as error:  # FastAPI blames the client for every error of the body
                if isinstance(error.__cause__, OSError):
                    LOG.error("an upload cannot be kept in %s: %s", tempfile.gettempdir(), error.__cause__)
                    raise unavailable("the server has no room for this upload: try again later") from error
                way = "nest it less" if isinstance(error.__cause__, RecursionError) else _WAYS[self.media]
                raise ApiError(400, f"the body cannot be read as {self.media}: {way}") from error
            except Exception as error:  # an uncaught error would close the connection, too
                raise reported(error) from error

        return guarded

    async def _arrival(self, request: Request, state: State, stack: AsyncExitStack) -> int:
        """The limit of the body in bytes."""
        return state.settings.limits.body_bytes


class PublicRoute(GuardedRoute):
    """A route that needs no key."""

    is_public = True


class RecordingRoute(GuardedRoute):
    """A route for a form with a recording; few are uploaded at a time, the others wait unread."""

    media = "multipart/form-data"

    async def _arrival(self, request: Request, state: State, stack: AsyncExitStack) -> int:
        turn = state.uploads.turn(client_of(request))
        await watched(request, stack.enter_async_context(turn), unread=True)
        state.admit()  # the drain may have begun during the wait
        return state.settings.limits.audio_bytes + _FORM_BYTES


def authorise(request: HTTPConnection, state: State) -> None:
    """Raises a 401 without a valid key; puts the key's name into the scope."""
    if state.keys is None:
        return
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    name = state.keys.name(key.strip()) if scheme.lower() == "bearer" and key else None
    if name is None:
        message = "an API key is needed: send the header `Authorization: Bearer KEY`"
        if scheme.lower() == "bearer" and key.strip():
            message = "this API key is not valid: ask whoever runs this server for one that is"
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
    request.scope["specdec.key"] = name


def _check_media(request: Request, media: str) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != media:
        state = f"is {kind[:64]!r}" if kind else "is missing"
        message = f"the header `Content-Type` {state}: {_WAYS[media]}"
        raise ApiError(415, message, param="Content-Type", code="unsupported_media_type")


def _bounded(request: Request, state: State, most: int) -> Receive:
    """The body; reading raises a 413 above `most` bytes and a 408 after `upload_seconds`."""
    limits = state.settings.limits
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or len(declared) > _DIGITS or int(declared) > most:
        raise _too_large(most)
    began, num_bytes, is_complete = time.monotonic(), 0, False

    async def receive() -> Message:
        nonlocal num_bytes, is_complete
        if is_complete:
            return await request.receive()
        message: Message | None = None
        with anyio.move_on_after(max(began + limits.upload_seconds - time.monotonic(), 0)):
            message = await request.receive()
        if message is None:
            raise ApiError(408, "the body did not arrive in time", code="slow_upload")
        if message["type"] == "http.disconnect":
            raise state.given_up()
        num_bytes += len(message.get("body", b""))
        if num_bytes > most:
            raise _too_large(most)
        is_complete = not message.get("more_body", False)
        return message

    return receive


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body may have {most:,} bytes at most", code="too_large")


def _is_at(origin: str, netloc: str) -> bool:
    """Whether `origin` is `netloc` by http, or by https through a proxy."""
    return any(
        origin.removesuffix(port) == f"{scheme}://{netloc.removesuffix(port)}"
        for scheme, port in (("http", ":80"), ("https", ":443"))
    )


class Entrance:
    """The outermost middleware: checks headers, host and origin; adds a request id; logs the request."""

    def __init__(self, app: ASGIApp, state: State) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        headers, began = Headers(scope=scope), time.monotonic()
        client_id = headers.get("x-request-id", "")
        request_id = client_id if _ID.fullmatch(client_id) else secrets.token_hex(8)
        status, num_bytes, complete = 500, 0, False
        ends = scope[_ENDS] = ExitStack()
        inner = {**scope, "method": "GET"} if scope.get("method") == "HEAD" else scope  # uvicorn leaves its body out

        async def tagged(message: Message) -> None:
            nonlocal status, num_bytes, complete
            if message["type"].endswith(("http.response.start", "websocket.accept")):
                status = message.get("status", 101)
                added = MutableHeaders(scope=message)
                added["X-Request-ID"] = request_id
                added["X-Content-Type-Options"] = "nosniff"
            else:
                complete = not message.get("more_body", False)
            num_bytes += len(message.get("body") or message.get("text") or b"")
            await send(message)

        try:
            error = self._refusal(scope, headers)
            if error is None:
                await self._app(inner, receive, tagged)
            else:
                inner[ERROR] = error.code
                await error.response(scope, receive, tagged)
        finally:
            ends.close()
            path, seconds = getattr(inner.get("route"), "path", "unknown"), time.monotonic() - began
            if status == 200 and not complete:
                inner.setdefault(ERROR, CLIENT_LEFT)
            if inner.get(ERROR) == CLIENT_LEFT:
                self._state.metrics.aborted.labels(path).inc()
            # Never its content, and no path but a route's; the error of a stream comes after the status.
            facts = {
                **{"request_id": request_id, "method": scope.get("method", "GET"), "path": path, "status": status},
                **{"seconds": round(seconds, 4), "bytes": num_bytes, "client": sender_of(HTTPConnection(scope))},
                **{"key": inner.get("specdec.key"), "error": inner.get(ERROR)},
            }
            self._state.metrics.requests.labels(path, str(status)).inc()
            LOG.info(json.dumps(facts), extra={"facts": facts})

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > self._state.settings.limits.header_bytes:
            return ApiError(431, "the headers are too large", code="too_large")
        if "transfer-encoding" in headers and "content-length" in headers:  # request smuggling
            message = "a request has `Transfer-Encoding` or `Content-Length`: send one of them"
            return ApiError(400, message, code="invalid_http", headers={"Connection": "close"})
        settings, host = self._state.settings, headers.get("host", "").lower()
        hosts = {*map(host_of, settings.hosts), settings.host.lower(), *(_LOCAL if settings.is_local else ())}
        # DNS rebinding: another site's name may resolve to this address.
        if settings.is_local and host_of(host) not in hosts:
            return ApiError(421, "this host name is not served: pass --allow-host", code="unknown_host")
        origin = headers.get("origin")
        if origin is None or re.fullmatch(settings.origin_pattern, origin):
            return None
        if not any(_is_at(origin.lower(), netloc) for netloc in (host, *settings.hosts)):
            message = "pages of other sites may not use this server: pass --allow-host or --allow-origin"
            return ApiError(403, message, code="cross_origin")
        return None
