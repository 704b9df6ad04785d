"""Calls in the forms of many models: read whole and in pieces, as a grammar lets them be written."""

import json
from typing import Any

import pytest

from specdec.decoding.processors.grammar import Grammar
from specdec.generator.tokenizers import decode
from specdec.options.generate import Form
from specdec.server.calls import CallReader, whole_calls
from specdec.server.messages import Tool
from specdec.server.protocol import ChatRequest
from specdec.server.tools import call_grammar, forms_of
from tests.folders import WIDTH, byte_tokenizer
from tests.matrix import slow

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "get"}},
]
QWEN = (  # the part of Qwen2.5-Coder's template about an answer with calls
    "{%- for tool in tools %}{{ tool | tojson }}{%- endfor %}"
    '{%- for tool_call in message.tool_calls %}{{- \'\\n<tool_call>\\n{"name": "\' }}{{- tool_call.name }}'
    "{{- '\", \"arguments\": ' }}{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}"
)
ARGUMENTS = '{"city": "a \\"b\\" }", "days": 2}'
XML = '<parameter=city>\na "b" }\n</parameter>\n<parameter=days>\n2\n</parameter>\n'
PAIRS = '<arg_key>city</arg_key>\n<arg_value>a "b" }</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n'
# What the template holds -> an answer with two calls, or with one.
WRITTEN = {
    QWEN: f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>',
    "tools <tool_call> <function=": f"<tool_call>\n<function=get_weather>\n{XML}</function>\n</tool_call>\n"
    "<tool_call>\n<function=get>\n</function>\n</tool_call>",
    "tools <tool_call> <arg_key>": f"<tool_call>get_weather\n{PAIRS}</tool_call>\n<tool_call>get\n</tool_call>",
    "tools [TOOL_CALLS]": f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}}}, '
    '{"name": "get", "arguments": {}}]',
    "tools [TOOL_CALLS] [ARGS]": f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]get[ARGS]{{}}",
    "tools <｜tool▁sep｜> ```json": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    f"```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n{{}}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "tools <｜tool▁sep｜>": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}"
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    'tools {"name": function name, "parameters"': f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}',
    "tools <|channel|>": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}",
}
# Calls beside a template's form.
LOOSE = [
    f'```json\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n```',
    f'```\n{{\n  "name": "get_weather",\n  "parameters": {ARGUMENTS}\n}}\n```',
    f'```json\n[{{"name": "get_weather", "arguments": {ARGUMENTS}}}, {{"name": "get", "arguments": {{}}}}]\n```',
    f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n{{"name": "get", "arguments": {{}}}}',
    f'<tools>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tools>',
    f'{{{{"name": "get_weather", "arguments": {ARGUMENTS}}}}}',  # as the template of Qwen2.5-Coder shows calls
]


def read(
    template: str, text: str, size: int, *, must: bool = False, most: int = 16
) -> tuple[str, list[tuple[str, str]], bool]:
    """Text, calls and whether they are whole, of an answer that comes in pieces of `size` characters."""
    reader = CallReader(forms_of(template, "m"), [Tool.model_validate(tool) for tool in TOOLS], must=must, most=most)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    parts = [reader.read(piece, last=False) for piece in pieces] + [reader.read("", last=True)]
    calls = whole_calls([delta for _, deltas in parts for delta in deltas])
    functions = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return "".join(text_part for text_part, _ in parts), functions, reader.are_whole


@pytest.mark.parametrize("size", [1, 3, 10_000])
@pytest.mark.parametrize("template", WRITTEN)
def test_forms_are_read(template: str, size: int) -> None:
    """However an answer is cut, its text and its calls are the same. (Only three forms were read.)"""
    written = WRITTEN[template]
    calls = [("get_weather", ARGUMENTS), ("get", "{}")]
    is_bare = "function name" in template
    expected = calls[:1] if is_bare or "channel" in template else calls
    assert read(template, written + "\n", size, must=is_bare) == ("", expected, True)
    assert read(template, f"Well.\n{written}", size, must=False) == ("Well.", expected, True)


@pytest.mark.parametrize("size", [1, 3, 10_000])
@pytest.mark.parametrize("written", LOOSE)
def test_calls_beside_the_form_are_read(written: str, size: int) -> None:
    """Fenced and bare. (They were text, in three of three answers of a real Qwen2.5-Coder.)"""
    expected = [("get_weather", ARGUMENTS), ("get", "{}")][: 1 + ('"get"' in written)]
    assert read(QWEN, written, size) == ("", expected, True)
    assert read(QWEN, f"Sure:\n\n{written}\nDone.", size) == ("Sure:\nDone.", expected, True)
    other = written.replace('"get_weather"', '"other"').replace('"get"', '"another"')
    assert read(QWEN, other, size) == (other, [], False)
    inline = f"As in {written}"
    assert not written.startswith("{") or read(QWEN, inline, size)[1] == expected[1:]


@pytest.mark.parametrize(("size", "step"), [(10_000, 1), (1, 7), slow(1, 1)])
@pytest.mark.parametrize("template", WRITTEN)
def test_unfinished_calls_are_no_text(template: str, size: int, step: int) -> None:
    """Wherever an answer is cut, `content` has no part of its calls. (It ended with half a call.)"""
    written = WRITTEN[template]
    for end in range(0, len(written), step):
        content, calls, _ = read(template, written[:end], size, must=True)
        assert (content, len(calls) <= 2) == ("", True)
        content, calls, _ = read(template, f"a < b\n{written[:end]}", size)
        assert content.rstrip() in ("a < b", f"a < b\n{written[:end]}".rstrip())
        assert content.count("get_weather") == 0


@pytest.mark.parametrize("written", LOOSE)
def test_one_call_where_one_is_wanted(written: str) -> None:
    """What follows it is neither a call nor text."""
    for size in (1, 10_000):
        assert read(QWEN, f"Sure.\n{written}", size, most=1) == ("Sure.", [("get_weather", ARGUMENTS)], True)


@pytest.mark.parametrize("size", [1, 3, 10_000])
@pytest.mark.parametrize("begin", ["", "{"])
def test_an_object_with_other_keys_is_no_call(begin: str, size: int) -> None:
    """It is text, all of it. (A call that a model repeated with the tool's answer was a call, and half of it text.)"""
    text = f'{begin}{{"name": "get_weather", "arguments": {ARGUMENTS}, "response": {{"temp": 17}}}}'
    text += "}" * len(begin)
    assert read(QWEN, text, size) == (text, [], False)
    call = '{"name": "get", "arguments": {}}'
    assert read(QWEN, f"{text}\n{call}", size) == (text, [("get", "{}")], True)


@pytest.mark.parametrize("template", WRITTEN)
@pytest.mark.parametrize(
    "text",
    [
        *("plain {text} <tool", " \n", "x <", '{"name": "gem', "```json\n{}\n```", '{"name": "get", "arguments": 3}'),
        *('{"a": 1}', '<tool_call>\n{"name": "x"', '{"name": "x", "parameters": {}}', "a [b] `c`\n", ""),
    ],
)
def test_what_is_no_call_stays_text(template: str, text: str) -> None:
    """As written, spaces too: other JSON, half a call, a function that nobody offered."""
    for size in (1, 100):
        assert read(template, text, size) == (text, [], False)


@pytest.mark.parametrize("template", WRITTEN)
def test_forms_are_written(template: str) -> None:
    """An answer that must call holds to the form and to the schema, and may end with the end of a line.

    (After `</tool_call>` and a line's end only another call could follow: seven answered one question.)
    """
    tokenizer = byte_tokenizer()
    vocabulary = pytest.importorskip("llguidance.hf").from_tokenizer(tokenizer, WIDTH)
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}

    def allowed(text: str, before: str = "", **how: Any) -> str:
        chat = ChatRequest.model_validate({**body, **how})
        source = call_grammar(forms_of(template, "m")[0], chat, {}, [2])
        grammar = Grammar(Form("grammar", source, "tools"), vocabulary)
        read, ids = (tokenizer(one, add_special_tokens=False)["input_ids"] for one in (before, text))
        ids = [*ids, tokenizer.eos_token_id]
        count = grammar.allowed(read, ids)
        return decode(tokenizer, ids[:count]) + ("$" if count == len(ids) else "")

    written = WRITTEN[template]
    for end in ("", "\n"):
        assert allowed(written + end, tool_choice="required") == f"{written}{end}$"
    wrong = written.replace("2", "x", 1)
    assert allowed(wrong, tool_choice="required") == wrong[: wrong.index("x")] if "x" in wrong else True
    assert not allowed("x", wrong, tool_choice="required")
    if forms_of(template, "m")[0].is_held:  # from the opening on, and text around it is free
        assert allowed(f"Well. {written}", tool_choice="auto") == f"Well. {written}$"
        assert allowed(f"Well. {wrong}", tool_choice="auto") == f"Well. {allowed(wrong, tool_choice='required')}"
        assert allowed("Hm, <tool and {", tool_choice="auto") == "Hm, <tool and {$"
    else:
        chat = ChatRequest.model_validate({**body, "tool_choice": "auto"})
        assert call_grammar(forms_of(template, "m")[0], chat, {}, []) is None


def test_qwens_template_reads_its_calls_back() -> None:
    """What its template writes for a call is what is read of one."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = QWEN.replace("message.", "messages[0].")
    calls = [{"name": "get_weather", "arguments": json.loads(ARGUMENTS)}, {"name": "get", "arguments": {}}]
    text = tokenizer.apply_chat_template([{"role": "assistant", "tool_calls": calls}], tools=[{}], tokenize=False)
    text = text.removeprefix("{}")
    assert read(QWEN, text, 5) == ("", [("get_weather", ARGUMENTS), ("get", "{}")], True)
