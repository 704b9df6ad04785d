"""OpenAI's responses: requests as chats, and answers of chats as items and events."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from specdec.server.answers import Answer
from specdec.server.errors import ApiError, FieldError
from specdec.server.messages import Message, Name, Text, Tool, check_results
from specdec.server.protocol import ChatRequest, Length

_MOST, _CHARACTERS = 256, 2**24  # so many conversations are kept at most, with so many characters together
_ECHOED = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "store", "temperature", "top_p")
_NEW: dict[str, dict[str, Any]] = {"message": {"role": "assistant"}, "reasoning": {"summary": []}}
_PARTS: dict[str, dict[str, Any]] = {
    "message": {"type": "output_text", "annotations": []},
    "reasoning": {"type": "reasoning_text"},
}
_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def _message(item: Any) -> Any:
    """An item of `input` as a message of a chat; what is neither stays, and is refused."""
    if not isinstance(item, dict):
        return item
    match item.get("type", "message"):
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            return {"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "function": function}]}
        case "function_call_output":
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _parts(item.get("output"))}
        case "reasoning":
            parts = [part.get("text") for part in item.get("content") or () if isinstance(part, dict)]
            return {"role": "assistant", "reasoning_content": "".join(filter(None, parts))}
        case "message":
            plain = {name: value for name, value in item.items() if name not in ("type", "id", "status")}
            return {**plain, "content": _parts(item.get("content"))}
    return item


def _parts(content: Any) -> Any:
    """An item's parts as a chat has them."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("input_text", "output_text"):
            parts.append({"type": "text", "text": part.get("text")})
        elif kind == "input_image":
            url = {"url": part.get("image_url"), "detail": part.get("detail")}
            parts.append({"type": "image_url", "image_url": url})
        else:
            parts.append(part)
    return parts


def _messages(value: Any) -> Any:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return [_message(item) for item in value] if isinstance(value, list) else value


def _tool(tool: Any) -> Any:
    """A function of a request, whose fields are beside its type, as a chat has it."""
    if not isinstance(tool, dict) or tool.get("type") != "function" or "function" in tool:
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


class ResponsesRequest(ChatRequest):
    """Answers `input`, which continues the conversation of an earlier response."""

    input: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True), BeforeValidator(_messages)]
    instructions: Text | None = None
    messages: Annotated[list[Message], Field(max_length=0)] = Field(default_factory=list)
    max_output_tokens: Length | None = None
    metadata: dict[Name, Text] | None = None
    previous_response_id: Name | None = None
    store: bool = True

    @model_validator(mode="before")
    @classmethod
    def _as_a_chat(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        hints = {name for name in ("text", "reasoning") if isinstance(data.get(name), dict)}
        chat = {name: value for name, value in data.items() if name not in hints}
        if isinstance(tools := data.get("tools"), list):
            chat["tools"] = [_tool(tool) for tool in tools]
        chat["tool_choice"] = _tool(data.get("tool_choice"))
        form = data["text"].get("format") if "text" in hints else None
        if isinstance(form, dict) and form.get("type") == "json_schema":
            schema = {name: value for name, value in form.items() if name != "type"}
            form = {"type": "json_schema", "json_schema": schema}
        return chat if form is None else {**chat, "response_format": form}

    @model_validator(mode="after")
    def _is_one(self) -> ResponsesRequest:
        if self.n > 1:
            raise FieldError("`n` is not supported here: use /v1/chat/completions")
        return self

    def after(self, history: Sequence[Message]) -> ResponsesRequest:
        """The request with its whole conversation as `messages`; raises a 400 for a result without its call."""
        first = [Message(role="system", content=self.instructions)] if self.instructions else []
        try:
            messages = check_results([*first, *_joined([*history, *self.input])])
        except FieldError as error:
            raise ApiError(400, f"`input`: {error}", param="input", code="invalid_value") from None
        return self.model_copy(update={"messages": messages})


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Messages of the assistant that follow each other as one: each item was one."""
    joined: list[Message] = []
    for message in messages:
        if joined and joined[-1].role == message.role == "assistant":
            last = joined.pop()
            fields: dict[str, Any] = {
                "content": last.text + message.text or None,
                "reasoning_content": (last.reasoning_content or "") + (message.reasoning_content or "") or None,
                "tool_calls": [*(last.tool_calls or ()), *(message.tool_calls or ())] or None,
            }
            message = message.model_copy(update=fields)
        joined.append(message)
    return joined


class _Conversation(NamedTuple):
    messages: list[Message]  # up to the response
    response: dict[str, Any]
    characters: int


class Conversations:
    """The last responses with their conversations; a client finds its responses alone."""

    def __init__(self) -> None:
        self._conversations = OrderedDict[tuple[str, str], _Conversation]()

    def keep(self, client: str, request: ResponsesRequest, response: dict[str, Any], answer: Sequence[Message]) -> None:
        """Keeps a request's conversation and its answer, unless the request says not to."""
        if not request.store:
            return
        messages = [*request.messages[1 if request.instructions else 0 :], *answer]
        characters = sum(message.characters + sum(map(len, message.pictures)) for message in messages)
        self._conversations[client, response["id"]] = _Conversation(messages, response, characters + len(str(response)))
        texts = self._conversations
        while len(texts) > _MOST or (len(texts) > 1 and sum(text.characters for text in texts.values()) > _CHARACTERS):
            texts.popitem(last=False)

    def find(self, client: str, id: str | None) -> list[Message]:
        """The messages up to a response; none without an id. Raises a 404 for one that is not kept."""
        if id is None:
            return []
        if conversation := self._conversations.get((client, id)):
            return conversation.messages
        message = f"there is no response {id[:128]!r} here (the last {_MOST} are kept): pass its items in `input`"
        raise ApiError(404, message, param="previous_response_id", code="previous_response_not_found")

    def response(self, client: str, id: str, *, forget: bool = False) -> dict[str, Any]:
        """A response, whose conversation goes with `forget`; raises a 404 for one that is not kept."""
        find = self._conversations.pop if forget else self._conversations.get
        if conversation := find((client, id), None):
            return conversation.response
        raise ApiError(404, f"there is no response {id[:128]!r} here: the last {_MOST} are kept", code="not_found")


class ResponseAnswer(Answer):
    """A chat's answer as a response; `done` receives the response and its messages."""

    def __init__(
        self, request: ResponsesRequest, model: str, *, done: Callable[[Any, list[Message]], None], **how: Any
    ) -> None:
        super().__init__(request, model, **how)
        self._body, self._done = request, done
        self._items: list[dict[str, Any]] = []
        self._is_begun = self._is_open = False  # the response; its last item
        self._number, self._finish = 0, "stop"

    def whole(self) -> dict[str, Any]:
        choice = super().whole()["choices"][0]
        contents: list[dict[str, Any]] = [{"choices": [{**choice, "delta": choice["message"]}]}, {"choices": []}]
        *_, last = (event for content in contents for event in self._events(content))
        response: dict[str, Any] = last["response"]
        return response

    def last_chunk(self) -> dict[str, Any]:
        return {"choices": []}

    def event(self, content: dict[str, Any]) -> bytes:
        """The events of a chat's chunk; one without choices ends the response."""
        return b"".join(map(self._encoded, self._events(content)))

    def _encoded(self, event: dict[str, Any]) -> bytes:
        self._number += 1
        numbered = {"type": event["type"], "sequence_number": self._number, **event}
        return b"event: %s\n%s" % (event["type"].encode(), super().event(numbered))

    def _events(self, content: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if not self._is_begun:
            self._is_begun, response = True, self._response("in_progress")
            yield from ({"type": f"response.{name}", "response": response} for name in ("created", "in_progress"))
        for choice in content["choices"]:
            self._finish = choice["finish_reason"] or self._finish
            yield from self._delta_events(choice["delta"])
        if not content["choices"]:
            yield from self._close()
            response = self._final_response()
            yield {"type": f"response.{response['status']}", "response": response}

    def _delta_events(self, delta: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a chat's delta."""
        for kind, name in (("reasoning", "reasoning_content"), ("message", "content")):
            if text := delta.get(name):
                if not self._is_open or self._items[-1]["type"] != kind:
                    yield from self._open(kind, **_NEW[kind], content=[{**_PARTS[kind], "text": ""}])
                self._items[-1]["content"][0]["text"] += text
                yield self._item_event(f"{_PARTS[kind]['type']}.delta", delta=text)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                yield from self._open("function_call", call_id=call["id"], name=function["name"], arguments="")
            if function["arguments"]:
                self._items[-1]["arguments"] += function["arguments"]
                yield self._item_event("function_call_arguments.delta", delta=function["arguments"])

    def _open(self, kind: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Begins an item."""
        yield from self._close()
        id = f"{_IDS[kind]}_{self._id}_{len(self._items)}"
        self._items.append({"id": id, "type": kind, "status": "in_progress", **fields})
        self._is_open = True
        item = self._items[-1]
        yield self._item_event("output_item.added", item={**item, "content": []} if "content" in item else item)
        if "content" in item:
            yield self._item_event("content_part.added", part=item["content"][0])

    def _close(self) -> Iterator[dict[str, Any]]:
        """Ends the open item, if there is one."""
        if not self._is_open:
            return
        self._is_open, item = False, self._items[-1]
        item["status"] = "incomplete" if self._finish == "length" else "completed"
        if item["type"] == "function_call":
            yield self._item_event("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            [part] = item["content"]
            yield self._item_event(f"{part['type']}.done", text=part["text"])
            yield self._item_event("content_part.done", part=part)
        yield self._item_event("output_item.done", item=item)

    def _item_event(self, event: str, **fields: Any) -> dict[str, Any]:
        """An event about the last item."""
        place: dict[str, Any] = {"output_index": len(self._items) - 1}
        if not event.startswith("output_item"):
            place["item_id"] = self._items[-1]["id"]
        if "text" in event or "part" in event:
            place["content_index"] = 0
        return {"type": f"response.{event}", **place, **fields, **({"logprobs": []} if "output_text" in event else {})}

    def _response(self, status: str) -> dict[str, Any]:
        request, choice = self._body, self._body.tool_choice
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": self._items,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "parallel_tool_calls": request.parallel_tool_calls,
            "tool_choice": {"type": "function", "name": choice.function.name}
            if isinstance(choice, Tool)
            else choice or "auto",
            "tools": [{"type": "function", "strict": True, **tool.plain["function"]} for tool in request.tools or ()],
            **{name: getattr(request, name) for name in _ECHOED},
            "usage": None,
        }

    def _final_response(self) -> dict[str, Any]:
        """The whole response; its conversation may go on unless its last call is incomplete."""
        response, usage = self._response("incomplete" if self._finish == "length" else "completed"), self.usage()
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
        with suppress(ValidationError):
            self._done(response, [Message.model_validate(_message(item)) for item in self._items])
        return {**response, **self._metrics()}
