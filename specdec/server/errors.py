"""Errors as clients receive them, in OpenAI's format; pydantic's errors become one sentence about one field."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from specdec.errors import CancelledError, OptionError, closest_name

LOG = logging.getLogger(__name__)
CLIENT_LEFT = "cancelled"
"""The code of requests whose client has left."""
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_METHOD = "this path does not take this method: /openapi.json lists those it takes"
# Ollama's paths -> the path that serves the same.
_OLLAMA = {
    **dict.fromkeys(("/api/chat", "/api/generate"), "/v1/chat/completions"),
    **{"/api/tags": "/v1/models", "/api/version": "/version"},
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
        """The error as OpenAI writes it."""
        kind = _KINDS.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status_code, headers=dict(self.headers or {}))


def busy(message: str, seconds: int) -> ApiError:
    """A 429: too many requests, try again after `seconds`."""
    return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(seconds)})


def unavailable(message: str) -> ApiError:
    """A 503: try again soon."""
    return ApiError(503, message, code="unavailable", headers={"Retry-After": "5"})


def no_path(path: str, paths: Iterable[str]) -> ApiError:
    """A 404: none of the `paths` is this one; names the path that serves the same, or the nearest."""
    near = _OLLAMA.get(path) or closest_name(path[:_LONGEST_PATH], paths)
    hint = f" (did you mean {near}?)" if near else ""
    return ApiError(404, f"this path does not exist{hint}: /openapi.json lists all paths")


def above_limit(message: str, param: str) -> ApiError:
    """A 400: more than this server allows."""
    return ApiError(400, f"{message} at most on this server", param=param, code="above_limit")


# Names of the library -> names in requests.
_FIELD_NAMES = {
    "`num_return_sequences`": "`n`",
    "`max_new_tokens`": "`max_tokens`",
    "`min_new_tokens`": "`min_tokens`",
    "`sequence_bias`": "`logit_bias`",
    "`force_words_ids`": "`constraints`",
    "`top_logprobs`": "`logprobs`",
    "`prompt_ids`": "`prompt`",
    "pass `pixel_values`": "send it as a part of `messages` in a chat",
    "set `do_sample=False`": "set `temperature` to 0",
    "and the call has no draft: name one": "and the request has no draft: leave it out",
    "`do_sample=True`": "a `temperature` above 0",
    "=True": "=true",
    "=False": "=false",
}


def _first_name(message: str) -> str | None:
    """The first name in back-ticks; None without one."""
    match = re.search(r"`(\w+)", message)
    return match[1] if match else None


def reported(error: Exception) -> ApiError:
    """As `as_api_error`; logs unexpected errors."""
    api_error = as_api_error(error)
    if api_error.status_code >= 500 and api_error is not error:
        LOG.error("a request failed", exc_info=error)
    return api_error


def as_api_error(error: BaseException) -> ApiError:
    """The response to any error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):  # the router raises it
        message = _METHOD if error.status_code == 405 else str(error.detail)
        return ApiError(error.status_code, message, headers=dict(error.headers or {}))
    if isinstance(error, CancelledError):  # the server cancelled it
        return unavailable("the server ended this request: try again")
    if isinstance(error, OptionError):
        message = str(error)
        for option, field in _FIELD_NAMES.items():
            message = message.replace(option, field)
        return ApiError(400, message, param=_first_name(message), code="invalid_value")
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "out of memory" in str(error).lower():
        return unavailable("out of memory for this request: ask for less, or try again later")
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error")


Place = tuple[str | int, ...]


class FieldError(ValueError):
    """A validator's error, whose message clients receive."""


# pydantic's type errors -> the expected type.
_TYPES = {
    "string_type": "text",
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "literal_error": "{expected}",
}
# pydantic's other errors -> the predicate of the message, with pydantic's facts.
_FAULTS = {
    "missing": "is needed: pass it",
    "extra_forbidden": "is not known here: leave it out",
    "finite_number": "must be a finite number",
    "greater_than": "must be above {gt}, got {input}",
    "greater_than_equal": "must be at least {ge}, got {input}",
    "less_than": "must be below {lt}, got {input}",
    "less_than_equal": "must be at most {le}, got {input}",
    **dict.fromkeys(("string_too_short", "too_short"), "must not be empty"),
    "string_too_long": "may have {max_length} characters at most",
    "string_unicode": "holds half of a character (a lone surrogate): leave it out",
    "too_long": "may have {max_length} {unit} at most",
    "json_invalid": "is not JSON: {error}, at character {place}",
    "value_error": "must be a file, as `curl -F file=@talk.wav` sends it",  # FastAPI's: ours are FieldErrors
}
_LONGEST_PATH = 128  # characters of a path, of a body's field or of the server
_MOST_CHARACTERS = 40  # characters of a value
_MOST_FAULTS = 100  # faults that are compared; a body has as many as values


def invalid(faults: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """A 400 about the most informative of pydantic's faults.

    A field of a union type has a fault for each member: the deepest path wins, then a wrong `type`, which decides the
    other fields, then a wrong value over a wrong type, then the path with the most faults.
    """
    faults = faults[:_MOST_FAULTS]
    places = [place_of(fault, body) for fault in faults]
    times = Counter(places)

    def weight(at: int) -> tuple[int, bool, bool, int]:
        is_kind = faults[at]["type"] == "literal_error" and places[at][-1:] == ("type",)
        return len(places[at]), is_kind, faults[at]["type"] not in _TYPES, times[places[at]]

    best = max(range(len(faults)), key=weight)
    path = ".".join(map(str, places[best]))[:_LONGEST_PATH]
    cause = (faults[best].get("ctx") or {}).get("error")
    if isinstance(cause, FieldError):  # its message is about the value at `path`, or about a field of the value
        message, value = str(cause), faults[best].get("input")
        field = _first_name(message)
        if path and field and isinstance(value, Mapping) and field in value:
            message, field = message.replace(f"`{field}`", f"`{path}.{field}`", 1), f"{path}.{field}"
        elif path:
            message, field = f"`{path}`: {message}", path
        return ApiError(400, message, param=field, code="invalid_value")
    faults_there = [fault for fault, place in zip(faults, places, strict=True) if place == places[best]]
    message = predicate(faults[best], faults_there) or "cannot be taken"
    return ApiError(400, f"{f'`{path}`' if path else 'the body'} {message}", param=path or None, code="invalid_value")


def predicate(fault: Mapping[str, Any], faults: Sequence[Mapping[str, Any]]) -> str | None:
    """What is wrong with a value that has these faults, `fault` among them; None for an unknown kind of fault."""
    if fault["type"] in _TYPES:
        expected = [_TYPES[member["type"]].format_map(_facts(member)) for member in faults if member["type"] in _TYPES]
        return f"must be {' or '.join(dict.fromkeys(expected))}, got {_value_text(fault['input'])}"
    template = _FAULTS.get(fault["type"])
    return template and template.format_map(_facts(fault))


def place_of(fault: Mapping[str, Any], body: Any) -> Place:
    """The path in the body, without pydantic's names of union members and validators."""
    place: list[str | int] = []
    location = fault["loc"]
    *inner, last = location or ("",)
    for part in inner if fault["type"] == "missing" else location:
        if (isinstance(body, Mapping) and part in body) or (isinstance(body, list) and isinstance(part, int)):
            place.append(part)
            body = body[part]
    return (*place, last) if fault["type"] == "missing" and location else tuple(place)


def _facts(fault: Mapping[str, Any]) -> dict[str, Any]:
    """The values for a message: formatted bounds, and the input."""
    facts = fault.get("ctx", {})
    bounds = {
        name: f"{value:,}" if isinstance(value, int) else f"{value:g}"
        for name, value in facts.items()
        if isinstance(value, int | float)
    }
    unit = "characters" if isinstance(fault["input"], str) else "entries"
    place = fault["loc"][-1] if fault["loc"] else 0
    return {**facts, **bounds, "unit": unit, "place": place, "input": _value_text(fault["input"])}


def _value_text(value: Any) -> str:
    if isinstance(value, list | Mapping):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, UploadFile):
        return "a file"
    text = json.dumps(value[: _MOST_CHARACTERS + 1] if isinstance(value, str) else value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
