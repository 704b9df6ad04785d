"""Health, metrics and models of a server, its tokenizers, and its web page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, Response

from specdec import __version__
from specdec.server.errors import ApiError
from specdec.server.guards import GuardedRoute, PublicRoute
from specdec.server.models import Host
from specdec.server.options import check_length, check_messages
from specdec.server.protocol import DetokenizeRequest, TokenizeRequest
from specdec.server.responses import watched
from specdec.server.state import State, client_of, state_of, unknown_model
from specdec.server.text import TextModel, ids_in

router = APIRouter(route_class=GuardedRoute, tags=["server"])
public = APIRouter(route_class=PublicRoute, tags=["server"])

T = TypeVar("T")
_FOLDER = Path(__file__).parents[1] / "page"
_PAGE = {  # three files of the package, which load nothing from other hosts
    path: ((_FOLDER / name).read_bytes(), f"text/{kind}; charset=utf-8")
    for path, name, kind in (
        ("/", "index.html", "html"),
        ("/page/app.js", "app.js", "javascript"),
        ("/page/style.css", "style.css", "css"),
    )
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "media-src 'self' blob:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)


@public.get("/health")
async def health() -> dict[str, str]:
    """200 while the process lives; `/ready` tests the models."""
    return {"status": "ok"}


@public.get("/ready")
async def ready(request: Request) -> Response:
    """200 where every model has decoded within half a minute or does so now, else 503."""
    state = state_of(request)
    if state.draining:
        return JSONResponse({"status": "shutting down"}, 503)
    states = {name: await host.is_ready() for name, host in state.hosts.items()}
    sound = all(states.values())
    return JSONResponse({"status": "ok" if sound else "stuck", "models": states}, 200 if sound else 503)


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of specdec."""
    return {"version": __version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Counts and times for Prometheus."""
    return Response(generate_latest(state_of(request).metrics.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """All models."""
    state = state_of(request)
    return {"object": "list", "data": [_card(host, state) for host in state.hosts.values()]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """One model."""
    state = state_of(request)
    host = state.hosts.get(name)
    if host is None:
        message = f"{unknown_model(name, state.hosts)}: /v1/models lists all"
        raise ApiError(404, message, param="model", code="model_not_found")
    return _card(host, state)


@router.get("/v1/load")
async def load(request: Request) -> dict[str, Any]:
    """How full the models are, for the page's plots."""
    return {name: host.load for name, host in state_of(request).hosts.items()}


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> dict[str, Any]:
    """The token ids of a text or a conversation."""
    limits = state_of(request).settings.limits
    check_messages(body.messages or (), limits)
    check_length(len(body.prompt or ""), "prompt", limits)

    def ids(model: TextModel) -> dict[str, Any]:
        if body.messages is not None:
            tokens = ids_in(model.read(body.messages, add_generation_prompt=body.add_generation_prompt))
        else:
            how = {"add_special_tokens": body.add_special_tokens, "verbose": False}
            tokens = list(model.tokenizer(body.prompt, **how)["input_ids"])
        return {"tokens": tokens, "count": len(tokens), "max_model_len": model.context}

    return await _in_helper(request, body.model, ids)


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, str]:
    """The text of token ids."""

    def texts(model: TextModel) -> dict[str, str]:
        width = max(len(model.tokenizer), model.generator.target.vocab_size)
        if any(token >= width for token in body.tokens):
            raise ApiError(400, f"`tokens` must be below {width}, which the model knows", param="tokens")
        text = str(model.tokenizer.decode(body.tokens))
        return {"prompt": text, "content": text}  # vLLM's name, and llama.cpp's

    return await _in_helper(request, body.model, texts)


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> dict[str, Any]:
    """The OpenAPI schema."""
    schema: dict[str, Any] = request.app.openapi()
    return schema


@public.get("/", include_in_schema=False)
@public.get("/page/app.js", include_in_schema=False)
@public.get("/page/style.css", include_in_schema=False)
async def page(request: Request) -> Response:
    """A file of the web page."""
    content, kind = _PAGE[request.scope["route"].path]
    headers = {"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
    return Response(content, media_type=kind, headers=headers)


async def _in_helper(request: Request, name: str | None, function: Callable[[TextModel], T]) -> T:
    """The result of a short function of a model, in a thread beside the threads that decode; clients take turns."""
    host, model = state_of(request).host(name, TextModel)

    async def turn() -> T:
        async with host.light.turn(client_of(request)):
            return await asyncio.to_thread(function, model)

    return await watched(request, turn())


def _card(host: Host, state: State) -> dict[str, Any]:
    model, generator = host.model, host.model.generator
    return {
        "id": model.name,
        "object": "model",
        "created": host.created,
        "owned_by": "specdec",
        "max_model_len": model.context if isinstance(model, TextModel) else None,
        "specdec": {
            "task": model.task,
            "chat": model.chats,
            "infill": isinstance(model, TextModel) and model.fills_gaps,
            "drafts": generator.draft is not None,
            "details": state.settings.details,
            "draft": None if generator.draft is None else generator.draft.kind,
            "exactness": generator.target.exactness,
            "backend": generator.target.backend,
            "weights": generator.target.weight_kind,
            "draft_weights": [model.weight_kind for model in generator.draft.models] if generator.draft else [],
        },
    }
