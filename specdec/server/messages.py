"""What conversations hold: messages, their parts, tools and calls; texts have no half characters.

null means that a field is absent, and unknown fields are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from specdec.server.errors import FieldError

_UNKNOWN = 10  # unknown fields of an object that are checked
_TOOLS = 128
_LONGEST_NAME, _LONGEST_DESCRIPTION, _LONGEST_ARGUMENTS = 256, 65_536, 2**20
_EMPTY = ("audio", "function_call", "refusal")  # fields of answers, which clients send back


def _is_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise FieldError("the text holds half of a character (a lone surrogate): leave it out") from None
    return value


def without_nulls(data: Any) -> Any:
    """An object without its nulls; anything else as it is."""
    return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


Text = Annotated[str, AfterValidator(_is_text)]
Name = Annotated[Text, Field(max_length=_LONGEST_NAME)]


class Sent(BaseModel):
    """An object of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields = {field.alias or name for name, field in cls.model_fields.items()}
        present = without_nulls(data)
        unknown = [name for name in present if name not in fields]
        for name in unknown[_UNKNOWN:]:  # each would be a fault
            del present[name]
        return present


class TextPart(Sent):
    """A part of a text."""

    type: Literal["text"]
    text: Text


class PictureUrl(Sent):
    """A picture in a data URL; `detail` is a hint."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None

    @field_validator("url")
    @classmethod
    def _is_data(cls, url: str) -> str:
        if not url.startswith("data:image/"):
            raise FieldError("only data URLs are read (data:image/png;base64,…), and nothing is fetched")
        return url


class ContentPart(Sent):
    """A part of a message: a text, or a picture."""

    type: Literal["text", "image_url"]
    text: Text | None = None
    image_url: PictureUrl | None = None

    @model_validator(mode="after")
    def _has_its_own(self) -> ContentPart:
        if getattr(self, self.type) is None or None not in (self.text, self.image_url):
            raise FieldError(f"a part of type '{self.type}' has a field `{self.type}`, and no other")
        return self

    @property
    def plain(self) -> dict[str, Any]:
        """The part as chat templates take it."""
        if self.image_url is None:
            return {"type": "text", "text": self.text}
        return {"type": "image", "image": self.image_url.url}


TextParts = Annotated[list[TextPart], Field(fail_fast=True)]
Parts = Annotated[list[ContentPart], Field(fail_fast=True)]


def content_text(content: str | Sequence[TextPart | ContentPart]) -> str:
    """The text of a content."""
    return content if isinstance(content, str) else "".join(part.text or "" for part in content)


def _is_function_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", value):
        raise FieldError("a function's name has 1 to 64 letters, digits and '_', '-', '.'")
    return value


def _is_object(value: str) -> str:
    try:
        arguments = json.loads(value)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise FieldError("the arguments of a call are a JSON object, written as text")
    return value


def _are_parameters(value: dict[str, Any]) -> dict[str, Any]:
    kind = value.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise FieldError("the parameters of a function are an object, by name: set the schema's `type` to 'object'")
    return {"type": "object"} | value | {"type": "object"}  # the last over a list of types


FunctionName = Annotated[Text, AfterValidator(_is_function_name)]
Parameters = Annotated[dict[str, Any], AfterValidator(_are_parameters)]


class Function(Sent):
    """A function; calls always follow its schema, whatever `strict` is."""

    name: FunctionName
    description: Annotated[Text, Field(max_length=_LONGEST_DESCRIPTION)] | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class Tool(Sent):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function

    @property
    def parameters(self) -> dict[str, Any]:
        """The schema of its arguments; without one, it takes none."""
        if self.function.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return self.function.parameters

    @property
    def plain(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        function = {"name": self.function.name, "description": self.function.description or ""}
        return {"type": "function", "function": {**function, "parameters": self.parameters}}


class CalledFunction(Sent):
    """A function with the arguments of a call."""

    name: FunctionName
    arguments: Annotated[Text, Field(max_length=_LONGEST_ARGUMENTS), AfterValidator(_is_object)]


class ToolCall(Sent):
    """A call in an earlier answer; `index` is left by clients that have read a stream."""

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int, Field(ge=0, le=2**20)] | None = None

    @property
    def plain(self) -> dict[str, Any]:
        """The call as chat templates take it: its arguments are an object."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


ToolCalls = Annotated[list[ToolCall], Field(max_length=_TOOLS, fail_fast=True)]
Tools = Annotated[list[Tool], Field(max_length=_TOOLS, fail_fast=True)]


class Message(Sent):
    """A message of a conversation: text, and pictures for models that see."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Parts | None = None
    reasoning_content: Text | None = None
    name: Name | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if name != "annotations" and (value or name not in _EMPTY)}

    @model_validator(mode="after")
    def _of_its_role(self) -> Message:
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise FieldError("`tool_call_id` and the role 'tool' go together: pass both")
        if self.tool_calls and self.role != "assistant":
            raise FieldError("`tool_calls` are the assistant's: leave them out of messages of other roles")
        return self

    @property
    def text(self) -> str:
        """Its text alone."""
        return content_text(self.content or "")

    @property
    def characters(self) -> int:
        """The length of its text, thoughts and arguments of calls."""
        return (
            len(self.text)
            + len(self.reasoning_content or "")
            + sum(len(call.function.arguments) for call in self.tool_calls or ())
        )

    @property
    def pictures(self) -> list[str]:
        """The data URLs of its pictures."""
        return [part.image_url.url for part in self._parts if part.image_url is not None]

    @property
    def _parts(self) -> list[ContentPart]:
        return self.content if isinstance(self.content, list) else []

    @property
    def plain(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        content = [part.plain for part in self._parts] if self.pictures else self.text
        role = "system" if self.role == "developer" else self.role
        calls = [call.plain for call in self.tool_calls or ()] or None
        plain = {"role": role, "content": content, "tool_call_id": self.tool_call_id, "tool_calls": calls}
        return without_nulls({**plain, "reasoning_content": self.reasoning_content, "name": self.name})  # type: ignore[no-any-return]


def check_results(messages: list[Message]) -> list[Message]:
    """The messages; raises FieldError for a result whose call no earlier message has."""
    calls = set[str]()
    for message in messages:
        if message.tool_call_id is not None and message.tool_call_id not in calls:
            raise FieldError(f"there is no call {message.tool_call_id!r} before its result: pass the call too")
        calls |= {call.id for call in message.tool_calls or ()}
    return messages


Messages = Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True), AfterValidator(check_results)]
