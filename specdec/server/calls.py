"""Reads the calls of tools in an answer, piece by piece, in the forms of `tools.py`."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from specdec.server.messages import Tool
from specdec.server.tools import LOOSE_FORMS, NAME, CallForm, is_text

_Arguments = tuple[str, int | None]  # as far as they are written, and where they end


class _Pattern:
    """How a form is read: white space may differ, and `tools` has the names.

    A `loose` form begins at the beginning of a line, and is a call once its arguments are complete.
    """

    def __init__(self, form: CallForm, tools: Mapping[str, Tool], *, loose: bool) -> None:
        self.form, self.loose, self._tools = form, loose, tools
        names = f"(?P<name>{'|'.join(map(re.escape, tools))})"
        head = rf"{_lenient(form.head).replace(_lenient(NAME), names)}\s*(?={'<' if form.pairs else '{'})"
        tail, line = _lenient(form.tail), "(?m:^)[ \t]*" if loose else ""
        self.head = re.compile(rf"{line}{_lenient(form.opening)}\s*{head}")
        self._next = re.compile(rf"\s*{tail}\s*{_lenient(form.between)}\s*{head}")
        self._end = re.compile(rf"\s*{tail}" + (rf"\s*{_lenient(form.closing)}" if form.closing else ""))
        self._tail = re.compile(rf"\s*{tail}")
        heads = [form.head.replace(NAME, name) for name in tools]
        self._heads = [_squeezed(form.opening + head) for head in heads]
        self._tails = [_squeezed(form.tail + rest) for rest in (form.closing, *(form.between + head for head in heads))]
        if form.pairs is not None:
            before, middle, after = map(_lenient, form.pairs)
            lines = [r"\n?" if form.pairs[1].endswith("\n") else "", r"\n?" if form.pairs[2].startswith("\n") else ""]
            self._pair = re.compile(rf"\s*{before}(.*?){middle}{lines[0]}(.*?){lines[1]}{after}", re.DOTALL)

    @property
    def starts(self) -> set[str]:
        """The first characters of calls."""
        return {head[0] for head in self._heads}

    def begins(self, text: str, place: int) -> bool:
        """Whether the rest of the text may begin a call."""
        if self.loose and text[text.rfind("\n", 0, place) + 1 : place].strip():
            return False
        rest = _squeezed(text[place:])
        return any(head.startswith(rest) for head in self._heads)

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

    def after(self, text: str, place: int, *, last: bool) -> tuple[re.Match[str] | None, int | None]:
        """The next call after arguments that end at `place`, and where the text goes on; None while either may come."""
        if head := self._next.match(text, place):
            return head, head.end()
        if end := self._end.match(text, place):
            return None, end.end()
        rest = _squeezed(text[place:])
        if any(tail.startswith(rest) for tail in self._tails):
            return None, len(text) if last else None
        tail = self._tail.match(text, place)
        return None, place if tail is None else tail.end()


class CallReader:
    """Reads an answer piece by piece into text and calls; what is no call of `tools` stays text, as written.

    `must`: the answer is nothing but calls. An incomplete call is no text. Nothing is read after `most` calls.
    """

    def __init__(self, forms: Sequence[CallForm], tools: Sequence[Tool], *, must: bool, most: int) -> None:
        by_name = {tool.function.name: tool for tool in tools}
        patterns = [_Pattern(form, by_name, loose=False) for form in forms if form.mark or must]
        self._patterns = [*patterns, *(_Pattern(form, by_name, loose=True) for form in LOOSE_FORMS)]
        starts = "".join(start for pattern in self._patterns for start in pattern.starts)
        self._starts = re.compile(f"[{re.escape(starts)}]")
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
            next_head: re.Match[str] | None = match
            while next_head is not None and self._calls < self._most:
                yield from self._call(pattern, next_head)
                next_head = yield from self._after(pattern)

    def _head(self) -> tuple[_Pattern, re.Match[str]] | None:
        """The head of the next call; says the text before it, or as much as surely precedes a call."""
        text = self._text
        heads = [(pattern, match) for pattern in self._patterns if (match := pattern.head.search(text, self._at))]
        if heads:
            pattern, match = min(heads, key=lambda head: head[1].start())
            self._emit(match.start(), before_call=True)
            is_call = self._last or not pattern.loose or _object_end(text, match.end()) is not None
            return (pattern, match) if is_call else None
        begin = next(
            (start.start() for start in self._starts.finditer(text, self._at) if self._candidates(start.start())), None
        )
        if begin is None or (self._last and not self._is_call(begin)):
            self._emit(len(text), before_call=not self._last or self._calls > 0)
        else:
            self._emit(begin, before_call=True)
        return None

    def _candidates(self, place: int) -> list[_Pattern]:
        return [pattern for pattern in self._patterns if pattern.begins(self._text, place)]

    def _is_call(self, place: int) -> bool:
        """Whether what begins like a call at `place` is nothing else."""
        has_mark = any(pattern.form.mark in self._text[place:] for pattern in self._candidates(place))
        follows_call = self._calls > 0 and not self._text[self._end : place].strip()
        return self._must or has_mark or follows_call

    def _emit(self, end: int, *, before_call: bool) -> None:
        """Says the text up to `end`, without the white space at its end where a call may follow."""
        text = self._text[self._at : end]
        text = text.rstrip() if before_call else text
        self._content += text
        self._at += len(text)

    def _call(self, pattern: _Pattern, head: re.Match[str]) -> Generator[None]:
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

    def _after(self, pattern: _Pattern) -> Generator[None, None, re.Match[str] | None]:
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


def _lenient(text: str) -> str:
    """An expression for a text whose white space may differ."""
    return r"\s*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", text)))


def _squeezed(text: str) -> str:
    """A text without its white space."""
    return "".join(text.split())


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
