"""Structured output: JSON schemas, regular expressions and grammars as a mask over the next token, by llguidance.

A mask depends on the text alone, so a draft model uses it too, and copied drafts are cut where they violate it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.core.tree import common_length
from specdec.errors import EngineError, OptionError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


@dataclass(frozen=True)
class Form:
    """The form of an answer: a kind of grammar, its source, and the request's field that has it."""

    kind: str  # json, regex, grammar, choice
    source: Any
    field: str

    def compiled(self) -> str:
        """llguidance's form of the grammar; raises OptionError for an invalid one."""
        from llguidance import LLMatcher

        try:
            if self.kind == "regex":
                return LLMatcher.grammar_from_regex(self.source)
            if self.kind == "grammar":
                return LLMatcher.grammar_from_lark(self.source)
            if self.kind == "choice":
                choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in self.source)
                return LLMatcher.grammar_from_lark(f"start: {choices}".replace("\x7f", "\\u007f"))
            # With free whitespace small models repeat it without end.
            return LLMatcher.grammar_from_json_schema(self.source, overrides={"whitespace_flexible": False})
        except (ValueError, RecursionError) as error:
            raise self.wrong(str(error)) from None

    def wrong(self, message: str) -> OptionError:
        """llguidance's message as an OptionError, without the grammar around a regular expression."""
        if self.kind == "regex":
            message = message.partition("\n   1 |")[0].rpartition("error: ")[2]
        return OptionError(f"`{self.field}`: {message}")


class Grammar:
    """A logits processor that allows the tokens of a form, for all `rows` of one prompt of `begin` tokens.

    Every row has a matcher, which advances and rolls back with its text.
    """

    pure = True  # a function of ids and logits

    def __init__(self, form: Form, tokenizer: LLTokenizer, begin: int, rows: int = 1) -> None:
        from llguidance import LLMatcher

        self._begin = begin
        first = LLMatcher(tokenizer, form.compiled(), log_level=0)
        if first.is_error():
            raise form.wrong(first.get_error())
        self._matchers = [_Follower(first), *(_Follower(first.deep_copy()) for _ in range(rows - 1))]
        self._ends = torch.tensor(tokenizer.eos_tokens)

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """`logits` `[n, vocab]` after `ids` `[n, length]`, -inf for forbidden tokens."""
        allowed = torch.stack([self._mask(text[self._begin :].tolist(), logits.shape[1]) for text in ids])
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)

    def allowed(self, text: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of `tokens` may follow `text`, prompt included."""
        matcher = self._at(list(text[self._begin :]))
        return 0 if matcher is None else matcher.validate_tokens(list(tokens))

    def _mask(self, written: list[int], width: int) -> Tensor:
        """The allowed next tokens `[width]`; only end-of-sequence after a complete or a wrong text."""
        allowed = torch.zeros(width, dtype=torch.bool)
        matcher = self._at(written)
        if matcher is None or matcher.is_stopped():
            allowed[self._ends[self._ends < width]] = True
            return allowed
        bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
        flat = ((bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten()[:width]
        allowed[: len(flat)] = flat.bool()
        if not allowed.any():
            raise EngineError(f"the answer cannot go on in this form: {matcher.get_error() or matcher.stop_reason()}")
        return allowed

    def _at(self, written: list[int]) -> LLMatcher | None:
        """A matcher that has read `written`; None where that violates the form, as drafts may."""
        best = max(self._matchers, key=lambda one: (one.shares(written), -len(one.read)))
        return best.matcher if best.go_to(written) else None


class _Follower:
    """A matcher and the tokens it has read."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher, self.read = matcher, list[int]()

    def shares(self, written: Sequence[int]) -> int:
        return common_length(self.read, written)

    def go_to(self, written: Sequence[int]) -> bool:
        """Reads `written`, after a rollback where needed; False where it violates the form."""
        kept = self.shares(written)
        if kept < len(self.read):
            self.matcher.rollback(len(self.read) - kept)
            del self.read[kept:]
        new = list(written[kept:])
        count = self.matcher.try_consume_tokens(new)
        self.read += new[:count]
        return count == len(new)
