"""pydantic's errors about a request's body as one sentence about one field."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.server.errors import ApiError, first_named

Place = tuple[str | int, ...]


class FieldError(ValueError):
    """A validator's error, whose message clients receive."""


# pydantic's type errors -> the expected type.
_KINDS = {
    "string_type": "text",
    "list_type": "a list",
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
_LONGEST = 128  # characters of a field's path
_SHOWN = 40  # characters of a value
_WEIGHED = 100  # faults that are compared, of as many as the body has values


def invalid(faults: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """A 400 about the most informative of pydantic's faults.

    A field of a union type has a fault for each member: the deepest path wins, then a wrong value over a wrong type,
    then the path with the most faults.
    """
    faults = faults[:_WEIGHED]
    places = [_place(fault, body) for fault in faults]
    times = Counter(places)

    def weight(at: int) -> tuple[int, bool, int]:
        return len(places[at]), faults[at]["type"] not in _KINDS, times[places[at]]

    best = max(range(len(faults)), key=weight)
    path = ".".join(map(str, places[best]))[:_LONGEST]
    own = (faults[best].get("ctx") or {}).get("error")
    if isinstance(own, FieldError):
        return _own(str(own), path, faults[best].get("input"))
    if faults[best]["type"] in _KINDS:
        same = [fault for fault, place in zip(faults, places, strict=True) if place == places[best]]
        expected = [_KINDS[fault["type"]].format_map(_facts(fault)) for fault in same if fault["type"] in _KINDS]
        message = f"must be {' or '.join(dict.fromkeys(expected))}, got {_shown(faults[best]['input'])}"
    else:
        message = _FAULTS.get(faults[best]["type"], "cannot be taken").format_map(_facts(faults[best]))
    return ApiError(400, f"{f'`{path}`' if path else 'the body'} {message}", param=path or None, code="invalid_value")


def _own(message: str, path: str, value: Any) -> ApiError:
    """The message of a `FieldError` about the value at `path`, which precedes the first field it names."""
    named = first_named(message)
    if path and named and isinstance(value, Mapping) and named in value:
        message, named = message.replace(named, f"{path}.{named}", 1), f"{path}.{named}"
    elif path:
        message, named = f"`{path}`: {message}", path
    return ApiError(400, message, param=named, code="invalid_value")


def _place(fault: Mapping[str, Any], body: Any) -> Place:
    """The path in the body, without pydantic's names of union members and validators."""
    found: list[str | int] = []
    location = fault["loc"]
    *inner, last = location or ("",)
    for part in inner if fault["type"] == "missing" else location:
        if (isinstance(body, Mapping) and part in body) or (isinstance(body, list) and isinstance(part, int)):
            found.append(part)
            body = body[part]
    return (*found, last) if fault["type"] == "missing" and location else tuple(found)


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
    return {**facts, **bounds, "unit": unit, "place": place, "input": _shown(fault["input"])}


def _shown(value: Any) -> str:
    if isinstance(value, list | Mapping):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value[: _SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
