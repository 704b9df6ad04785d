"""What a client is told when something goes wrong, in the form of OpenAI's interface."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from starlette.exceptions import HTTPException

from specdec.errors import CancelledError, OptionError


class ApiError(HTTPException):
    """An answer that is an error: HTTP `status`, a message that names the way out, the field and a short `code`."""

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
        """The error as clients read it."""
        facts = {"type": _kind(self.status_code), "param": self.param, "code": self.code}
        return {"error": {"message": self.message, **facts}}


def _kind(status: int) -> str:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    return kinds.get(status, "invalid_request_error" if status < 500 else "server_error")


def busy(message: str, seconds: int) -> ApiError:
    """Too many requests, and when it is worth trying again."""
    return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(seconds)})


def unavailable(message: str, seconds: int = 5) -> ApiError:
    """The server cannot do this now."""
    return ApiError(503, message, code="unavailable", headers={"Retry-After": str(seconds)})


def too_late(seconds: float) -> ApiError:
    """The request took longer than it may."""
    return ApiError(504, f"the request took longer than {seconds:g} s: ask for less", code="timeout")


def invalid(fault: Mapping[str, Any], place: Sequence[Any]) -> ApiError:
    """What pydantic found at this place of a request, as a 400."""
    where = [str(part) for part in place]
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        message = "this field is not known here: leave it out"
    named = re.match(r"`(\w+)`", message)
    param = ".".join(where)[:128] or (named and named[1])
    return ApiError(400, f"`{param}`: {message}" if where else message, param=param, code="invalid_value")


def as_api_error(error: BaseException) -> ApiError:
    """What a client hears about any error; the details of unexpected ones stay in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CancelledError):
        return ApiError(499, "the request was cancelled", code="cancelled")
    if isinstance(error, OptionError):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "out of memory" in str(error).lower():
        return unavailable("out of memory for this request: ask for less, or try again later")
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error")
