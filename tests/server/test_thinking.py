"""Thoughts of reasoning models: their own field, whole and streamed, their budget, and forms after them."""

import json
from functools import cache
from typing import Any

import pytest
from transformers import AddedToken

from specdec import SpecGenerator
from specdec.core.tree import place_after
from specdec.server.answers import Answer
from specdec.server.calls import whole_calls
from specdec.server.protocol import ChatRequest
from specdec.server.text import Started, TextDelta, TextModel
from specdec.server.thinking import ThinkingReader, thinking_of
from specdec.server.tools import forms_of
from tests.folders import WIDTH, byte_tokenizer
from tests.server.served import app, asking, events
from tests.tiny import tiny

CHATS = "/v1/chat/completions"
USER = {"role": "user", "content": "x"}
THINK, END = WIDTH, WIDTH + 1  # tokens of the marks
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|>\nSo.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>2 < 3"
)
# A template's part -> whether the prompt opens thoughts, an answer, its thoughts, and the rest.
ANSWERS: list[tuple[str, bool, str, str, str]] = [
    ("<think>", False, "<think>\nHm.\n</think>\n\n2 < 3\n", "Hm.", "2 < 3\n"),
    ("<think>", True, "Hm. a < b\n</think>\n\n2 < 3", "Hm. a < b", "2 < 3"),
    ("<think>", False, "2 < 3 </think", "", "2 < 3 </think"),
    ("<think>", False, " 2 < 3 ", "", " 2 < 3 "),
    ("<think>", True, "never ends </thin", "never ends </thin", ""),
    ("[THINK]", False, "[THINK]a[/THINK]b", "a", "b"),
    ("<|channel|>", False, HARMONY, "Hm.So.", "2 < 3"),
    ("<|channel|>", False, "<|channel|>commentary to=functions.f", "", "<|channel|>commentary to=functions.f"),
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("template", "thinks", "text", "thoughts", "rest"), ANSWERS)
def test_thoughts_are_read(template: str, thinks: bool, text: str, thoughts: str, rest: str, size: int) -> None:
    """However an answer is cut. (Thoughts were a part of `content`.)"""
    form = thinking_of(template)
    assert form is not None
    reader = ThinkingReader(form, thinks=thinks)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    parts = [reader.read(piece, last=False) for piece in pieces] + [reader.read("", last=True)]
    assert ("".join(one for one, _ in parts), "".join(one for _, one in parts)) == (thoughts, rest)
    assert thinking_of("a template") is None


@cache
def model_of(opens: bool, special: bool = True, draft: str = "suffix") -> TextModel:
    """A tiny model whose template has thoughts, and `opens` them in the prompt."""
    tokenizer = byte_tokenizer()
    marks = [AddedToken(one, special=special) for one in ("<think>", "</think>")]
    tokenizer.add_tokens(marks, special_tokens=special)
    tokenizer.chat_template = (
        "{% if tools %}<tool_call>{% endif %}{% for m in messages %}<{{ m.role }}>"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<a>" + "<think>\n" * opens + "{% endif %}"
    )
    target = tiny("llama", vocab=WIDTH + 2, max_position_embeddings=1024)
    return TextModel("text", SpecGenerator(target, draft, tokenizer=tokenizer), context=1024)


def ask(model: TextModel, **fields: Any) -> Any:
    """The answer to a chat; a stream is joined to the same form."""
    body = {"messages": [USER], "temperature": 0, "max_tokens": 40, "ignore_eos": "tools" not in fields, **fields}
    with asking(app(model)) as c:
        whole = c.post(CHATS, json=body)
        assert whole.status_code == 200, whole.text
        stream = events(c.post(CHATS, json={**body, "stream": True}).text)[:-1]
    choice = whole.json()["choices"][0]
    for name in ("content", "reasoning_content"):
        joined = "".join(event["choices"][0]["delta"].get(name) or "" for event in stream)
        assert joined == (choice["message"].get(name) or "")
    return choice


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("opens", [False, True])
def test_thoughts_have_a_budget(opens: bool, special: bool) -> None:
    """After so many tokens they close; without a budget they go on; without thoughts nothing closes."""
    model = model_of(opens, special)
    for budget in (0, 1, 5):
        bias = {} if opens else {"logit_bias": {str(THINK): 3}}
        message = ask(model, thinking_token_budget=budget, seed=1, **bias)["message"]
        if opens:
            assert len((message.get("reasoning_content") or "").encode()) <= 3 * budget
            assert message["content"]
    if opens:
        message = ask(model, logit_bias={str(END): -100})["message"]
        assert message["content"] is None
        assert message["reasoning_content"]


@pytest.mark.parametrize("draft", ["suffix", "none"])
def test_a_budget_counts_tokens(draft: str) -> None:
    """Exactly, with a draft and without."""
    model = model_of(True, True, draft)
    fields: dict[str, Any] = {"logit_bias": {str(END): -90, "70": 90}, "max_tokens": 9, "thinking_token_budget": 4}
    choice = ask(model, **fields)
    [letter] = model.tokenizer.decode([70])
    assert choice["message"]["reasoning_content"] == letter * 4
    assert choice["message"]["content"] == letter * 4
    with asking(app(model)) as c:
        body = {"messages": [USER], "temperature": 0, "speculate": draft == "none", **fields}
        counts = c.post(CHATS, json=body).json()["usage"]["completion_tokens_details"]
    assert counts["reasoning_tokens"] == 5  # with the closing mark


@pytest.mark.parametrize("size", [2, 1000])
def test_thoughts_before_a_call(size: int) -> None:
    """gpt-oss writes both in channels, of which `content` has neither name nor mark."""
    tool = {"type": "function", "function": {"name": "time"}}
    chat = ChatRequest.model_validate({"messages": [USER], "tools": [tool], "stream": True})
    answer = Answer(chat, "m", calls=forms_of("tools <|channel|>", "m"), thinking=thinking_of("<|channel|>"))
    answer.take(0, Started(1))
    text = HARMONY.replace("final", "commentary") + (
        "<|end|><|start|>assistant<|channel|>commentary to=functions.time <|constrain|>json<|message|>{}"
    )
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    deltas = [TextDelta(0, piece, 1, "stop" if at == len(pieces) - 1 else None) for at, piece in enumerate(pieces)]
    choices = [chunk["choices"][0] for delta in deltas if (chunk := answer.chunk(0, delta)) is not None]
    names = ("content", "reasoning_content")
    texts = {name: "".join(choice["delta"].get(name) or "" for choice in choices) for name in names}
    assert texts == {"content": "2 < 3", "reasoning_content": "Hm.So."}
    [call] = whole_calls([call for choice in choices for call in choice["delta"].get("tool_calls", ())])
    assert (call["function"], choices[-1]["finish_reason"]) == ({"name": "time", "arguments": "{}"}, "tool_calls")


def test_forms_follow_thoughts() -> None:
    """JSON and calls come after the thoughts that the prompt opens. (They would have stood in the thoughts.)"""
    model = model_of(True)
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {"a": {"enum": [5]}}}}}
    for fields in ({"response_format": schema}, {"guided_regex": "[0-9]{3}"}):
        message = ask(model, thinking_token_budget=6, ignore_eos=False, max_tokens=300, **fields)["message"]
        assert message["reasoning_content"]
        assert isinstance(json.loads(message["content"].lstrip("0") or "0"), dict | int)
    tool = {"type": "function", "function": {"name": "time"}}
    choice = ask(model, thinking_token_budget=6, tools=[tool], tool_choice="required", max_tokens=300)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert choice["message"]["reasoning_content"]
    assert {call["function"]["name"] for call in choice["message"]["tool_calls"]} == {"time"}


def test_thoughts_go_back_to_the_template() -> None:
    """Clients send an answer back with its thoughts, which the template may show."""
    model = model_of(False)
    message = {"role": "assistant", "content": "b", "reasoning_content": "a"}
    with asking(app(model)) as c:
        ids = c.post("/tokenize", json={"messages": [USER, message]}).json()["tokens"]
    assert model.tokenizer.decode(ids) == "<user>x<assistant><think>a</think>b<a>"


def test_where_a_part_ends() -> None:
    assert [place_after([1, 2, 1, 3, 1], part) for part in ([1, 3], [1], [], [3, 3], [1, 2, 1, 3, 1, 1])] == [
        *(4, 1, 0),
        *(None, None),
    ]
