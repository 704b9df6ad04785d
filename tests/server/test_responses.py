"""OpenAI's responses, by openai's client: text, calls, thoughts, events, and conversations that go on."""

import json
from typing import Any

import pytest

from specdec.server.items import Conversations, ResponsesRequest
from tests.server.served import TOKENIZER, app, asking, client, model_of
from tests.server.test_thinking import model_of as thinking_model
from tests.server.test_tools import HERMES, TIME, WEATHER
from tests.server.test_tools import model_of as tool_model

PATH, CHATS = "/v1/responses", "/v1/chat/completions"
FLAT = [{"type": "function", **tool["function"]} for tool in (WEATHER, TIME)]
PLAIN = {"max_output_tokens": 8, "temperature": 0}


def openai_of(http: Any) -> Any:
    openai = pytest.importorskip("openai")
    return openai.AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none", http_client=http)


async def test_a_text() -> None:
    """It is the chat's, whole and streamed, and openai's client joins its events. (The path was a 404.)"""
    async with client(app(model_of("suffix"))) as c:
        how: dict[str, Any] = {"model": "text", "input": "hello", "instructions": "be brief", **PLAIN}
        whole = await openai_of(c).responses.create(**how, text={"verbosity": "low"}, reasoning={"effort": "low"})
        stream = await openai_of(c).responses.create(**how, stream=True)
        events = [event async for event in stream]
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
        chat = (await c.post(CHATS, json={"messages": messages, "max_tokens": 8, "temperature": 0})).json()
    assert whole.output_text == chat["choices"][0]["message"]["content"]
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == 8
    assert whole.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert [event.sequence_number for event in events] == [*range(1, len(events) + 1)]
    assert events[-1].response.output_text == whole.output_text
    assert events[2].item.content == []
    [message], part = whole.output, events[3].part
    assert (message.id[:4], message.content[0].annotations, part.annotations) == ("msg_", [], [])


async def test_calls() -> None:
    """A call, whole and streamed; its result goes on from the response that called, or from the items themselves."""
    model = tool_model(HERMES)
    async with client(app(model)) as c:
        openai_client = openai_of(c)
        how: dict[str, Any] = {"model": "text", "tools": FLAT, "extra_body": {"seed": 5}, "max_output_tokens": 1600}
        choice = {"type": "function", "name": "weather"}
        first = await openai_client.responses.create(input="x", tool_choice=choice, **how)
        stream = await openai_client.responses.create(input="x", tool_choice=choice, stream=True, **how)
        events = [event async for event in stream]
        [call] = first.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        short = {**how, "max_output_tokens": 4}
        again = await openai_client.responses.create(input=[result], previous_response_id=first.id, **short)
        items = [{"role": "user", "content": "x"}, *(item.model_dump() for item in first.output), result]
        same = await openai_client.responses.create(input=items, **short)
    assert (call.type, call.id[:3], call.name, first.status) == ("function_call", "fc_", "weather", "completed")
    assert {*json.loads(call.arguments)} == {"city", "days"}
    streamed = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(streamed) == call.arguments == events[-1].response.output[0].arguments
    message_call = {"id": call.call_id, "type": "function"}
    message_call["function"] = {"name": "weather", "arguments": json.loads(call.arguments)}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [message_call]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "sunny"},
    ]
    plain = [{"type": "function", "function": {"description": "", **tool["function"]}} for tool in (WEATHER, TIME)]
    plain[1]["function"]["parameters"] = {"type": "object", "properties": {}, "additionalProperties": False}
    text = model.tokenizer.apply_chat_template(messages, tools=plain, add_generation_prompt=True, tokenize=False)
    assert abs(again.usage.input_tokens - len(text)) < 8  # the order of a tool's fields
    assert again.usage.input_tokens == same.usage.input_tokens
    assert again.output_text == same.output_text


def test_thoughts_are_items() -> None:
    """With their own events; they go back with the conversation."""
    model = thinking_model(True)
    with asking(app(model)) as c:
        body = {"input": "x", "temperature": 0, "max_output_tokens": 30, "thinking_token_budget": 4, "ignore_eos": True}
        first = c.post(PATH, json=body).json()
        stream = c.post(PATH, json={**body, "stream": True}).text
        again = c.post(PATH, json={**body, "previous_response_id": first["id"]}).json()
    thoughts, message = first["output"][:2]
    assert (thoughts["type"], thoughts["id"][:3], message["type"]) == ("reasoning", "rs_", "message")
    assert 4 <= first["usage"]["output_tokens_details"]["reasoning_tokens"] < 30
    assert "event: response.reasoning_text.delta\n" in stream
    assert again["usage"]["input_tokens"] > first["usage"]["input_tokens"] + 4


def test_conversations_go_on() -> None:
    """After the last response, for its client alone, and unless it was not to be kept; instructions are not kept."""
    with asking(app(trusted_proxies=["127.0.0.1"])) as c:
        first = c.post(PATH, json={"input": "ab", "instructions": "long instructions", **PLAIN}).json()
        follow = {"input": "cd", "previous_response_id": first["id"], **PLAIN}
        second = c.post(PATH, json=follow).json()
        foreign = c.post(PATH, json=follow, headers={"x-forwarded-for": "9.9.9.9"})
        silent = c.post(PATH, json={"input": "ab", "store": False, **PLAIN}).json()
        lost = c.post(PATH, json={"input": "cd", "previous_response_id": silent["id"], **PLAIN})
    text_of_first = first["output"][0]["content"][0]["text"]
    roles = [("user", "ab"), ("assistant", text_of_first), ("user", "cd")]
    messages = [{"role": role, "content": content} for role, content in roles]
    text = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert second["usage"]["input_tokens"] == len(TOKENIZER(text)["input_ids"])
    for refused in (foreign, lost):
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "previous_response_not_found"


async def test_responses_are_read_and_forgotten() -> None:
    """By their client alone. (Both paths did not exist.)"""
    async with client(app(model_of("suffix"), trusted_proxies=["127.0.0.1"])) as c:
        responses = openai_of(c).responses
        first = await responses.create(model="text", input="ab", **PLAIN)
        assert (await responses.retrieve(first.id)) == first
        foreign = await c.get(f"{PATH}/{first.id}", headers={"x-forwarded-for": "9.9.9.9"})
        await responses.delete(first.id)
        again = await c.delete(f"{PATH}/{first.id}")
        lost = await c.post(PATH, json={"input": "cd", "previous_response_id": first.id, **PLAIN})
    for refused in (foreign, again, lost):
        assert (refused.status_code, first.id in refused.text) == (404, True)


def test_results_need_their_calls() -> None:
    """The call is an item before the result, or of the conversation that goes on. (Any result was taken.)"""
    call = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
    with asking(app(tool_model(HERMES))) as c:
        first = c.post(PATH, json={"input": [call], "tools": FLAT, **PLAIN}).json()
        bodies = [{"input": [call, result]}, {"input": [result], "previous_response_id": first["id"]}]
        bodies += [
            {"input": [result]},
            {"input": [{**result, "call_id": "call_2"}], "previous_response_id": first["id"]},
        ]
        answers = [c.post(PATH, json={**body, "tools": FLAT, **PLAIN}) for body in bodies]
    assert [answer.status_code for answer in answers] == [200, 200, 400, 400]
    for answer, id in zip(answers[2:], ("call_1", "call_2"), strict=True):
        error = answer.json()["error"]
        assert (error["param"], f"no call '{id}' before its result" in error["message"]) == ("input", True)


def test_predictions() -> None:
    """Their tokens are counted. (They left no trace.)"""
    body = {"input": "x", "temperature": 0, "max_output_tokens": 24, "logit_bias": {"70": 100}}
    prediction = {"type": "content", "content": TOKENIZER.decode([70]) * 24}
    with asking(app(model_of("none"))) as c:
        plain, same = (c.post(PATH, json={**body, **more}).json() for more in ({}, {"prediction": prediction}))
    assert same["output"][0]["content"] == plain["output"][0]["content"]
    details = [answer["usage"]["output_tokens_details"] for answer in (plain, same)]
    assert details[0]["accepted_prediction_tokens"] == 0
    assert details[1]["accepted_prediction_tokens"] > 0


def test_conversations_are_bounded() -> None:
    """The oldest goes, by number and by characters."""
    conversations = Conversations()
    small = ResponsesRequest.model_validate({"input": "a"}).after([])
    for number in range(300):
        conversations.keep("me", small, {"id": str(number)}, [])
    assert len(conversations.find("me", "299")) == 1
    with pytest.raises(Exception, match="no response"):
        conversations.find("me", "9")
    large = ResponsesRequest.model_validate({"input": "a" * 2**24}).after([])
    conversations.keep("me", large, {"id": "large"}, [])
    assert conversations.find("me", "large")
    with pytest.raises(Exception, match="no response"):
        conversations.find("me", "299")


def test_forms_of_text() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [5]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "s", "schema": schema, "strict": True}
    with asking(app()) as c:
        body = {"input": "x", "text": {"format": form}, "max_output_tokens": 60, "seed": 1}
        response = c.post(PATH, json=body).json()
    assert json.loads(response["output"][0]["content"][0]["text"]) == {"a": 5}
    assert response["status"] == "completed"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"type": "web_search_call"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "a"}]}]}, "input.0"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "["}]}, "input.0"),
    ({"input": "x", "messages": [{"role": "user", "content": "x"}]}, "messages"),
    ({"input": "x", "n": 2}, "n"),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"input": "x", "background": True}, "background"),
    ({"input": "x", "max_output_tokens": -2}, "max_output_tokens"),
]


@pytest.mark.parametrize(("body", "param"), WRONG)
def test_what_is_refused(body: dict[str, Any], param: str) -> None:
    with asking(app()) as c:
        response = c.post(PATH, json=body)
    assert response.status_code == 400, response.text
    assert str(response.json()["error"]["param"]).startswith(param), response.text
