"""The ASGI application: routes, error handlers, middleware."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from specdec import __version__
from specdec.server.errors import ApiError, invalid, no_path, reported
from specdec.server.guards import Entrance, GuardedRoute
from specdec.server.routes import audio, realtime, status, text
from specdec.server.settings import ServeSettings
from specdec.server.speech import SpeechModel
from specdec.server.state import ERROR, State
from specdec.server.text import TextModel

ROUTERS = (text.router, audio.router, realtime.router, status.router, status.public)
_ROUTES = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
_PATHS = [route.path for route in _ROUTES if "{" not in route.path]


def create_app(settings: ServeSettings, models: Sequence[TextModel | SpeechModel]) -> FastAPI:
    """The application that serves `models`; `app.state.server` is its `State`."""
    state = State(settings, models)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with state.ends:
            yield

    app = FastAPI(
        title="specdec", version=__version__, lifespan=lifespan, redirect_slashes=False,
        docs_url=None, redoc_url=None, openapi_url=None,  # the schema has a guarded route
    )  # fmt: skip
    app.router.route_class = GuardedRoute
    app.state.server = state
    for router in ROUTERS:
        app.include_router(router)
    for kind in (RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware, allow_origin_regex=settings.origin_pattern, allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"], expose_headers=["X-Request-ID"],
        )  # fmt: skip
    app.add_middleware(Entrance, state=state)
    proxies = [str(network) for network in settings.trusted_proxies]
    app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=proxies)  # type: ignore[arg-type]
    return app


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        faults = [{**fault, "loc": fault["loc"][1:]} for fault in error.errors()]  # "body" comes first
        error = invalid(faults, error.body)
    elif isinstance(error, HTTPException) and error.status_code == 404 and not isinstance(error, ApiError):
        error = no_path(request.url.path, _PATHS)
    api_error = reported(error)
    request.scope[ERROR] = api_error.code
    return api_error.response
