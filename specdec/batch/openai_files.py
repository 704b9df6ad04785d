"""OpenAI's batch files: every row is a request to an endpoint, every line its response."""

from __future__ import annotations

from functools import partial
from queue import SimpleQueue
from typing import Any

from pydantic import ValidationError

from specdec.batch.tasks import BatchSpec, Fields, Task, error_text, load_generator
from specdec.core.stats import Stats
from specdec.server.answers import Answer
from specdec.server.errors import ApiError, as_api_error, invalid
from specdec.server.protocol import ChatRequest, CompletionRequest
from specdec.server.text import PromptRequest, TextModel

ENDPOINTS: dict[str, type[ChatRequest] | type[CompletionRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}
_NO_SEED = 2**63
_TIMELESS = ("prompt_tokens", "completion_tokens", "total_tokens")


class OpenAITask(Task):
    """Answers requests as a server would, whatever model they name; answers do not depend on the clock."""

    def __init__(self, spec: BatchSpec) -> None:
        self._model = TextModel(spec.name, load_generator(spec, **spec.options))

    def answer(self, fields: Fields, seed: int) -> tuple[dict[str, Any], Stats]:
        request = _request(fields)
        if request.seed is None:
            request = request.model_copy(update={"seed": seed % _NO_SEED})
        calls, thinking = self._model.calls(request), self._model.thinking(request)
        arguments: dict[str, Any] = {"id": _id(seed), "created": 0, "calls": calls, "thinking": thinking}
        answer = Answer(request, self._model.name, **arguments)
        news = SimpleQueue[None]()
        for at, prompt in enumerate(request.prompts):
            for update in self._model.run(PromptRequest(request, prompt), partial(news.put, None)):
                if update is None:
                    news.get()
                else:
                    answer.take(at, update)
        body = answer.whole()
        body["usage"] = {name: body["usage"][name] for name in _TIMELESS}
        return self._line(fields, seed, 200, body), answer.stats

    def failure(self, fields: Fields, error: Exception, seed: int) -> dict[str, Any]:
        """The line of a refused or failed request; without fields, it has the error alone."""
        if not fields:
            facts = {"code": "invalid_request", "message": error_text(error)}
            return {"id": f"batch_req_{_id(seed)}", "custom_id": None, "response": None, "error": facts}
        api_error = as_api_error(error)
        if api_error.status_code == 500:  # its message refers to a server's log
            api_error = ApiError(500, error_text(error), code=api_error.code)
        return self._line(fields, seed, api_error.status_code, api_error.body)

    def _line(self, fields: Fields, seed: int, status: int, body: dict[str, Any]) -> dict[str, Any]:
        response = {"status_code": status, "request_id": _id(seed), "body": body}
        custom_id = fields.get("custom_id")
        return {"id": f"batch_req_{_id(seed)}", "custom_id": custom_id, "response": response, "error": None}


def _request(fields: Fields) -> ChatRequest | CompletionRequest:
    """The request of a row; raises a 400, or a 404 for an unknown endpoint."""
    kind = ENDPOINTS.get(str(fields.get("url")))
    if kind is None:
        endpoints = " or ".join(ENDPOINTS)
        raise ApiError(404, f"`url` must be {endpoints}, got {fields.get('url')!r}", param="url", code="unknown_url")
    if fields.get("method", "POST") != "POST":
        raise ApiError(400, f"`method` must be 'POST', got {fields['method']!r}", param="method", code="invalid_value")
    try:
        request = kind.model_validate(fields.get("body"))
    except ValidationError as error:
        raise invalid([dict(fault) for fault in error.errors()], fields.get("body")) from None
    if request.stream:
        raise ApiError(400, "`stream` is for a server: leave it out of a file", param="stream", code="invalid_value")
    return request


def _id(seed: int) -> str:
    return f"{seed % 2**96:024x}"
