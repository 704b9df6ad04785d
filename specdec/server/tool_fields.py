"""Functions that a chat may call, as clients send them, and the calls of its messages."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from specdec.server.errors import FieldError
from specdec.server.sent import Name, Sent, Text

MOST_CALLS = 16
"""Calls of one answer that `tool_choice` forces."""
_TOOLS = 128
_LONGEST_DESCRIPTION, _LONGEST_ARGUMENTS = 65_536, 2**20


def _is_function_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", value):
        raise FieldError("a function's name has 1 to 64 letters, digits and '_', '-', '.'")
    return value


def _is_object(value: str) -> str:
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
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
        said = {"name": self.function.name, "description": self.function.description or ""}
        return {"type": "function", "function": {**said, "parameters": self.parameters}}


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


class ToolUse(Sent):
    """A chat's fields about tools."""

    tools: Annotated[list[Tool], Field(max_length=_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _tools_agree(self) -> ToolUse:
        names, choice = [tool.function.name for tool in self.tools or ()], self.tool_choice
        if len({*names}) < len(names):
            raise FieldError("`tools` have two functions of one name: give each its own")
        if not names and choice not in (None, "none", "auto"):
            raise FieldError("`tool_choice` needs `tools`: pass them, or leave it out")
        if isinstance(choice, Tool) and choice.function.name not in names:
            raise FieldError("`tool_choice` names none of the functions in `tools`: pass it there, too")
        return self

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model reads of: none where `tool_choice` is 'none'."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def callable(self) -> list[Tool]:
        """The tools that the answer may call."""
        named = self.tool_choice.function.name if isinstance(self.tool_choice, Tool) else None
        return [tool for tool in self.offered if named in (None, tool.function.name)]

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, Tool)

    @property
    def most_calls(self) -> int:
        return MOST_CALLS if self.parallel_tool_calls and not isinstance(self.tool_choice, Tool) else 1
