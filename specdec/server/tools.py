"""Calls of tools in answers: the forms in which chat templates write them, and a grammar of each."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from specdec.server.errors import ApiError
from specdec.server.messages import Tool
from specdec.server.protocol import ChatRequest

NAME = "⟨name⟩"
"""The place of a function's name in the head of a call."""


@dataclass(frozen=True)
class CallForm:
    """The text of calls: `opening` once, then for each call `head`, its arguments and `tail`, at last `closing`.

    `⟨name⟩` in the head is the function's name, and `between` stands between two calls. The arguments are a JSON
    object; with `pairs`, three texts around each name and value. `mark`: a text that only calls hold; a grammar holds
    what follows it where it begins a call. `is_one`: an answer has no second call.
    """

    mark: str
    head: str
    tail: str = ""
    opening: str = ""
    between: str = "\n"
    closing: str = ""
    pairs: tuple[str, str, str] | None = None
    is_one: bool = False

    @property
    def text(self) -> str:
        """All that a call writes beside names and values."""
        return "".join((self.opening, self.head, *(self.pairs or ()), self.tail, self.closing))

    @property
    def is_held(self) -> bool:
        """Whether a call that the model begins by itself is held by a grammar."""
        return bool(self.mark) and (self.opening + self.head).startswith(self.mark)


_COMMENTARY = "<|channel|>commentary"
# An expression that a chat template matches, the first that does -> the forms of its calls; grammars write the first.
_FORMS = {
    r"<arg_key>": [  # GLM
        CallForm(
            "<tool_call>", f"<tool_call>{NAME}\n", "</tool_call>",
            pairs=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        )
    ],
    r"<function=": [  # Qwen3-Coder
        CallForm(
            "<tool_call>", f"<tool_call>\n<function={NAME}>\n", "</function>\n</tool_call>",
            pairs=("<parameter=", ">\n", "\n</parameter>\n"),
        ),
        CallForm("<function=", f"<function={NAME}>\n", "</function>", pairs=("<parameter=", ">\n", "\n</parameter>\n")),
    ],
    r"\[ARGS\]": [CallForm("[TOOL_CALLS]", f"[TOOL_CALLS]{NAME}[ARGS]", between="")],  # newer Mistral models
    r"\[TOOL_CALLS\]": [  # Mistral
        CallForm("[TOOL_CALLS]", f'{{"name": "{NAME}", "arguments": ', "}", "[TOOL_CALLS] [", ", ", "]")
    ],
    r"<｜tool▁sep｜>.*```json": [  # DeepSeek V3 and R1
        CallForm(
            "<｜tool▁calls▁begin｜>",
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n", "\n```<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>",
        )
    ],
    r"<｜tool▁sep｜>": [  # DeepSeek V3.1
        CallForm(
            "<｜tool▁calls▁begin｜>",
            f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>",
        )
    ],
    r"<\|channel\|>": [  # gpt-oss, whose calls an end token ends
        CallForm("to=functions.", f"{head}<|message|>", is_one=True)
        for head in (
            f"{_COMMENTARY} to=functions.{NAME} <|constrain|>json",
            f"{_COMMENTARY} to=functions.{NAME} json",
            f"{_COMMENTARY} to=functions.{NAME}",
            f" to=functions.{NAME}{_COMMENTARY} <|constrain|>json",
            f" to=functions.{NAME}{_COMMENTARY} json",
        )
    ],
    r"<tool_call>": [  # Hermes, Qwen
        CallForm("<tool_call>", f'<tool_call>\n{{"name": "{NAME}", "arguments": ', "}\n</tool_call>")
    ],
    r'\{"name": function name, "parameters"': [  # Llama 3
        CallForm("", f'{{"name": "{NAME}", "parameters": ', "}", is_one=True)
    ],
}  # fmt: skip


LOOSE_FORMS = [
    CallForm('"name"', f'{{"name": "{NAME}", "{key}": ', *rest)
    for begin, end in (("```json\n", "\n```"), ("```\n", "\n```"), ("<tools>\n", "\n</tools>"), ("{", "}"), ("", ""))
    for key in ("arguments", "parameters")
    for rest in (("}" + end, begin), ("}", begin + "[", ", ", "]" + end))
]
"""Calls that models write beside the form of their template, each at the beginning of a line."""
_UNREAD = {  # -> who writes calls like this
    "[CALL_ID]": "Mistral Small 3.2",
    "<|tool_calls_section_begin|>": "Kimi",
    "<|tool_call_start|>": "LFM2",
    "<|tool_call|>": "Granite and Phi",
}


def forms_of(template: str, model: str) -> list[CallForm]:
    """The forms that a chat template writes calls in; raises a 400 where it has none that is known here."""
    check_takes_tools(template, model, "tools")
    way = "leave `tools` out, or describe the answer with `response_format`"
    if unread := next((f"{mark!r}, as {who}" for mark, who in _UNREAD.items() if mark in template), None):
        message = f"the model {model!r} writes calls with {unread}, which are not read here: {way}"
        raise ApiError(400, message, param="tools")
    forms = next((forms for mark, forms in _FORMS.items() if re.search(mark, template, re.DOTALL)), None)
    if forms is None:
        message = f"the chat template of {model!r} writes calls in a form that is not read here: {way}"
        raise ApiError(400, message, param="tools")
    return forms


def check_takes_tools(template: str, model: str, param: str) -> None:
    """Raises a 400 for a chat template without tools."""
    if not re.search(r"\btools\b", template):
        message = f"the chat template of {model!r} takes no tools: leave tools, calls and their results out"
        raise ApiError(400, message, param=param)


def call_grammar(form: CallForm, chat: ChatRequest, marks: Mapping[str, int], ends: Collection[int]) -> str | None:
    """The grammar of an answer in Lark's notation, where llguidance has one of free text with calls; else None.

    `marks`: the tokens beside the vocabulary proper, which no text of a grammar matches; `ends` are among them.
    """
    if not chat.must_call and not form.is_held:
        return None
    rules, begin = _Rules(marks), form.mark if form.is_held else ""
    most = 1 if form.is_one else chat.most_calls
    first = rules.quoted(begin)
    if chat.must_call:
        again = f"({rules.quoted(form.between)} calls)~0..{most - 1}"
        rules.add("start", f"calls {'' if form.opening else again} AFTER?")
        rules.add("AFTER", r"/[ \n]{1,2}/")  # models write a line's end before their end token
    else:
        tokens = [str(token) for name, token in marks.items() if token not in ends and name != begin]
        free = f"TEXT | <[{','.join(tokens)}]>" if tokens else "TEXT"
        rules.add("start", f"({free})* calls?" if form.opening or most == 1 else f"(calls | {free})*")
        rules.add("TEXT", r"/(.|\n)+/")
        if begin not in marks:
            rules.add("open[lazy]", f"/(.|\\n)*/ {first}")
            first = "open"
    repeat = f"({rules.quoted(form.between)} call)~0..{most - 1}" if form.opening else ""
    rules.add("calls", f"{first} {rules.quoted(form.opening[len(begin) :])} call {repeat} {rules.quoted(form.closing)}")
    rules.add("call", " | ".join(f"call_{place}" for place in range(len(chat.callable))))
    head = form.head if form.opening else form.head[len(begin) :]
    for place, tool in enumerate(chat.callable):
        rules.add(f"call_{place}", rules.call(form, head.replace(NAME, tool.function.name), tool, place))
    return str(rules)


class _Rules:
    """Rules of a grammar; `marks` are the tokens that no text of it matches."""

    def __init__(self, marks: Mapping[str, int]) -> None:
        self._marks, self._rules = marks, list[str]()
        self._split = re.compile("|".join(f"({re.escape(mark)})" for mark in marks) or r"(?!)")

    def __str__(self) -> str:
        return "\n".join(self._rules)

    def add(self, name: str, rule: str) -> None:
        self._rules.append(f"{name}: {rule}")

    def quoted(self, text: str) -> str:
        """A text, with the tokens of the marks in it; tokenizers of SentencePiece may leave out its first blank."""
        blank = '" "? ' if text.startswith(" ") else ""
        parts = filter(None, self._split.split(text.removeprefix(" ")))
        rules = (f"<[{self._marks[part]}]>" if part in self._marks else json.dumps(part) for part in parts)
        return blank + " ".join(rules)

    def call(self, form: CallForm, head: str, tool: Tool, place: int) -> str:
        """The rule of a call that begins with `head`."""
        if form.pairs is None:
            return f"{self.quoted(head)} {_json(tool.parameters)} {self.quoted(form.tail)}"
        pairs, required = [], tool.parameters.get("required", ())
        defs = {name: value for name, value in tool.parameters.items() if name in ("$defs", "definitions")}
        for number, (key, schema) in enumerate(tool.parameters.get("properties", {}).items()):
            name = f"pair_{place}_{number}"
            self.add(name, self._pair(form.pairs, name, key, schema, defs))
            pairs.append(name + ("" if key in required else "?"))
        return f"{self.quoted(head)} {' '.join(pairs)} {self.quoted(form.tail)}"

    def _pair(self, pairs: tuple[str, str, str], name: str, key: str, schema: Any, defs: Mapping[str, Any]) -> str:
        """The rule of a name with its value, which is bare for a text and JSON for anything else."""
        before, end = self.quoted(f"{pairs[0]}{key}{pairs[1]}"), self.quoted(pairs[2])
        if not is_text(schema):
            return f"{before} {_json({**defs, **schema} if isinstance(schema, dict) else defs)} {end}"
        if "enum" in schema:
            return f"{before} ({' | '.join(map(self.quoted, schema['enum']))}) {end}"
        if end.startswith("<["):
            return f"{before} /(.|\\n)*/ {end}"
        self.add(f"{name}_value[lazy]", f"/(.|\\n)*/ {end}")
        return f"{before} {name}_value"


def _json(schema: Mapping[str, Any]) -> str:
    """A value's JSON, with blanks as templates write them."""
    how = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return f"%json {json.dumps({**schema, 'x-guidance': how})}"


def is_text(schema: Any) -> bool:
    """Whether a value of this schema is a text."""
    if not isinstance(schema, dict):
        return False
    values = schema.get("enum")
    return schema.get("type") == "string" if values is None else all(isinstance(value, str) for value in values)


class MarkedTokenizer:
    """A tokenizer for decoding that shows `marks` (id -> text), which the model's own leaves out as special."""

    def __init__(self, tokenizer: Any, marks: Mapping[int, str]) -> None:
        self._tokenizer, self._marks = tokenizer, marks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    @property
    def all_special_ids(self) -> list[int]:
        """The tokens that texts leave out."""
        return [token for token in self._tokenizer.all_special_ids if token not in self._marks]

    def decode(self, ids: Sequence[int], **how: Any) -> str:
        runs = [(mark, list(run)) for mark, run in groupby(ids, self._marks.get)]
        return "".join(mark * len(run) if mark else self._tokenizer.decode(run, **how) for mark, run in runs)
