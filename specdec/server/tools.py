"""Calls of tools in answers: how a model's chat template writes them, a grammar of them, and reading them."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from specdec.server.errors import ApiError
from specdec.server.tool_fields import Tool, ToolUse


@dataclass(frozen=True)
class CallFormat:
    """The text of calls: `opening`, `before`, {"name": …, `key`: {…}}, `after`, `closing`.

    `is_list`: several calls share the opening, with a comma between; without an opening a call is the whole answer.
    """

    opening: str
    before: str
    key: str
    after: str
    closing: str
    is_list: bool = False


# A mark in chat templates -> the format it stands for; the first that occurs counts.
_FORMATS = {
    "[TOOL_CALLS]": CallFormat("[TOOL_CALLS]", "[", "arguments", "]", "", is_list=True),  # Mistral
    "<tool_call>": CallFormat("<tool_call>", "\n", "arguments", "\n", "</tool_call>"),  # Hermes, Qwen
    '"parameters": ': CallFormat("", "", "parameters", "", ""),  # Llama 3
}
_UNREAD = {  # -> who writes calls like this
    "<function=": "Qwen3-Coder",
    "<arg_key>": "GLM",
    "[ARGS]": "newer Mistral models",
    "<｜tool▁calls▁begin｜>": "DeepSeek",
    "<|tool_calls_section_begin|>": "Kimi",
    "<|channel|>": "gpt-oss",
    "<|START_ACTION|>": "Command",
    "<|tool_call_start|>": "LFM2",
    "<|tool_call|>": "Granite and Phi",
    "<function_calls>": "Olmo",
    "<start_function_call>": "FunctionGemma",
}


def format_of(template: str, model: str) -> CallFormat:
    """The format that a chat template writes calls in; raises a 400 where it has none that is known here."""
    check_takes_tools(template, model, "tools")
    way = "leave `tools` out, or describe the answer with `response_format`"
    if unread := next((f"{mark!r}, as {who}" for mark, who in _UNREAD.items() if mark in template), None):
        message = f"the model {model!r} writes calls with {unread}, which are not read here: {way}"
        raise ApiError(400, message, param="tools")
    found = next((form for mark, form in _FORMATS.items() if mark in template), None)
    if found is None:
        message = f"the chat template of {model!r} writes calls in a form that is not read here: {way}"
        raise ApiError(400, message, param="tools")
    return found


def check_takes_tools(template: str, model: str, param: str) -> None:
    """Raises a 400 for a chat template without tools."""
    if not re.search(r"\btools\b", template):
        message = f"the chat template of {model!r} takes no tools: leave tools, calls and their results out"
        raise ApiError(400, message, param=param)


def call_grammar(form: CallFormat, chat: ToolUse, marks: Mapping[str, int], ends: Collection[int]) -> str | None:
    """The grammar of an answer in Lark's notation, where llguidance has one of free text with calls; else None.

    `marks`: the tokens beside the vocabulary proper, which no text of a grammar matches; `ends` are among them.
    """

    def mark(text: str) -> str:
        return f"<[{marks[text]}]>" if text in marks else json.dumps(text)

    def text(text: str) -> str:
        return json.dumps(text) if text else ""

    most, forced = chat.most_calls, chat.must_call
    if not forced and not form.opening:
        return None
    more = f'(", " call)~0..{most - 1}' if form.is_list and most > 1 else ""
    closing = mark(form.closing) if form.closing else ""
    rules = [f"calls: {'open' if form.opening else ''} {text(form.before)} call {more} {text(form.after)} {closing}"]
    if form.opening in marks or forced:
        rules += [f"open: {mark(form.opening)}"] if form.opening else []
    else:
        rules.append(f"open[lazy]: /(.|\\n)*/ {mark(form.opening)}")
    if forced:
        again = f'("\\n" calls)~0..{most - 1}' if form.closing and most > 1 else ""
        rules.append(f"start: calls {again}")
    else:
        others = [str(token) for name, token in marks.items() if token not in ends and name != form.opening]
        said = f"TEXT | <[{','.join(others)}]>" if others else "TEXT"
        rules.append(f"start: ({said})* calls?" if form.is_list or most == 1 else f"start: (calls | {said})*")
        rules.append("TEXT: /(.|\\n)+/")
    rules.append("call: " + " | ".join(f"call_{place}" for place in range(len(chat.callable))))
    rules += [f"call_{place}: {_call(form, tool)}" for place, tool in enumerate(chat.callable)]
    return "\n".join(rules)


def _call(form: CallFormat, tool: Tool) -> str:
    """A call's JSON, with blanks as templates write them."""
    head = f'{{"name": {json.dumps(tool.function.name)}, "{form.key}": '
    how = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return f'{json.dumps(head)} %json {json.dumps({**tool.parameters, "x-guidance": how})} "}}"'


class MarkedTokenizer:
    """A tokenizer for decoding that shows `marks` (id -> text), which the model's own leaves out as special."""

    def __init__(self, tokenizer: Any, marks: Mapping[int, str]) -> None:
        self._tokenizer, self._marks = tokenizer, marks

    def decode(self, ids: Sequence[int], **how: Any) -> str:
        runs = [(mark, list(run)) for mark, run in groupby(ids, self._marks.get)]
        return "".join(mark * len(run) if mark else self._tokenizer.decode(run, **how) for mark, run in runs)


_HEAD = re.compile(r'[\s\[]*\{\s*"name"\s*:\s*"([\w.-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_LONGEST_HEAD, _LONGEST_TAIL = 256, 64  # characters


class CallReader:
    """Reads an answer piece by piece into text and calls; what is no call of `names` stays text, as written.

    `held`: a grammar holds the calls, so that one without an opening need not be complete to be known.
    """

    def __init__(self, form: CallFormat, names: Collection[str], *, held: bool) -> None:
        self._form, self._names, self._held = form, names, held
        end = r"[\],]" if form.is_list else re.escape(form.closing)
        self._end = re.compile(rf"\s*\}}\s*{end}")
        self._pending = self._raw = self._said = ""
        self._deltas: list[dict[str, Any]] = []
        self._depth, self._quoted, self._escaped, self._last = 0, False, False, False
        self._step = self._text if form.opening else self._bare
        self.calls = 0

    def read(self, text: str, *, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """The new text of the answer, and its new calls as OpenAI's deltas."""
        self._pending, self._said, self._deltas, self._last = self._pending + text, "", [], last
        while self._step():
            pass
        return self._said, self._deltas

    def _text(self) -> bool:
        """Text before and between calls; white space before a call is dropped."""
        opening, last = self._form.opening, self._last
        before, found, rest = self._pending.partition(opening)
        sure = before if found else before[: len(before) - (0 if last else _begun(before, opening))]
        kept = len(sure.rstrip()) if found or not last or self.calls else len(sure)
        self._said += before[:kept]
        self._pending, self._raw = (rest, before[kept:] + found) if found else (before[kept:], "")
        if found:
            self._step = self._head
        return bool(found)

    def _bare(self) -> bool:
        """The start of an answer that may be a call."""
        start = self._pending.lstrip()[:1]
        if not self._last and (not start or (start == "{" and not self._held)):
            return False
        self._step = self._head if start == "{" and (self._held or _is_json(self._pending)) else self._plain
        return True

    def _head(self) -> bool:
        """The opening of a call, up to its arguments."""
        found = _HEAD.match(self._pending)
        if found is not None and found[1] in self._names:
            function = {"name": found[1], "arguments": ""}
            said = {"index": self.calls, "id": secrets.token_hex(5)[:9], "type": "function"}  # Mistral's ids have 9
            self._deltas.append({**said, "function": function})
            self.calls, self._pending, self._step = self.calls + 1, self._pending[found.end() :], self._arguments
            return True
        if found is None and not self._last and len(self._pending) <= _LONGEST_HEAD:
            return False
        self._said, self._step = self._said + self._raw, self._text if self._form.opening else self._plain
        return True

    def _arguments(self) -> bool:
        """The JSON object of the arguments, as far as it is written."""
        end = next((place for place, one in enumerate(self._pending, 1) if self._closes(one)), len(self._pending))
        piece, self._pending = self._pending[:end], self._pending[end:]
        if piece:
            self._deltas.append({"index": self.calls - 1, "function": {"arguments": piece}})
            self._step = self._arguments if self._depth else self._tail
        return bool(piece)

    def _closes(self, one: str) -> bool:
        """Whether this character is the last of the object."""
        if self._quoted:
            self._quoted, self._escaped = self._escaped or one != '"', one == "\\" and not self._escaped
            return False
        self._quoted = one == '"'
        self._depth += (one in "{[") - (one in "}]")
        return self._depth == 0

    def _tail(self) -> bool:
        """The end of a call, which nobody reads."""
        found = self._end.match(self._pending)
        if found is None and not self._last and len(self._pending) <= _LONGEST_TAIL:
            return False
        self._pending = self._pending[found.end() :] if found is not None else "" if self._last else self._pending
        self._raw, self._step = "", self._text if self._form.opening else self._plain
        if found is not None and found[0].endswith(","):
            self._step = self._head
        return True

    def _plain(self) -> bool:
        self._said, self._pending = self._said + self._pending, ""
        return False


def whole_calls(deltas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls that deltas spell."""
    made: list[dict[str, Any]] = []
    for delta in deltas:
        if "id" in delta:
            made.append({"id": delta["id"], "type": "function", "function": dict(delta["function"])})
        else:
            made[-1]["function"]["arguments"] += delta["function"]["arguments"]
    return made


def _begun(text: str, mark: str) -> int:
    """How many characters at the end of `text` may begin `mark`."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
