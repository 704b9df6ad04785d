"""The application: routes, errors in OpenAI's form, and the entrance before all of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from specdec import __version__
from specdec.serve import audio_routes, page_routes, status_routes, text_routes
from specdec.serve.errors import ApiError, as_api_error
from specdec.serve.faults import invalid
from specdec.serve.guards import Entrance, GuardedRoute
from specdec.serve.hosting import Hosts
from specdec.serve.settings import ServeSettings
from specdec.serve.speech_model import SpeechModel
from specdec.serve.state import LOG, State
from specdec.serve.text_model import TextModel

_SAID = {
    404: "nothing is served at this path: /openapi.json lists what is",
    405: "this path is not asked by this method: /openapi.json lists those that are",
}
ROUTERS = (text_routes.router, audio_routes.router, status_routes.router, page_routes.router)


def create_app(settings: ServeSettings, models: Sequence[TextModel | SpeechModel]) -> FastAPI:
    """An ASGI application that serves these models; `app.state.server` is its `State`."""
    state = State(settings, Hosts(models, settings.limits))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        state.close()

    # The schema has a guarded route.
    closed: dict[str, Any] = {
        "docs_url": None,
        "redoc_url": None,
        "openapi_url": None,
    }
    app = FastAPI(title="specdec", version=__version__, lifespan=lifespan, redirect_slashes=False, **closed)
    app.router.route_class = GuardedRoute
    app.state.server = state
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(Exception, _failed)
    app.add_middleware(Entrance, state=state)
    return app


async def _invalid(request: Request, error: Exception) -> Response:
    """A body that is not what the endpoint takes."""
    assert isinstance(error, RequestValidationError)
    faults = [{**fault, "loc": fault["loc"][1:]} for fault in error.errors()]  # "body" comes first
    return _answer(invalid(faults, error.body))


async def _refused(request: Request, error: Exception) -> Response:
    """An error that is meant for the client."""
    assert isinstance(error, HTTPException)
    if isinstance(error, ApiError):
        return _answer(error)
    said = _SAID.get(error.status_code, str(error.detail))
    return _answer(ApiError(error.status_code, said, headers=dict(error.headers or {})))


async def _failed(request: Request, error: Exception) -> Response:
    """Any other error: an option that does not go, no memory, or a defect, which is logged."""
    told = as_api_error(error)
    if told.status_code >= 500:
        LOG.error("a request failed", exc_info=error)
    return _answer(told)


def _answer(error: ApiError) -> Response:
    headers: Any = error.headers
    return JSONResponse(error.body, error.status_code, headers=headers)
