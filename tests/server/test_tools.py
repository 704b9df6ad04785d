"""Tools in chats: what the model reads of them, calls that a grammar holds, and answers that are read back."""

import json
from functools import cache
from typing import Any

import pytest
from transformers import AddedToken

from specdec import SpecGenerator
from specdec.batch.openai_files import OpenAITask
from specdec.server.answers import Answer
from specdec.server.calls import whole_calls
from specdec.server.errors import ApiError
from specdec.server.messages import Tool
from specdec.server.protocol import ChatRequest
from specdec.server.text import Started, TextDelta, TextModel
from specdec.server.tools import forms_of
from tests.folders import WIDTH, byte_tokenizer
from tests.server.served import app, asking, client
from tests.tiny import tiny

pytest.importorskip("llguidance")
HERMES, MISTRAL, LLAMA = "<tool_call>", "[TOOL_CALLS]", '{"name": function name, "parameters"'
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", 'a"}b']}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "time"}}
USER = {"role": "user", "content": "x"}
CHATS = "/v1/chat/completions"
CALLS = {  # format -> an answer with two calls (Llama: one)
    HERMES: 'Hm.\n<tool_call>\n{"name": "weather", "arguments": {"a": "}\\"{"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    MISTRAL: 'Hm. [TOOL_CALLS] [{"name": "weather", "arguments": {"a": "}\\"{"}}, {"name": "time", "arguments": {}}]',
    LLAMA: '{"name": "weather", "parameters": {"a": "}\\"{"}}',
}


def template(mark: str) -> str:
    """A chat template with tools, whose calls have a format's mark."""
    message = "{{ m['content'] }}{% if m.get('tool_calls') %}" + mark + "{{ m['tool_calls'] | tojson }}{% endif %}"
    return (
        "{% if tools %}<tools>{{ tools | tojson }}|{% endif %}"
        "{% for m in messages %}<{{ m['role'] }}{{ m.get('tool_call_id', '') }}>" + message + "|{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )


def tools(*names: str) -> list[Tool]:
    """Tools of these names."""
    return [Tool.model_validate({**TIME, "function": {"name": name}}) for name in names]


@cache
def model_of(mark: str, tokens: str = "no") -> TextModel:
    """A tiny model with a suffix draft; its marks are text, tokens, or special tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template(mark)
    if tokens != "no":
        marks = [AddedToken(one, special=tokens == "special") for one in ("<tool_call>", "</tool_call>", "<think>")]
        tokenizer.add_tokens(marks, special_tokens=tokens == "special")
    generator = SpecGenerator(
        tiny("llama", vocab=WIDTH + 3, max_position_embeddings=4096), "suffix", tokenizer=tokenizer
    )
    return TextModel("text", generator, context=4096)


def ask(model: TextModel, **fields: Any) -> Any:
    """The answer to a chat with two tools."""
    with asking(app(model)) as c:
        body = {"messages": [USER], "tools": [WEATHER, TIME], "max_tokens": 1600, "seed": 3, **fields}
        answer = c.post(CHATS, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def fits(call: Any) -> bool:
    """Whether a call keeps to its function's schema."""
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "time":
        return bool(arguments == {})
    return arguments["city"] in ("Rome", 'a"}b') and arguments["days"] in range(10) and len(arguments) == 2


def test_formats_that_are_not_read() -> None:
    assert forms_of(template(MISTRAL), "m")[0].closing == "]"
    for text, words in [
        ("{{ tools }}<tool_call>[CALL_ID]", "Mistral Small"),
        ("{{ tools }}", "form"),
        ("", "no tools"),
    ]:
        with pytest.raises(ApiError, match=words):
            forms_of(text, "m")


@pytest.mark.parametrize("tokens", ["no", "tokens", "special"])
def test_a_tool_s_name_is_guessed(tokens: str) -> None:
    """What a call must begin with is a draft, marks that are tokens of their own too, unless it is switched off."""
    choice = {"type": "function", "function": {"name": "weather"}}
    body = {"messages": [USER], "tools": [WEATHER, TIME], "tool_choice": choice, "max_tokens": 100, "temperature": 0}
    with asking(app(model_of(HERMES, tokens))) as c:
        guessed, plain = (
            c.post(CHATS, json={**body, "speculate": speculate, "return_metrics": True}).json()
            for speculate in (True, False)
        )
    [[one], [other]] = (answer["choices"][0]["message"]["tool_calls"] for answer in (guessed, plain))
    assert one["function"] == other["function"]
    figures = [answer["metrics"]["speculative_decoding"] for answer in (guessed, plain)]
    assert figures[0]["num_accepted_draft_tokens"] > 20
    assert figures[1]["num_draft_tokens"] == 0


@pytest.mark.parametrize("mark", CALLS)
def test_answers_that_must_call(mark: str) -> None:
    """They are calls alone, in the schemas of their functions; one of a named function."""
    choice = ask(model_of(mark), tool_choice="required")
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    assert all(fits(call) for call in choice["message"]["tool_calls"])
    choice_of_time = {"type": "function", "function": {"name": "time"}}
    [call] = ask(model_of(mark), tool_choice=choice_of_time)["message"]["tool_calls"]
    assert (call["function"], len(call["id"])) == ({"name": "time", "arguments": "{}"}, 9)
    assert len(ask(model_of(mark), tool_choice="required", parallel_tool_calls=False)["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("tokens", ["plain", "special"])
def test_marks_that_are_tokens(tokens: str) -> None:
    """A call that the model begins by itself keeps to the schema; other tokens beside the vocabulary may be in
    texts.
    """
    model = model_of(HERMES, tokens)
    opening, think = (str(WIDTH + place) for place in (0, 2))
    free = ask(model, logit_bias={opening: 100}, parallel_tool_calls=False)
    assert free["finish_reason"] == "tool_calls"
    assert [fits(call) for call in free["message"]["tool_calls"]] == [True]
    assert ask(model, tool_choice="required")["finish_reason"] == "tool_calls"
    thought = ask(model, logit_bias={think: 100}, max_tokens=5)["message"]
    assert "tool_calls" not in thought
    assert thought["content"] == ("<think>" * 5 if tokens == "plain" else None)


def test_stop_texts_and_calls() -> None:
    """Inside a call, it leaves no `tool_calls`; as the closing mark, no token comes after it, though it is special."""
    weather, time = ({"type": "function", "function": {"name": name}} for name in ("weather", "time"))
    cut = ask(model_of(HERMES), tool_choice=weather, stop=["city"])
    assert (cut["finish_reason"], cut["message"]["tool_calls"][0]["function"]["arguments"]) == ("stop", '{"')
    body = {"messages": [USER], "tools": [TIME], "tool_choice": time, "max_tokens": 100, "seed": 3}
    with asking(app(model_of(HERMES, "special"))) as c:
        whole, ended = (c.post(CHATS, json={**body, **more}).json() for more in ({}, {"stop": ["</tool_call>"]}))
    assert whole["choices"][0]["finish_reason"] == ended["choices"][0]["finish_reason"] == "tool_calls"
    assert ended["usage"]["completion_tokens"] < whole["usage"]["completion_tokens"]  # white space, the end token


def test_calls_in_batch_files() -> None:
    """As a server's. (They were text.)"""
    task = object.__new__(OpenAITask)
    task._model = model_of(HERMES)
    body = {"messages": [USER], "tools": [WEATHER], "tool_choice": "required", "max_tokens": 1600}
    [choice] = task.answer({"url": CHATS, "body": body}, 3)[0]["response"]["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert all(map(fits, choice["message"]["tool_calls"]))


async def test_a_conversation_with_tools() -> None:
    """By openai's client: a call, whole and streamed; its result goes back, and the model reads both."""
    openai = pytest.importorskip("openai")
    model = model_of(HERMES)
    async with client(app(model)) as c:
        openai_client = openai.AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none", http_client=c)
        how: dict[str, Any] = {"model": "text", "tools": [WEATHER], "seed": 5, "max_tokens": 1600}
        done = await openai_client.chat.completions.create(messages=[USER], tool_choice="required", **how)
        stream = await openai_client.chat.completions.create(
            messages=[USER], tool_choice="required", stream=True, **how
        )
        deltas = [chunk.choices[0] async for chunk in stream]
        message = done.choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
        messages: list[Any] = [USER, message, *results]
        again = await openai_client.chat.completions.create(messages=messages, **{**how, "max_tokens": 4})
    calls = [call for delta in deltas for call in delta.delta.tool_calls or ()]
    assert [call.index for call in calls if call.id] == [*range(len(message.tool_calls))]
    assert deltas[-1].finish_reason == done.choices[0].finish_reason == "tool_calls"
    for place, call in enumerate(message.tool_calls):
        parts = [one for one in calls if one.index == place]
        assert (parts[0].function.name, len(parts) > 3) == (call.function.name, True)
        assert "".join(one.function.arguments for one in parts) == call.function.arguments
    plain = [{**call.model_dump(), "function": {"name": "weather"}} for call in message.tool_calls]
    for one, call in zip(plain, message.tool_calls, strict=True):
        one["function"]["arguments"] = json.loads(call.function.arguments)
    read = [USER, {"role": "assistant", "content": "", "tool_calls": plain}, *results]
    text = model.tokenizer.apply_chat_template(read, tools=[WEATHER], add_generation_prompt=True, tokenize=False)
    assert again.usage.prompt_tokens == len(text)  # a byte is a token


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_deltas_of_calls(size: int) -> None:
    """A delta has one entry for a call, and none is empty between the first and the last.

    (A call's name and the beginning of its arguments were two entries, and text that may become a call was null.)
    """
    chat = ChatRequest.model_validate({"messages": [USER], "tools": [WEATHER, TIME], "stream": True})
    answer, text = Answer(chat, "m", calls=forms_of(template(HERMES), "m")), CALLS[HERMES]
    answer.take(0, Started(1))
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    deltas = [*(TextDelta(0, piece, 1) for piece in pieces), TextDelta(0, "", 1, "stop")]
    choices = [chunk["choices"][0] for delta in deltas if (chunk := answer.chunk(0, delta)) is not None]
    entries = [choice["delta"].get("tool_calls", []) for choice in choices]
    assert all(len({call["index"] for call in calls}) == len(calls) for calls in entries)
    assert all(choice["delta"] and None not in choice["delta"].values() for choice in choices[1:-1])
    assert (choices[0]["delta"]["role"], choices[-1]["finish_reason"]) == ("assistant", "tool_calls")
    functions = [call["function"] for call in whole_calls([call for calls in entries for call in calls])]
    assert functions == [{"name": "weather", "arguments": '{"a": "}\\"{"}'}, {"name": "time", "arguments": "{}"}]


def test_tools_that_nobody_may_call() -> None:
    """With 'none' the model does not read of them, and the answer is as without."""
    with asking(app(model_of(HERMES))) as c:
        body = {"messages": [USER], "max_tokens": 8, "seed": 1}
        answers = [
            c.post(CHATS, json={**body, **more}).json() for more in ({}, {"tools": [TIME], "tool_choice": "none"})
        ]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "x"}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{**TIME, "type": "x"}]}, "tools.0.type", "'function'"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "letters"),
    ({"tools": [TIME] * 2}, "tools", "one name"),
    ({"tools": [TIME] * 129}, "tools", "128 entries"),
    ({"tools": [{**TIME, "function": {"name": "f", "parameters": {"$ref": "x"}}}]}, "tools", "`tools.0.function.param"),
    (
        {"tools": [{**TIME, "function": {"name": "f", "parameters": {"type": "array"}}}]},
        "tools.0.function.parameters.type",
        "an object, by name",
    ),
    ({"tools": [{**TIME, "function": {"name": "f", "parameters": {"const": "\ud800"}}}]}, None, "half of a character"),
    ({"tools": [{**TIME, "function": {"name": "f", "description": "a" * 65_537}}]}, "tools.0.function.description", ""),
    ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "none of"),
    ({"tool_choice": "required"}, "tool_choice", "`tool_choice` needs `tools`"),
    ({"tools": [TIME], "guided_regex": "a"}, "guided_regex", "`tools` too"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", "must be 'function'"),  # (`function` was missing)
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0", "`tool_call_id`"),
    ({"messages": [USER, RESULT]}, "messages", "no call 'a'"),
    (
        {"messages": [RESULT, {"role": "assistant", "tool_calls": [CALL]}, RESULT]},
        "messages",
        "no call 'a' before its result",
    ),
    ({"messages": [{"role": "user", "tool_calls": [CALL]}]}, "messages.0.tool_calls", "assistant"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "["}}]}]},
        "messages.0.tool_calls.0.function.arguments",
        "JSON object",
    ),
]  # fmt: skip


def test_arguments_are_an_object() -> None:
    """Also where null would do: such a call was no call, but text."""
    tool = {**TIME, "function": {"name": "time", "parameters": {"type": ["null", "object"], "maxProperties": 0}}}
    choice = ask(model_of(LLAMA), tools=[tool], tool_choice="required")
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ["{}"]


def test_what_is_said_about_tools() -> None:
    with asking(app(model_of(HERMES), limits={"prompt_characters": 200_000})) as c:
        for fields, param, words in WRONG:
            body = json.dumps({"messages": [USER], "max_tokens": 4, **fields})
            answer = c.post(CHATS, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400, (fields, answer.text)
            assert answer.json()["error"]["param"] == param, answer.text
            assert words in answer.json()["error"]["message"], answer.text
    with asking(app()) as c:  # whose template has no tools
        for body in (
            {"messages": [USER], "tools": [TIME]},
            {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
        ):
            assert "takes no tools" in c.post(CHATS, json=body).json()["error"]["message"]
