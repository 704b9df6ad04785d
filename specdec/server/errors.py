"""Errors as clients receive them, in OpenAI's format."""

from __future__ import annotations

import logging
import re
from typing import Any

import torch
from starlette.exceptions import HTTPException

from specdec.errors import CancelledError, OptionError

LOG = logging.getLogger(__name__)
_MESSAGES = {
    404: "this path does not exist: /openapi.json lists all paths",
    405: "this path does not take this method: /openapi.json lists those it takes",
}


class ApiError(HTTPException):
    """An error response: HTTP `status`, a message with the way out, the field `param`, a short `code`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.message, self.param, self.code = message, param, code

    @property
    def body(self) -> dict[str, Any]:
        facts = {"type": _kind(self.status_code), "param": self.param, "code": self.code}
        return {"error": {"message": self.message, **facts}}


def _kind(status: int) -> str:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    return kinds.get(status, "invalid_request_error" if status < 500 else "server_error")


def busy(message: str, seconds: int) -> ApiError:
    """A 429: too many requests, try again after `seconds`."""
    return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(seconds)})


def unavailable(message: str, seconds: int = 5) -> ApiError:
    """A 503: try again after `seconds`."""
    return ApiError(503, message, code="unavailable", headers={"Retry-After": str(seconds)})


def too_late(seconds: float) -> ApiError:
    """A 504: the request took more than `seconds`."""
    return ApiError(504, f"the request took longer than {seconds:g} s: ask for less", code="timeout")


# Names of the library -> names in requests.
_CLIENTS = {
    "`num_return_sequences`": "`n`",
    "`max_new_tokens`": "`max_tokens`",
    "`min_new_tokens`": "`min_tokens`",
    "`sequence_bias`": "`logit_bias`",
    "`force_words_ids`": "`constraints`",
    "`top_logprobs`": "`logprobs`",
    "`prompt_ids`": "`prompt`",
    "set `do_sample=False`": "set `temperature` to 0",
    "`do_sample=True`": "a `temperature` above 0",
    "=True": "=true",
    "=False": "=false",
}


def refused(message: str) -> ApiError:
    """The library's message about an option as a 400, with the names of requests."""
    for ours, theirs in _CLIENTS.items():
        message = message.replace(ours, theirs)
    return ApiError(400, message, param=first_named(message), code="invalid_value")


def first_named(message: str) -> str | None:
    """The first name in back-ticks; None without one."""
    found = re.search(r"`(\w+)", message)
    return found[1] if found else None


def reported(error: Exception) -> ApiError:
    """As `as_api_error`; logs unexpected errors."""
    found = as_api_error(error)
    if found.status_code >= 500 and found is not error:
        LOG.error("a request failed", exc_info=error)
    return found


def as_api_error(error: BaseException) -> ApiError:
    """The response to any error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):  # of the router
        message = _MESSAGES.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, headers=dict(error.headers or {}))
    if isinstance(error, CancelledError):
        return ApiError(499, "the request was cancelled", code="cancelled")
    if isinstance(error, OptionError):
        return refused(str(error))
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "out of memory" in str(error).lower():
        return unavailable("out of memory for this request: ask for less, or try again later")
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error")
