"""Reads the calls of tools in an answer, piece by piece, in the forms of `tools.py`."""

from __future__ import annotations

import json
import secrets
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import regex

from specdec.server.messages import Tool
from specdec.server.tools import LOOSE_FORMS, NAME, CallForm, is_text

_Arguments = tuple[str, int | None]  # as far as they are written, and where they end
_Match = Any  # a match of regex, which has no types


class _Pattern:
    """How a form's calls of `tools` go on after their heads; white space may differ."""

    def __init__(self, form: CallForm, tools: Mapping[str, Tool]) -> None:
        self.form, self._tools = form, tools
        tail, closing = _lenient(form.tail), rf"\s*+{_lenient(form.closing)}" if form.closing else ""
        self._next = _compiled(rf"\s*+{tail}\s*+{_lenient(form.between)}\s*+{_head(form)}", tools)
        self._end, self._tail = regex.compile(rf"\s*+{tail}{closing}"), regex.compile(rf"\s*+{tail}")
        if form.pairs is not None:
            before, middle, after = map(_lenient, form.pairs)
            lines = [r"\n?" if form.pairs[1].endswith("\n") else "", r"\n?" if form.pairs[2].startswith("\n") else ""]
            self._pair = regex.compile(rf"\s*+{before}(.*?){middle}{lines[0]}(.*?){lines[1]}{after}", regex.DOTALL)

    def arguments(self, text: str, start: int, name: str) -> _Arguments:
        """The JSON of the arguments that begin at `start`."""
        if self.form.pairs is None:
            end = _object_end(text, start)
            return text[start:end], end
        properties = (self._tools[name].parameters.get("properties") or {}) if name in self._tools else {}
        written, end = [], start
        while pair := self._pair.match(text, end):
            written.append(f"{json.dumps(pair[1].strip())}: {_value(pair[2], properties.get(pair[1].strip()))}")
            end = pair.end()
        is_whole = self._tail.match(text, end) is not None
        return "{" + ", ".join(written) + ("}" if is_whole else ""), end if is_whole else None

    def is_closed(self, text: str, place: int) -> bool | None:
        """Whether a call ends behind arguments that end at `place`; None where the text may go on so."""
        tail = self._tail.match(text, place, partial=True)
        return tail is not None and (None if tail.partial else True)

    def after(self, text: str, place: int, *, last: bool) -> tuple[_Match | None, int | None]:
        """The next call after arguments that end at `place`, and where the text goes on; None while either may come."""
        head, end = (pattern.match(text, place, partial=True) for pattern in (self._next, self._end))
        if head is not None and not head.partial:
            return head, head.end()
        if end is not None and not end.partial:
            return None, end.end()
        if head is not None or end is not None:
            return None, len(text) if last else None
        tail = self._tail.match(text, place)
        return None, place if tail is None else tail.end()


class CallReader:
    """Reads an answer piece by piece into text and calls; what is no call of `tools` stays text, as written.

    `must`: the answer is nothing but calls. An incomplete call is no text. Nothing is read after `most` calls.
    """

    def __init__(self, forms: Sequence[CallForm], tools: Sequence[Tool], *, must: bool, most: int) -> None:
        self._tools = {tool.function.name: tool for tool in tools}
        readable = [*(form for form in forms if form.mark or must), *LOOSE_FORMS]
        self._forms = {f"form_{number}": form for number, form in enumerate(readable)}
        heads = (f"(?P<{key}>{_beginning(form)})" for key, form in self._forms.items())
        self._heads = _compiled("|".join(heads), self._tools)
        self._must, self._most, self._text, self._at, self._last = must, most, "", 0, False
        self._content, self._deltas = "", list[dict[str, Any]]()
        self._calls = self._end = 0  # calls so far, and where the last one ends
        self.are_whole = False  # whether there are calls, and the last one's arguments are complete
        self._reading = self._read()

    def read(self, text: str, *, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """The new text of the answer, and its new calls as OpenAI's deltas."""
        self._text, self._last, self._content, self._deltas = self._text + text, last, "", []
        next(self._reading, None)
        return self._content, self._deltas

    def _read(self) -> Generator[None]:
        """Reads the answer; each `yield` waits for more of it."""
        while self._calls < self._most:
            while (head := self._head()) is None:
                if self._last:
                    return
                yield
            pattern, match = head
            next_head: _Match | None = match
            while next_head is not None and self._calls < self._most:
                yield from self._call(pattern, next_head)
                next_head = yield from self._after(pattern)

    def _head(self) -> tuple[_Pattern, _Match] | None:
        """The head of the next call; says the text before it, or as much as surely precedes a call."""
        match = self._heads.search(self._text, self._at, partial=True)  # the end of a text may begin a call
        if match.partial and self._last and not self._is_call(match.start()):
            self._emit(len(self._text), before_call=self._calls > 0)
            return None
        self._emit(match.start(), before_call=True)
        if match.partial:
            return None
        form = next(form for key, form in self._forms.items() if match[key] is not None)
        pattern = _Pattern(form, self._tools)
        if form not in LOOSE_FORMS or self._must:
            return pattern, match
        if (end := _object_end(self._text, match.end())) is None:
            return (pattern, match) if self._last else None
        is_closed = pattern.is_closed(self._text, end)
        if is_closed is False:  # an object with other keys is no call
            self._emit(end, before_call=False)
            return self._head()
        return (pattern, match) if is_closed or self._last else None

    def _is_call(self, place: int) -> bool:
        """Whether what begins like a call at `place` is nothing else."""
        has_mark = any(form.mark in self._text[place:] for form in self._forms.values())
        follows_call = self._calls > 0 and not self._text[self._end : place].strip()
        return self._must or has_mark or follows_call

    def _emit(self, end: int, *, before_call: bool) -> None:
        """Says the text up to `end`, without the white space at its end where a call may follow."""
        text = self._text[self._at : end]
        text = text.rstrip() if before_call else text
        self._content += text
        self._at += len(text)

    def _call(self, pattern: _Pattern, head: _Match) -> Generator[None]:
        """Reads a call's arguments."""
        index = self._calls
        delta: dict[str, Any] = {"index": index, "id": secrets.token_hex(5)[:9], "type": "function"}  # Mistral's have 9
        delta["function"] = {"name": head["name"], "arguments": ""}
        self._deltas.append(delta)
        self._calls, self.are_whole, length = index + 1, False, 0
        while not self.are_whole:
            written, end = pattern.arguments(self._text, head.end(), head["name"])
            if length < len(written):
                if delta not in self._deltas:  # it came with an earlier piece of the answer
                    delta = {"index": index, "function": {"arguments": ""}}
                    self._deltas.append(delta)
                delta["function"]["arguments"] += written[length:]
                length = len(written)
            self._at, self.are_whole = len(self._text) if end is None else end, end is not None
            if self._last:
                return
            if end is None:
                yield

    def _after(self, pattern: _Pattern) -> Generator[None, None, _Match | None]:
        """Reads what ends a call; returns the head of one that follows in its list."""
        while True:
            head, end = pattern.after(self._text, self._at, last=self._last)
            if end is not None:
                self._at = self._end = end
                return head
            yield


def whole_calls(deltas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls that deltas spell."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if "id" in delta:
            calls.append({"id": delta["id"], "type": "function", "function": dict(delta["function"])})
        else:
            calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
    return calls


def _compiled(expression: str, tools: Mapping[str, Tool]) -> Any:
    """An expression in which `(?&tool)` is a tool's name.

    Its matches are partial where the end of the text may be the beginning of a whole one.
    """
    return regex.compile(f"(?(DEFINE)(?P<tool>{'|'.join(map(regex.escape, tools))}))(?:{expression})")


def _head(form: CallForm) -> str:
    """An expression for the head of a call, which ends where the arguments begin."""
    head = _lenient(form.head).replace(_lenient(NAME), "(?P<name>(?&tool))")
    return rf"{head}\s*+(?={'<' if form.pairs else '{'})"


def _beginning(form: CallForm) -> str:
    """An expression for the head of a first call; a loose form stands at the beginning of a line."""
    line = "(?m:^)[ \t]*+" if form in LOOSE_FORMS else ""
    return rf"{line}{_lenient(form.opening)}\s*+{_head(form)}"


def _lenient(text: str) -> str:
    """An expression for a text whose white space may differ."""
    return r"\s*+".join(map(regex.escape, regex.findall(r"\w+|[^\w\s]", text)))


def _object_end(text: str, start: int) -> int | None:
    """Where the JSON value at `start` ends; None where it is not complete."""
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def _value(text: str, schema: Any) -> str:
    """The JSON of a bare value."""
    if not is_text(schema):
        try:
            json.loads(text)
            return text.strip()
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)
