"""`/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from specdec.server.direct_socket import wire_of
from specdec.server.errors import ApiError
from specdec.server.generation import TextRequest
from specdec.server.guards import GuardedRoute
from specdec.server.options import check, check_length, check_pictures
from specdec.server.protocol import ChatRequest, CompletionRequest, Generate
from specdec.server.responses import EventStream, watched
from specdec.server.state import client_of, state_of

router = APIRouter(route_class=GuardedRoute, tags=["text"])


@router.post("/v1/completions")
async def completions(request: Request, asked: CompletionRequest) -> Response:
    """Continues one text or several."""
    limits = state_of(request).settings.limits
    if len(asked.prompts) > limits.prompts:
        message = f"`prompt` may be {limits.prompts} texts at most on this server"
        raise ApiError(400, message, param="prompt", code="above_limit")
    return await _answer(request, asked, asked.prompts, max(map(len, asked.prompts)), "prompt")


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, asked: ChatRequest) -> Response:
    """Answers a conversation."""
    characters = sum(len(message.text) for message in asked.messages)
    pictures = [url for message in asked.messages for url in message.pictures]
    check_pictures(pictures, state_of(request).settings.limits)
    return await _answer(request, asked, [None], characters, "messages")


async def _answer(
    request: Request, asked: Generate, prompts: Sequence[str | list[int] | None], characters: int, param: str
) -> Response:
    state = state_of(request)
    check(asked, state.settings.limits)
    check_length(characters, param, state.settings.limits)
    if not state.settings.details and (asked.return_metrics or asked.return_drafted):
        message = "`return_metrics` and `return_drafted` are not answered by this server: leave them out"
        raise ApiError(400, message, param="return_metrics" if asked.return_metrics else "return_drafted")
    host = state.hosts.named(asked.model, "text")
    made = TextRequest(host, state.metrics, state.settings, asked, prompts, client=client_of(request))
    if asked.stream:
        wire = wire_of(request.scope)
        return EventStream(state, await watched(request, made.stream(wire)), wire)
    body: dict[str, Any] = await watched(request, made.whole())
    return JSONResponse(body)
