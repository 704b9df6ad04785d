"""Calls of tools in answers: how a model's chat template writes them, a grammar of them, and reading them."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from specdec.generator.tokenizers import begun
from specdec.server.errors import ApiError
from specdec.server.messages import Tool
from specdec.server.protocol import ChatRequest


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
    '{"name": function name, "parameters"': CallFormat("", "", "parameters", "", ""),  # Llama 3
}
_UNREAD = {  # -> who writes calls like this
    "<function=": "Qwen3-Coder",
    "<arg_key>": "GLM",
    "[ARGS]": "newer Mistral models",
    "<｜tool▁calls▁begin｜>": "DeepSeek",
    "<|tool_calls_section_begin|>": "Kimi",
    "<|channel|>": "gpt-oss",
    "<|tool_call_start|>": "LFM2",
    "<|tool_call|>": "Granite and Phi",
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


def call_grammar(form: CallFormat, chat: ChatRequest, marks: Mapping[str, int], ends: Collection[int]) -> str | None:
    """The grammar of an answer in Lark's notation, where llguidance has one of free text with calls; else None.

    `marks`: the tokens beside the vocabulary proper, which no text of a grammar matches; `ends` are among them.
    """

    def quoted(text: str) -> str:
        return f"<[{marks[text]}]>" if text in marks else json.dumps(text) if text else ""

    most, opening = chat.most_calls, quoted(form.opening)
    more = f'(", " call)~0..{most - 1}' if form.is_list else ""
    rules = []
    if chat.must_call:
        again = f'("\\n" calls)~0..{most - 1}' if form.closing else ""
        rules.append(f"start: calls {again}")
    elif not form.opening:
        return None
    else:
        others = [str(token) for name, token in marks.items() if token not in ends and name != form.opening]
        said = f"TEXT | <[{','.join(others)}]>" if others else "TEXT"
        rules.append(f"start: ({said})* calls?" if form.is_list or most == 1 else f"start: (calls | {said})*")
        rules.append("TEXT: /(.|\\n)+/")
        if form.opening not in marks:
            rules.append(f"open[lazy]: /(.|\\n)*/ {opening}")
            opening = "open"
    before = '" "? "["' if form.is_list else quoted(form.before)  # tokenizers of SentencePiece write the blank
    rules.append(f"calls: {opening} {before} call {more} {quoted(form.after)} {quoted(form.closing)}")
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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    @property
    def all_special_ids(self) -> list[int]:
        """The tokens that texts leave out."""
        return [token for token in self._tokenizer.all_special_ids if token not in self._marks]

    def decode(self, ids: Sequence[int], **how: Any) -> str:
        runs = [(mark, list(run)) for mark, run in groupby(ids, self._marks.get)]
        return "".join(mark * len(run) if mark else self._tokenizer.decode(run, **how) for mark, run in runs)


_HEAD = re.compile(r'\s*\[?\s*\{\s*"name"\s*:\s*"([\w.-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_LONGEST_HEAD = 256  # characters
_Read = tuple[str, list[tuple[str, str]]]  # a text, and names with arguments


class CallReader:
    """Reads an answer piece by piece into text and calls; what is no call of `names` stays text, as written.

    `held`: a grammar holds the calls, so that one without an opening need not be complete to be known.
    """

    def __init__(self, form: CallFormat, names: Collection[str], *, held: bool) -> None:
        self._form, self._names, self._held = form, names, held
        self._end = re.compile(r"\s*\}\s*" + ("[],]" if form.is_list else re.escape(form.closing)))
        self._text, self._said = "", 0
        self.calls = list[int]()  # characters of the arguments that have been read
        self.are_whole = False  # whether there are calls, and the last one's arguments are complete

    def read(self, text: str, *, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """The new text of the answer, and its new calls as OpenAI's deltas."""
        self._text += text
        said, calls = self._marked(last) if self._form.opening else self._bare(last)
        deltas: list[dict[str, Any]] = []
        for place, (name, arguments) in enumerate(calls):
            if place == len(self.calls):
                own = {"index": place, "id": secrets.token_hex(5)[:9], "type": "function"}  # Mistral's ids have 9
                deltas.append({**own, "function": {"name": name, "arguments": ""}})
                self.calls.append(0)
            if new := arguments[self.calls[place] :]:
                deltas.append({"index": place, "function": {"arguments": new}})
                self.calls[place] = len(arguments)
        self.are_whole = bool(calls) and _object_end(calls[-1][1], 0) is not None
        new, self._said = said[self._said :], len(said)
        return new, deltas

    def _bare(self, last: bool) -> _Read:
        """The answer where a call is all of it."""
        text = self._text
        head = self._head(0)
        if head is not None and (self._held or (last and _object_end(text, 0))):
            return "", [(head[1], text[head.end() : _object_end(text, head.end())])]
        waits = not last and (self._held or text.lstrip()[:1] in ("", "{"))
        return "" if waits else text, []

    def _marked(self, last: bool) -> _Read:
        """The answer as far as it is sure; white space before a call is dropped."""
        text, opening, said, at = self._text, self._form.opening, "", 0
        calls: list[tuple[str, str]] = []
        while (start := text.find(opening, at)) >= 0:
            head = self._head(start + len(opening))
            if head is None and not last and len(text) - start <= _LONGEST_HEAD:
                return said + text[at:start].rstrip(), calls
            said += text[at:start].rstrip() if head else text[at : start + len(opening)]
            at = start + len(opening)
            while head is not None:
                end = _object_end(text, head.end())
                calls.append((head[1], text[head.end() : end]))
                closed = self._end.match(text, end) if end else None
                if closed is None:
                    return said, calls
                at, again = closed.end(), closed[0].endswith(",")
                head = self._head(at) if again else None
                if again and head is None and not last:
                    return said, calls
        sure = text[at:] if last else text[at : len(text) - begun(text[at:], opening)]
        return said + (sure if last and not calls else sure.rstrip()), calls

    def _head(self, at: int) -> re.Match[str] | None:
        found = _HEAD.match(self._text, at)
        return found if found is not None and found[1] in self._names else None


def whole_calls(deltas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls that deltas spell."""
    made: list[dict[str, Any]] = []
    for delta in deltas:
        if "id" in delta:
            made.append({"id": delta["id"], "type": "function", "function": dict(delta["function"])})
        else:
            made[-1]["function"]["arguments"] += delta["function"]["arguments"]
    return made


def _object_end(text: str, start: int) -> int | None:
    """Where the JSON value at `start` ends; None where it is not complete."""
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None
