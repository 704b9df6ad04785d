"""What every request must pass: keys, hosts and origins, and sizes; and the line in the log that it leaves.

Keys are asked for by the route itself, before its body is read, and not by looking at a path: a route that does not say
that it is public is closed.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

import anyio
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.serve.errors import ApiError, as_api_error
from specdec.serve.state import LOG, State, state_of
from specdec.serve.wire import wire_of

_ID = re.compile(r"[\w.-]{1,64}")
_LOCAL = {"localhost", "127.0.0.1", "[::1]", "::1"}
_FORM_BYTES = 2**16  # of a form besides its file
_PUBLIC = "_specdec_public"

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def public(endpoint: Endpoint) -> Endpoint:
    """Marks an endpoint that asks for no key."""
    setattr(endpoint, _PUBLIC, True)
    return endpoint


class GuardedRoute(APIRoute):
    """A route that asks for a key and bounds the body before anything else happens."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The endpoint behind its guards."""
        handler, is_public = super().get_route_handler(), hasattr(self.endpoint, _PUBLIC)

        async def guarded(request: Request) -> Response:
            state = state_of(request)
            if not is_public:
                authorise(request, state)
            try:
                return await handler(Request(request.scope, _bounded(request, state)))
            except (HTTPException, RequestValidationError):
                raise
            except Exception as error:
                # Left to the server it would be answered too, but logged whole, and the connection closed.
                told = as_api_error(error)
                if told.status_code >= 500:
                    LOG.error("a request failed", exc_info=error)
                raise told from error

        return guarded


def authorise(request: Request, state: State) -> None:
    """Raises a 401 without a known key; notes the key's name."""
    if state.keys is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    name = state.keys.name(given.strip()) if scheme.lower() == "bearer" and given else None
    if name is None:
        message = "an API key is needed: send the header `Authorization: Bearer KEY`"
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
    request.scope["specdec.key"] = name


def _bounded(request: Request, state: State) -> Receive:
    """The body, as long as it is not too large and does not take too long."""
    limits = state.settings.limits
    is_form = request.headers.get("content-type", "").startswith("multipart/")
    most = limits.audio_bytes + _FORM_BYTES if is_form else limits.body_bytes
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared) > most:
        raise _too_large(most)
    began, seen, complete = time.monotonic(), 0, False

    async def receive() -> Message:
        nonlocal seen, complete
        if complete:
            return await request.receive()
        message: Message | None = None
        with anyio.move_on_after(max(began + limits.upload_seconds - time.monotonic(), 0)):
            message = await request.receive()
        if message is None:
            raise ApiError(408, "the body did not arrive in time", code="timeout")
        seen += len(message.get("body", b""))
        if seen > most:
            raise _too_large(most)
        complete = not message.get("more_body", False)
        return message

    return receive


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body may have {most:,} bytes at most", code="too_large")


class Entrance:
    """The outermost layer: headers of a sane size, hosts and origins that belong here, an id and a line for the log."""

    def __init__(self, app: ASGIApp, state: State) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what is in order."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers, began = Headers(scope=scope), time.monotonic()
        given = headers.get("x-request-id", "")
        own = given if _ID.fullmatch(given) else secrets.token_hex(8)
        status, sent, is_head = 500, 0, scope["method"] == "HEAD"
        inner = {**scope, "method": "GET"} if is_head else scope

        async def tagged(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                added = MutableHeaders(scope=message)
                added["X-Request-ID"] = own
                added["X-Content-Type-Options"] = "nosniff"
            elif is_head:
                message = {**message, "body": b""}
            sent += len(message.get("body", b""))
            await send(message)

        try:
            error = self._refusal(scope, headers)
            if error is None:
                await self._app(inner, receive, tagged)
            else:
                await JSONResponse(error.body, error.status_code, dict(error.headers or {}))(scope, receive, tagged)
        finally:
            sent += 0 if (wire := wire_of(scope)) is None else wire.bytes
            path, seconds = getattr(inner.get("route"), "path", "unknown"), time.monotonic() - began
            self._state.note(own, scope["method"], path, status, seconds, sent, inner.get("specdec.key"))

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        """Why a request must not go further."""
        if sum(len(name) + len(value) for name, value in scope["headers"]) > self._state.settings.limits.header_bytes:
            return ApiError(431, "the headers are too large", code="too_large")
        if "transfer-encoding" in headers and "content-length" in headers:  # what follows may be read in two ways
            message = "a request has `Transfer-Encoding` or `Content-Length`: send one of them"
            return ApiError(400, message, code="invalid_http", headers={"Connection": "close"})
        settings, host = self._state.settings, _name(headers.get("host", ""))
        known = {*settings.hosts, settings.host, *(_LOCAL if settings.is_local else ())}
        # A page elsewhere may make its own name lead here (DNS rebinding).
        if settings.is_local and host not in known:
            return ApiError(421, "this host name is not served: pass --allow-host", code="unknown_host")
        origin = headers.get("origin")
        if origin is not None and _name(urlsplit(origin).netloc) not in {host, *settings.hosts}:
            return ApiError(403, "pages of other sites may not use this server: pass --allow-host", code="cross_origin")
        return None


def _name(netloc: str) -> str:
    """A host without its port."""
    host, colon, port = netloc.rpartition(":")
    return (host if colon and port.isdecimal() else netloc).lower()
