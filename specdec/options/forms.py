"""The form of an answer, as options and requests ask for it: a JSON schema, an expression, a grammar, or choices."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from specdec.errors import OptionError, UnsupportedError

FORMS = ("response_format", "guided_json", "guided_regex", "guided_grammar", "guided_choice")
"""The options that set it; they exclude one another."""
_STACK, _STACKS = 2**28, threading.Lock()  # bytes, of which only those that are used take memory
T = TypeVar("T")


@dataclass(frozen=True)
class Form:
    """The form of an answer: a kind of grammar, its source, and the option or the request's field that has it."""

    kind: str  # json, regex, grammar, choice
    source: Any
    field: str

    def compiled(self) -> str:
        """llguidance's form of the grammar; raises OptionError for an invalid one, UnsupportedError without
        llguidance.
        """
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise UnsupportedError(f"`{self.field}` needs llguidance: pip install -e '.[structured]'") from None

        try:
            if self.kind == "regex":
                return LLMatcher.grammar_from_regex(self.source)
            if self.kind == "grammar":
                return LLMatcher.grammar_from_lark(self.source)
            if self.kind == "choice":
                choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in self.source)
                return LLMatcher.grammar_from_lark(f"start: {choices}".replace("\x7f", "\\u007f"))
            # With free whitespace small models repeat it without end.
            schema = self.source if isinstance(self.source, str) else json.dumps(self.source)
            return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
        except (TypeError, ValueError, RecursionError) as error:
            raise self.wrong(str(error)) from None

    def check(self) -> None:
        """Raises as `compiled`, and OptionError for what llguidance would refuse with a vocabulary."""
        compiled = self.compiled()
        from llguidance import LLMatcher

        if message := deeply(lambda: LLMatcher.validate_grammar(compiled)):
            raise self.wrong(message)

    def wrong(self, message: str) -> OptionError:
        """llguidance's message as an OptionError, without the grammar around a regular expression."""
        if self.kind == "regex":
            message = message.partition("\n   1 |")[0].rpartition("error: ")[2]
        return OptionError(f"`{self.field}`: {message}")


def deeply(function: Callable[[], T]) -> T:
    """The function's result, from a thread with a large stack: llguidance needs some of it for each rule in a row."""
    with ThreadPoolExecutor(1) as thread:
        with _STACKS:  # the size is that of all threads that begin
            usual = threading.stack_size(_STACK)
            try:
                result = thread.submit(function)
            finally:
                threading.stack_size(usual)
        return result.result()


def forms(options: Any) -> list[Form]:
    """The forms that the options of a call set, of which at most one is valid."""
    schema = _schema(options.response_format)
    found = [Form("json", schema, FORMS[0])]
    found += [Form(name.removeprefix("guided_"), getattr(options, name), name) for name in FORMS[1:]]
    return [form for form in found if form.source is not None]


def _schema(response_format: dict[str, Any] | None) -> Any:
    """The schema of OpenAI's field, by default that of any object; None where any text will do."""
    if response_format is None or response_format["type"] == "text":
        return None
    schema = (response_format.get("json_schema") or {}).get("schema")
    return {"type": "object"} if schema is None else schema
