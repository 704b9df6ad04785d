"""Health, metrics and models of a server, and its tokenizers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from specdec import __version__
from specdec.server.errors import ApiError
from specdec.server.guards import GuardedRoute, public
from specdec.server.models import Host
from specdec.server.options import check_length, check_pictures
from specdec.server.protocol import DetokenizeRequest, TokenizeRequest
from specdec.server.responses import watched
from specdec.server.state import client_of, state_of
from specdec.server.text import TextModel

router = APIRouter(route_class=GuardedRoute, tags=["server"])

T = TypeVar("T")


@router.get("/health")
@public
async def health() -> dict[str, str]:
    """200 while the process lives; `/ready` tests the models."""
    return {"status": "ok"}


@router.get("/ready")
@public
async def ready(request: Request) -> Response:
    """200 where every model has decoded within half a minute or does so now, else 503."""
    state = state_of(request)
    if state.draining:
        return JSONResponse({"status": "shutting down"}, 503)
    states = {name: await host.is_ready() for name, host in state.hosts.all.items()}
    sound = all(states.values())
    return JSONResponse({"status": "ok" if sound else "stuck", "models": states}, 200 if sound else 503)


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of specdec."""
    return {"version": __version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Counts and times for Prometheus."""
    return Response(state_of(request).metrics.text, media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """All models."""
    return {"object": "list", "data": [_card(host) for host in state_of(request).hosts.all.values()]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """One model."""
    found = state_of(request).hosts.all.get(name)
    if found is None:
        raise ApiError(404, f"there is no model {name[:128]!r} here", param="model", code="model_not_found")
    return _card(found)


@router.get("/v1/load")
async def load(request: Request) -> dict[str, Any]:
    """How full the models are, for the page's plots."""
    return {name: asdict(one) for name, one in state_of(request).hosts.loads()}


@router.post("/tokenize")
async def tokenize(request: Request, asked: TokenizeRequest) -> dict[str, Any]:
    """The token ids of a text or a conversation."""
    messages, limits = [message.plain for message in asked.messages or ()], state_of(request).settings.limits
    pictures = [url for message in asked.messages or () for url in message.pictures]
    check_pictures(pictures, limits)
    characters = len(asked.prompt or "") + sum(len(message.text) for message in asked.messages or ())
    check_length(characters, "messages" if asked.prompt is None else "prompt", limits)
    host, text = _text_host(request, asked.model)

    def ids() -> list[int]:
        if pictures:
            seen = text.seen(messages, add_generation_prompt=asked.add_generation_prompt)
            return list(seen["input_ids"][0].tolist())
        if asked.prompt is None:
            return text.template(messages, add_generation_prompt=asked.add_generation_prompt)
        how = {"add_special_tokens": asked.add_special_tokens, "verbose": False}
        return list(text.tokenizer(asked.prompt, **how)["input_ids"])

    found = await _lightly(request, host, ids)
    return {"tokens": found, "count": len(found), "max_model_len": text.context}


@router.post("/detokenize")
async def detokenize(request: Request, asked: DetokenizeRequest) -> dict[str, str]:
    """The text of token ids."""
    host, text = _text_host(request, asked.model)
    width = max(len(text.tokenizer), text.generator.target.vocab_size)
    if any(token >= width for token in asked.tokens):
        raise ApiError(400, f"`tokens` must be below {width}, which the model knows", param="tokens")
    return {"prompt": await _lightly(request, host, lambda: str(text.tokenizer.decode(asked.tokens)))}


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> dict[str, Any]:
    """The OpenAPI schema."""
    schema: dict[str, Any] = request.app.openapi()
    return schema


def _text_host(request: Request, name: str | None) -> tuple[Host, TextModel]:
    host = state_of(request).hosts.named(name, "text")
    assert isinstance(host.model, TextModel)
    return host, host.model


async def _lightly(request: Request, host: Host, function: Callable[[], T]) -> T:
    """Runs a short function in a helper thread, a few at a time."""

    async def turned() -> T:
        async with host.light.turn(client_of(request)):
            return await asyncio.get_running_loop().run_in_executor(host.helpers, function)

    return await watched(request, turned())


def _card(host: Host) -> dict[str, Any]:
    model = host.model
    context = model.context if isinstance(model, TextModel) else None
    generator = model.generator
    return {
        "id": model.name,
        "object": "model",
        "created": host.created,
        "owned_by": "specdec",
        "max_model_len": context,
        "specdec": {
            "task": model.task,
            "chat": model.chats,
            "drafts": model.drafts,
            "predicts": model.predicts,
            "draft": None if generator.drafter is None else type(generator.drafter).__name__,
            "exactness": generator.target.exactness,
            "backend": generator.target.backend,
        },
    }
