"""What a client is told of a request that does not go: a sentence in its own words, about a field that it knows."""

import json
import logging
import re
import time
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from specdec.server import messages, protocol
from specdec.server.errors import ApiError, invalid
from specdec.server.items import ResponsesRequest
from specdec.server.messages import Sent
from specdec.server.protocol import (
    HINTS,
    REFUSED,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    InfillRequest,
    TokenizeRequest,
)
from specdec.server.routes import audio as audio_routes
from tests.matrix import slow
from tests.server.served import app, asking, events, model_of, recording, speech_model

Path = tuple[str | int, ...]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "x"}]
IMAGE = {"url": "data:image/png;base64,"}
JSON = {"Content-Type": "application/json"}
BASES: dict[type[BaseModel], dict[str, Any]] = {
    CompletionRequest: {"prompt": "abc"},
    InfillRequest: {"input_prefix": "abc"},
    ChatRequest: {"messages": MESSAGES},
    ResponsesRequest: {"input": MESSAGES},
    TokenizeRequest: {"prompt": "abc"},
    DetokenizeRequest: {"tokens": [1]},
}
BAD: list[Any] = [
    0, -1, 5, 10**9, 2**70, 1.5, -0.5, 1e300, float("nan"), True, "", "x", "yes", "0.5", "a" * 300, "a" * 70_000,
    "\ud800", [], [[]], [5], [-1], ["a", 5], ["a", "\ud800"], ["a"] * 2000, [["a"] * 100], [None], [True], [{}],
    [{"type": "image_url"}], [{"type": "\ud800"}], [{"role": "tool", "content": "x"}], [{"role": ["tool"]}],
    [{"role": "user", "tool_calls": [{}]}], [{"role": "user", "refusal": "no"}], {"\ud800": 1},
    [{"role": "user", "content": [{"type": "text", "text": 5}]}], {}, {"x": 1}, {"x": None}, {"1": "x"}, {"1": 1e9},
    {"a" * 5000: 1}, {"enable_thinking": 5}, {"type": "json_schema"}, {"type": "text", "json_schema": {"name": "x"}},
]  # fmt: skip
INSIDES = re.compile(
    r"function-|0x[0-9a-f]|functools|<class|\bdict|\blist\[|\bstr\b|\bint\b|\bfloat\b|\bNone\b|\bTrue\b|\bFalse\b|instance|"
    r"Input should|valid (string|integer|number|boolean|list)|Value error|Expected|Error\b|cannot be taken|do_sample|"
    r"sequence_bias|num_return|new_tokens|force_words|assistant_model|Drafter|LanguageModel|\{\w*\}"
)


def inner(annotation: Any, place: Path = ()) -> Iterator[tuple[Path, type[BaseModel]]]:
    """The objects that a field may hold, and where in it they are."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield place, annotation
    elif get_origin(annotation) is not Literal:
        for part in get_args(annotation):
            yield from inner(part, (0,) if get_origin(annotation) is list else place)


def paths(model: type[BaseModel]) -> Iterator[tuple[Path, list[type[BaseModel]]]]:
    """Where a value can stand in a request, and the objects that it stands in."""
    for name, field in model.model_fields.items():
        name_of_client = field.alias or name
        yield (name_of_client,), [model]
        for place, part in inner(field.annotation):
            for rest, models in paths(part):
                yield (name_of_client, *place, *rest), [model, *models]


def body_with(path: Path, models: list[type[BaseModel]], value: Any) -> dict[str, Any]:
    """A request that is sound but for one value."""
    (name, *rest), (model, *others) = path, models
    required = {key: field.annotation for key, field in model.model_fields.items() if field.is_required()}
    body = {key: get_args(kind)[0] if get_origin(kind) is Literal else "x" for key, kind in required.items()}
    body = BASES.get(model, body)
    if not rest:
        return {**body, str(name): value}
    is_list = rest[0] == 0
    below = body_with(tuple(rest[is_list:]), others, value)
    return {**body, str(name): [below] if is_list else below}


def fields(*models: type[BaseModel]) -> set[str]:
    """All names that a client may write."""
    names = {str(part) for model in models for path, _ in paths(model) for part in path}
    return names | {*REFUSED, *HINTS}


def check(error: ApiError, body: Any, names: set[str]) -> None:
    """A sentence about something that the client sent, or should have."""
    message, param = error.message, error.param
    assert not INSIDES.search(message), message
    assert len(message) < 500, message
    assert param is not None, message
    *parents, last = param.split(".")
    at: Any = body
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at[part]
    there = int(last) < len(at) if isinstance(at, list) else last in at or any(key.startswith(last) for key in at)
    assert there or last in names, (message, param)
    for name in re.findall(r"`([\w.]+)`", message):
        assert name == param or {*name.split(".")} <= names, message


def test_every_validator_speaks_to_clients() -> None:
    """Every field of every request with every kind of wrong value; messages held addresses and pydantic's own words."""
    refused = 0
    for model in BASES:
        client_names = fields(model)
        for path, models in paths(model):
            for value in BAD:
                body = body_with(path, models, value)
                try:
                    model.model_validate(body)
                except ValidationError as wrong:
                    check(invalid([dict(fault) for fault in wrong.errors()], body), body, client_names)
                    refused += 1
    assert refused > 2000
    names = {**vars(messages), **vars(protocol)}.values()
    models_of_clients = {one for one in names if isinstance(one, type) and issubclass(one, Sent)}
    walked = {model for base in BASES for _, models in paths(base) for model in models}
    assert models_of_clients - walked == {Sent, protocol.Generate}


SAID: list[tuple[dict[str, Any], str, str]] = [
    ({"stop": ["a"] * 65}, "stop", "`stop` may have 64 entries at most"),
    ({"stop": 5}, "stop", "`stop` must be text or a list, got 5"),
    ({"stop": ["a", 5]}, "stop.1", "`stop.1` must be text, got 5"),
    ({"prompt": [-1]}, "prompt.0", "`prompt.0` must be at least 0, got -1"),
    ({"prompt": None}, "prompt", "`prompt` is needed: pass it"),
    ({"temperature": "0.5"}, "temperature", '`temperature` must be a number, got "0.5"'),
    ({"early_stopping": "x"}, "early_stopping", "true or false or 'never' or 'exhaustive'"),
    ({"stop_token_ids": [1, 999]}, "stop_token_ids", "`stop_token_ids` must be below 259"),
    ({"prompt": "a" * 600}, "prompt", "this model's context is 512 tokens"),
    ({"n": 2, "penalty_alpha": 0.6, "top_k": 4}, "n", "`n` above 1 needs a `temperature` above 0 or `num_beams`"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens", "`min_tokens`=9 is more than `max_tokens`=5"),
    ({"min_tokens": 17}, "min_tokens", "`min_tokens`=17 is more than `max_tokens`=16"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "`structured_outputs.regex`"),
    ({"structured_outputs": {"choice": ["a"]}, "guided_regex": "a"}, "guided_regex", "`structured_outputs.choice`"),
    ({"guided_choice": ["a"], "min_tokens": 5, "temperature": 0}, None, "no token is left to choose"),
    ({"guided_choice": ["a"], "min_tokens": 5, "temperature": 1}, None, "no token is left to choose"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "image_url": IMAGE}]}]},
        "messages.0.content.0.text",
        "a part of type 'text' has a field `messages.0.content.0.text`, and no other",  # the type's name stays
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields_", "param", "words"), SAID)
def test_what_is_said(fields_: dict[str, Any], param: str, words: str) -> None:
    path, base = (CHATS, {}) if "messages" in fields_ else (COMPLETIONS, {"prompt": "abc"})
    with asking(app()) as c:
        answer = c.post(path, json={**base, **fields_})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


# Bounds, where a huge `n` froze the loop and negative numbers went through (CVE-2026-21869); forms that are none, of
# which nothing is fetched.
COMPLETIONS_WRONG: list[dict[str, Any]] = [
    {"n": 10**9}, {"n": 17}, {"n": 0}, {"n": -1}, {"max_tokens": 10**12}, {"max_tokens": -2},
    {"max_tokens": 1.5}, {"logprobs": 10**6}, {"logprobs": -1}, {"num_beams": 10**9}, {"num_beams": 17},
    {"num_samples": 10**7}, {"top_k": -2}, {"top_k": 2**64}, {"top_p": -1}, {"top_p": 1.1}, {"temperature": -1},
    {"temperature": 99}, {"min_tokens": -5}, {"seed": 2**70}, {"seed": -(2**70)}, {"frequency_penalty": 9},
    {"num_assistant_tokens": 10**6}, {"num_assistant_branches": 10**6}, {"repetition_penalty": 0},
    {"no_repeat_ngram_size": -1}, {"logit_bias": {"-1": 1}}, {"logit_bias": {"99999": 1}}, {"logit_bias": {"1": 1e9}},
    {"logit_bias": {"²": 1}}, {"prompt": [-1]}, {"prompt": [2**40]}, {"prompt": [99_999]}, {"prompt": []},
    {"prompt": [[]]}, {"prompt": ["a"] * 17}, {"prompt": "a" * 600}, {"stop": ["a"] * 65}, {"stop": "a" * 300},
    {"prompt": "\ud800"}, {"length_penalty": 1e9, "num_beams": 2}, {"penalty_alpha": 2},
    *({"temperature": float(one)} for one in ("nan", "inf", "-inf")), {"guided_regex": "("},
    {"guided_json": "{"}, {"guided_json": {"type": "no-such-type"}},
    {"guided_json": {"$ref": "http://10.0.0.1/schema"}}, {"structured_outputs": {"structural_tag": "x"}},
    {"structured_outputs": ["yes", "no"]}, {"structured_outputs": {"json_": {"type": "integer"}}},
    {"structured_outputs": {"choice": ["yes"]}, "guided_choice": ["yes"]},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
]  # fmt: skip


# Tools, images, templates of clients (CVE-2025-62426), addresses to fetch (CVE-2026-0599), and contradictions.
CHATS_WRONG: list[dict[str, Any]] = [
    {"tools": [{"type": "function"}]}, {"tool_choice": "required"}, {"functions": [{}]}, {"modalities": ["audio"]},
    {"chat_template": "{{ 7 * 7 }}"}, {"chat_template_kwargs": {"tools": []}},
    {"chat_template_kwargs": {"chat_template": "x"}}, {"suffix": "x"}, {"best_of": 3},
    {"messages": [{"role": "tool", "content": "x"}]}, {"messages": []}, {"messages": [{"role": "root", "content": ""}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/x"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
    {"no_such_field": 1}, {"max_tokens": -2}, {"stream_options": {"include_usage": True}}, {"top_logprobs": 3},
    {"logprobs": 3}, {"response_format": {"type": "json_schema"}}, {"response_format": {"type": "xml"}},
    {"guided_regex": "a", "guided_json": {}}, {"max_tokens": 3, "max_completion_tokens": 3},
    {"add_generation_prompt": True, "continue_final_message": True},
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "base", "wrong"),
    [(COMPLETIONS, {"prompt": "abc"}, COMPLETIONS_WRONG), (CHATS, {"messages": MESSAGES}, CHATS_WRONG)],
    ids=["completions", "chats"],
)
def test_what_does_not_go_is_said(path: str, base: dict[str, Any], wrong: list[dict[str, Any]]) -> None:
    """Each is a 400, at once, and nothing is ignored; what changes nothing is taken."""
    neutral = {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "n": 1}
    names = fields(CompletionRequest, ChatRequest)
    with asking(app()) as c:
        for more in wrong:
            body = {**base, "max_tokens": 4, **more}
            answer = c.post(path, content=json.dumps(body), headers=JSON)
            assert answer.status_code == 400, (more, answer.text)
            error = answer.json()["error"]
            assert {*error} == {"message", "type", "param", "code"}
            check(ApiError(400, error["message"], param=error["param"]), body, names)
        assert c.post(path, json={**base, "max_tokens": 2, **neutral}).status_code == 200


BROKEN = {
    b"": "the body is needed",
    b'{"model":': "the body is not JSON",
    b'{"prompt": "a", "prompt': "the body is not JSON",
    b"{}" * 10: "the body is not JSON",
    b"[]": "the body must be an object, got a list",
    b"null": "the body must be an object, got null",
    b"1": "the body must be an object",
    b'"a"': "the body must be an object",
    b"\xff\xfe": "the body is not JSON",
    b'{"prompt": "\xff"}': "JSON in UTF-8",
    b"[" * 100_000: "nest it less",
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/tokenize", "/detokenize"])
def test_bodies_that_are_none(path: str) -> None:
    """Broken JSON, other types, depth without end: a 400, never a 500.

    (The place where JSON broke was told as a field, and a list as a dictionary.)
    """
    with asking(app()) as c:
        for body, words in BROKEN.items():
            answer = c.post(path, content=body, headers=JSON)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, None), body[:20]
            assert words in answer.json()["error"]["message"]
        assert "this method" in c.get(path).json()["error"]["message"]
        assert "this path does not exist" in c.get("/v2").json()["error"]["message"]


ODD: list[dict[str, Any]] = [
    {"n": 2}, {"n": 4}, {"logit_bias": {"99999": 1}}, {"logit_bias": {"x": 1}}, {"min_tokens": 9}, {"num_beams": 3},
    {"num_beams": 4, "num_beam_groups": 2}, {"num_beam_groups": 2}, {"diversity_penalty": 0.5}, {"constraints": ["ok"]},
    {"num_beams": 2, "constraints": ["ok"]}, {"num_samples": 2}, {"ranking": "sum"}, {"penalty_alpha": 0.6, "top_k": 4},
    {"penalty_alpha": 0.6}, {"sampling": "block"}, {"schedule": "cost"}, {"num_assistant_branches": 3},
    {"assistant_confidence_threshold": 0.3, "schedule": "cost"}, {"prediction": {"type": "content", "content": "a"}},
    {"logprobs": 3}, {"speculate": False}, {"length_penalty": 2.0}, {"early_stopping": True},
    {"early_stopping": "never"}, {"typical_p": 0.5}, {"min_p": 0.1}, {"top_p": 0}, {"prompt": [1, 259]},
    {"max_tokens": 5000}, {"guided_regex": "("},
    {"constraints": ["a", "ab"], "num_beams": 2}, {"guided_json": "{"}, {"temperature": 0}, {"temperature": 0.7},
]  # fmt: skip


@pytest.mark.parametrize("draft", ["suffix", slow("none"), slow("model")])
def test_options_that_do_not_go_together(draft: str) -> None:
    """The library's errors name its own options: `num_return_sequences`, `do_sample`, `sequence_bias`, and drafts."""
    names, refused = fields(CompletionRequest), 0
    with asking(app(model_of(draft))) as c:
        for at, options in enumerate(ODD):
            for other in ({}, *ODD[:at:3]):
                body = {"prompt": "abc", "max_tokens": 4, **options, **other}
                answer = c.post(COMPLETIONS, json=body)
                if answer.status_code != 200:
                    assert answer.status_code == 400, answer.text
                    error = answer.json()["error"]
                    check(ApiError(400, error["message"], param=error["param"]), body, names)
                    refused += 1
    assert refused > 100


def absent(model: type[BaseModel]) -> dict[str, Any]:
    """A request in which everything that may be absent is null."""
    nulls = {str(path[0]): None for path, _ in paths(model) if len(path) == 1}
    return {**nulls, **dict.fromkeys((*REFUSED, *HINTS)), **BASES[model]}


def test_null_means_absent() -> None:
    """Everywhere: in the body, in messages, in objects within objects; only a schema keeps its own.

    A message as openai's client hands it out goes back: its empty fields, `annotations` for one, were a 400.
    """
    nothing = {"include_usage": None, "continuous_usage_stats": None, "include_obfuscation": None}
    message = {**dict.fromkeys(("name", "annotations", "audio", "function_call", "refusal")), **MESSAGES[0]}
    answer = {**message, "role": "assistant", "annotations": []}
    schema = {"type": "object", "properties": {"a": {"enum": [None]}}, "required": ["a"], "additionalProperties": False}
    json_schema = {"name": "a", "description": None, "strict": None, "schema": schema}
    nested: dict[str, Any] = {
        "messages": [message, {**message, "role": "assistant", "content": None}, message, {**answer, "tool_calls": []}],
        "logit_bias": {"5": None},
        "chat_template_kwargs": {"enable_thinking": None},
        "prediction": {"type": "content", "content": "a", "x": None},
        "structured_outputs": {"json": None, "regex": None},
        "response_format": {"type": "json_schema", "json_schema": json_schema},
    }
    with asking(app()) as c:
        bodies: list[tuple[str, dict[str, Any]]] = [
            (COMPLETIONS, absent(CompletionRequest)),
            (CHATS, {**absent(ChatRequest), "max_tokens": 2}),
            ("/tokenize", absent(TokenizeRequest)),
            ("/detokenize", absent(DetokenizeRequest)),
            (CHATS, {**nested, "max_tokens": 20}),
            (COMPLETIONS, {"prompt": "a", "stream": True, "stream_options": nothing}),
        ]
        answers = [c.post(path, json=body) for path, body in bodies]
    assert [reply.status_code for reply in answers] == [200] * 6, [reply.text for reply in answers]
    assert json.loads(answers[4].json()["choices"][0]["message"]["content"]) == {"a": None}
    assert all(event == "[DONE]" or "usage" not in event for event in events(answers[5].text))


MANY: list[tuple[str, dict[str, Any], str]] = [
    ("/detokenize", {"tokens": [-1] * 100_000}, "tokens.0"),
    (COMPLETIONS, {"prompt": [-1] * 100_000}, "prompt.0"),
    (COMPLETIONS, {"prompt": [[-1] * 10_000] * 10}, "prompt.0.0"),
    (COMPLETIONS, {"prompt": "a", **{f"x{i}": 1 for i in range(100_000)}}, "x0"),
    (CHATS, {"messages": [{"role": "user", "content": [{}] * 30_000}]}, "messages.0.content.0.type"),
    (CHATS, {"messages": [{**MESSAGES[0], **{f"x{i}": 1 for i in range(100)}}] * 1000}, "messages.0.x0"),
    (CHATS, {"messages": MESSAGES, "chat_template_kwargs": {f"x{i}": 1 for i in range(50_000)}}, ""),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): "x" for i in range(100_000)}}, "logit_bias"),
]


@pytest.mark.parametrize(("path", "body", "place"), MANY, ids=lambda value: str(value)[:20])
def test_many_faults_take_no_time(path: str, body: dict[str, Any], place: str) -> None:
    """The event loop stood still for 25 s over 40,000 wrong tokens: each fault was compared with all others."""
    with asking(app()) as c:
        content, began = json.dumps(body), time.process_time()
        answer = c.post(path, content=content, headers=JSON)
        seconds = time.process_time() - began
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(place)
    assert seconds < 2


def test_hints_are_dropped(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever their value: clients send them by default. The log names each once."""
    monkeypatch.setattr(protocol, "_NAMED", set())
    monkeypatch.setattr(logging.getLogger("specdec.server"), "propagate", True)
    caplog.set_level("INFO", "specdec.server")
    with asking(app()) as c:
        values = ("x", True, {"a": "b"}, 5, None)
        bodies = [{"messages": MESSAGES, "max_tokens": 4, "seed": 1, **dict.fromkeys(HINTS, one)} for one in values]
        texts = [c.post(CHATS, json=body).json()["choices"][0]["message"]["content"] for body in bodies]
    assert len({*texts}) == 1
    lines = [record.getMessage() for record in caplog.records if "is ignored" in record.getMessage()]
    assert [sum(f"`{name}`" in one for one in lines) for name in HINTS] == [1] * len(HINTS)


FORMS: list[dict[str, Any]] = [
    *({"language": one} for one in ("xx", "e" * 99, "\x00")),
    *({"temperature": one} for one in ("x", "-1", "nan", "1e999", "2")),
    *({"seed": one} for one in ("x", "-1", "1.5", str(2**70))), *({"stream": one} for one in ("x", "2")),
    *({"response_format": one} for one in ("x", "5")),
    *({"timestamp_granularities[]": one} for one in ("x", ["word", "x"], ["word"] * 9)),
    *({"prompt": one} for one in ("a" * 5000, "<|en|>", "word " * 300)), {"model": "x" * 300}, {"model": "none"},
    {"url": "http://10.0.0.1/a.wav"}, {"stream": "true", "response_format": "srt"},
    {"timestamp_granularities[]": "word"},
]  # fmt: skip
SOUNDS: list[Any] = [b"no sound", b"", recording(0.0), recording(21.0), None, "text"]


@pytest.mark.parametrize("path", ["transcriptions", "translations"])
def test_every_field_of_a_form(path: str) -> None:
    """Also where nothing or text comes in the place of a file, and of a recording that is none."""
    names = {*audio_routes.Transcribing.model_fields, "timestamp_granularities[]", "Content-Type"}
    with asking(app(speech_model())) as c:
        for fields, sound in [*((one, recording()) for one in FORMS), *(({}, one) for one in SOUNDS)]:
            text = {"x": (None, "y")} if sound is None else {"file": (None, sound)}
            files: Any = {"file": ("a.wav", sound)} if isinstance(sound, bytes) else text
            answer = c.post(f"/v1/audio/{path}", data=fields, files=files)
            assert answer.status_code == (404 if fields.get("model") == "none" else 400), (fields, answer.text)
            error = answer.json()["error"]
            check(ApiError(answer.status_code, error["message"], param=error["param"]), fields, names)


def test_a_file_in_the_place_of_a_text() -> None:
    """It is told. (The error about it failed.)"""
    with asking(app(speech_model())) as c:
        for name in ("language", "x"):
            answer = c.post("/v1/audio/transcriptions", files={"file": ("a.wav", recording()), name: ("b.wav", b"x")})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == name
