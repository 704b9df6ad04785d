"""`/v1/completions` and `/v1/chat/completions`: prompts are decoded side by side, into one answer or a stream."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, closing, suppress
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from specdec.core.stats import Stats
from specdec.server.answers import Answer
from specdec.server.cancellation import END, Cancel, Put, Work, side_by_side, step
from specdec.server.errors import ApiError, above_limit
from specdec.server.guards import GuardedRoute
from specdec.server.items import ResponseAnswer, ResponsesRequest
from specdec.server.metrics import Metrics
from specdec.server.models import Host
from specdec.server.options import check_length, check_limits, check_messages
from specdec.server.protocol import ChatRequest, CompletionRequest, Generate, InfillRequest
from specdec.server.responses import EventStream, watched
from specdec.server.state import client_of, state_of
from specdec.server.text import PromptRequest, Started, TextDelta, TextModel, cached_tokens

router = APIRouter(route_class=GuardedRoute, tags=["text"])


@router.post("/v1/completions")
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continues one text or several."""
    limits = state_of(request).settings.limits
    if len(body.prompts) > limits.prompts:
        raise above_limit(f"`prompt` may be {limits.prompts} texts", "prompt")
    check_length(max(map(len, body.prompts)) + len(body.suffix or ""), "prompt", limits)
    return await _answer(request, body)


@router.post("/infill")
async def infill(request: Request, body: InfillRequest) -> dict[str, Any]:
    """llama.cpp's: the text between a prefix and a suffix."""
    limits = state_of(request).settings.limits
    before, after, files = body.gap
    check_length(len(before) + len(after) + sum(len(text) for _, text in files), "prompt", limits)
    check_limits(body, limits)
    text_request = TextRequest(request, body)
    answer, word = await watched(request, text_request.whole()), text_request.answer.stopping_word
    choice, usage = answer["choices"][0], answer["usage"]
    return {
        "content": choice["text"],
        "stop": True,
        "stop_type": "limit" if choice["finish_reason"] == "length" else "word" if word else "eos",
        "stopping_word": word,
        "model": answer["model"],
        "tokens_predicted": usage["completion_tokens"],
        "tokens_evaluated": usage["prompt_tokens"],
        "tokens_cached": usage["prompt_tokens_details"]["cached_tokens"],
    }


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Answers a conversation."""
    limits = state_of(request).settings.limits
    check_messages(body.messages, limits)
    check_length(len(json.dumps([tool.plain for tool in body.offered])), "tools", limits)
    return await _answer(request, body)


@router.post("/v1/responses")
async def responses(request: Request, body: ResponsesRequest) -> Response:
    """Answers a conversation, in OpenAI's newer form."""
    state = state_of(request)
    whole = body.after(state.conversations.find(client_of(request), body.previous_response_id))
    return await chat_completions(request, whole)


@router.get("/v1/responses/{id}")
async def stored_response(request: Request, id: str) -> dict[str, Any]:
    """A response that the client received, as long as it stays in memory."""
    return state_of(request).conversations.response(client_of(request), id)


@router.delete("/v1/responses/{id}")
async def forget_response(request: Request, id: str) -> dict[str, Any]:
    """Forgets a response and its conversation."""
    state_of(request).conversations.response(client_of(request), id, forget=True)
    return {"id": id, "object": "response", "deleted": True}


async def _answer(request: Request, body: Generate) -> Response:
    state = state_of(request)
    check_limits(body, state.settings.limits)
    if not state.settings.details and (body.return_metrics or body.return_drafted):
        message = "`return_metrics` and `return_drafted` are not answered by this server: leave them out"
        raise ApiError(400, message, param="return_metrics" if body.return_metrics else "return_drafted")
    text_request = TextRequest(request, body)
    if not body.stream:
        return JSONResponse(await watched(request, text_request.whole()))
    return await EventStream.begin(request, text_request.events())


class TextRequest:
    """A request for text."""

    def __init__(self, request: Request, body: Generate) -> None:
        state, client, self._began = state_of(request), client_of(request), time.monotonic()
        (self._host, self._model), self._metrics = state.host(body.model, TextModel), state.metrics
        model, self._body, self._limits = self._model, body, state.settings.limits
        self._turn = partial(self._host.turns.turn, client)
        chunk, most = state.settings.stream_chunk if body.stream else None, self._limits.new_tokens
        self._prompts = [PromptRequest(body, content, client, chunk, most) for content in body.prompts]
        how: dict[str, Any] = {"calls": model.calls(body), "thinking": model.thinking(body)}
        how["details"] = state.settings.details
        if isinstance(body, ResponsesRequest):
            keep = partial(state.conversations.keep, client, body)
            self.answer: Answer = ResponseAnswer(body, model.name, done=keep, **how)
        else:
            self.answer = Answer(body, model.name, **how)

    async def whole(self) -> dict[str, Any]:
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass
        return self.answer.whole()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of all prompts as they come, then the chunk of usage and metrics.

        The first one comes once the first prompt's options are valid (`kv_budget` may still refuse it).
        """
        works: list[Work[bytes]] = [partial(self._decode, prompt, at) for at, prompt in enumerate(self._prompts)]
        async with aclosing(side_by_side(self._turn, works, self._limits.unread_bytes, len)) as events:
            async for event in events:
                yield event
        if (last := self.answer.last_chunk()) is not None:
            yield self.answer.event(last)

    async def _decode(self, prompt: PromptRequest, at: int, put: Put[bytes]) -> None:
        """Decodes one prompt; puts an empty event once the request is valid, then the events of a stream.

        A thread prepares the request; from then on, the engine's thread tells the event loop what is new.
        """
        observe = _observer(self._host, self._metrics, self._began, streamed=self._body.stream)
        news, loop = asyncio.Event(), asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop may be closed: the pass under way outlives a server that stops
                loop.call_soon_threadsafe(news.set)

        with closing(self._model.run(prompt, wake)) as updates:
            update = await step(self._host.pool, updates, Cancel())
            while update is not END:
                if update is None:
                    await news.wait()
                    news.clear()
                else:
                    self.answer.take(at, update)
                    observe(update)
                    if isinstance(update, Started):
                        put(b"")
                    elif isinstance(update, Stats) or not self._body.stream:
                        pass
                    elif (chunk := self.answer.chunk(at, update)) is not None:
                        put(self.answer.event(chunk))
                update = next(updates, END)


def _observer(
    host: Host, metrics: Metrics, began: float, *, streamed: bool
) -> Callable[[Started | TextDelta | Stats], None]:
    """Counts updates of one prompt that has its turn; times between tokens only where its text is `streamed`."""
    model, last = host.model.name, math.inf
    new_tokens, first_token, between = (
        metric.labels(model) for metric in (metrics.new_tokens, metrics.first_token, metrics.between)
    )
    metrics.queued.labels(model).observe(time.monotonic() - began)

    def observe(update: Started | TextDelta | Stats) -> None:
        nonlocal last
        now = time.monotonic()
        if isinstance(update, Started):
            metrics.prompt_tokens.labels(model).inc(update.prompt_tokens)
        elif isinstance(update, Stats):
            metrics.count(model, update)
            metrics.cached_tokens.labels(model).inc(cached_tokens(update))
            metrics.whole.labels(model).observe(now - began)
        else:
            host.note_token()
            new_tokens.inc(update.tokens)
            if streamed and last == math.inf:
                first_token.observe(now - began)
            elif streamed:
                for _ in range(update.tokens):
                    between.observe((now - last) / update.tokens)
            last = now

    return observe
