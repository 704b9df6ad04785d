"""Structured output: JSON schemas, regular expressions and grammars as a mask over the next token, by llguidance.

A mask depends on the text alone, so a draft model uses it too, and copied drafts are cut where they violate it. Where
one continuation is left, it is a draft itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.core.tree import common_length, place_after
from specdec.errors import OptionError, UnsupportedError
from specdec.options.generate import Form, deeply

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class Grammar:
    """A logits processor that allows the tokens of a form, from the first token on; every prompt has a copy.

    `follows`: the form begins after these tokens, and anything may stand before them. Every row of a prompt has a
    matcher, which advances and rolls back with the row's text.
    """

    pure = True  # a function of ids and logits

    def __init__(self, form: Form, vocabulary: LLTokenizer) -> None:
        compiled = form.compiled()
        from llguidance import LLMatcher

        self._form, self._begin = form, 0
        first = deeply(lambda: LLMatcher(vocabulary, compiled, log_level=0))
        if first.is_error():
            raise form.error(first.get_error())
        self._matchers = [_Follower(first)]
        self._ends = torch.tensor(vocabulary.eos_tokens)
        self.follows: Sequence[int] = ()

    def copy(self, begin: int, rows: int) -> Grammar:
        """A copy for all `rows` of a prompt of `begin` tokens; the grammar itself must not have been called."""
        grammar = copy(self)
        grammar._begin = begin
        grammar._matchers = [_Follower(self._matchers[0].matcher.deep_copy()) for _ in range(rows)]
        return grammar

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """`logits` `[n, vocab]` after `ids` `[n, length]`, -inf for forbidden tokens.

        Raises OptionError for a form that no text fits, or that takes llguidance too much to follow.
        """
        allowed = torch.stack([self._mask(self._form_part(text.tolist()), logits.shape[1]) for text in ids])
        return logits.masked_fill(~allowed, -torch.inf)

    def allowed(self, text: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of `tokens` may follow `text`, prompt included."""
        before, whole = self._form_part(text), self._form_part([*text, *tokens])
        if whole is None:
            return len(tokens)
        matcher, free = self._at(before or []), len(tokens) + len(before or ()) - len(whole)
        return free + (0 if matcher is None else matcher.validate_tokens(list(tokens[free:])))

    def forced(self, text: Sequence[int]) -> list[int]:
        """The tokens that must follow `text`, without a last token that a longer one could replace."""
        part = self._form_part(text)
        matcher = None if part is None else self._at(part)
        return [] if matcher is None or matcher.is_stopped() else list(matcher.compute_ff_tokens())

    def _form_part(self, text: Sequence[int]) -> list[int] | None:
        """The part of a text that has the form; None before it begins."""
        written = list(text[self._begin :])
        start = place_after(written, self.follows)
        return None if start is None else written[start:]

    def _mask(self, ids: list[int] | None, width: int) -> Tensor:
        """The allowed next tokens `[width]`; only end-of-sequence after a complete or a wrong text."""
        if ids is None:
            return torch.ones(width, dtype=torch.bool)
        allowed = torch.zeros(width, dtype=torch.bool)
        matcher = self._at(ids)
        if matcher is None or matcher.is_stopped():
            allowed[self._ends[self._ends < width]] = True
            return allowed
        bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
        self._check(matcher)  # a failed matcher allows the end
        flat = ((bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten()[:width]
        allowed[: len(flat)] = flat.bool()
        return allowed

    def _at(self, ids: list[int]) -> LLMatcher | None:
        """A matcher that has read `ids`; None if they violate the form, as a draft's guesses may."""
        best = max(self._matchers, key=lambda follower: (common_length(follower.read, ids), -len(follower.read)))
        num_read = common_length(best.read, ids)
        if num_read < len(best.read):
            best.matcher.rollback(len(best.read) - num_read)
            del best.read[num_read:]
        count = best.matcher.try_consume_tokens(ids[num_read:])
        best.read += ids[num_read : num_read + count]
        matcher = self._check(best.matcher)
        return matcher if len(best.read) == len(ids) else None

    def _check(self, matcher: LLMatcher) -> LLMatcher:
        """The matcher; raises OptionError where it failed, as it then ends every text."""
        if matcher.is_error():
            reason = matcher.get_error().partition("\n")[0]
            raise OptionError(f"`{self._form.field}`: no text can go on in this form ({reason}): make it simpler")
        return matcher


@dataclass(slots=True)
class _Follower:
    """A matcher and the tokens it has read."""

    matcher: LLMatcher
    read: list[int] = field(default_factory=list)


class Grammars:
    """Makes grammars over vocabularies of `width` tokens, and caches the last two vocabularies."""

    def __init__(self, width: int) -> None:
        self._width, self._lock = width, Lock()
        self._vocabulary = lru_cache(2)(_vocabulary)  # making one takes seconds if it is large

    def make(self, form: Form, tokenizer: Any, ends: Sequence[int]) -> Grammar:
        """A grammar to copy for each prompt; raises as `Form.compiled`, and UnsupportedError for a slow tokenizer.

        `ends`: the ids that may follow a complete text.
        """
        form.compiled()  # an invalid form is told at once
        with self._lock:
            try:
                vocabulary = self._vocabulary(tokenizer, self._width, tuple(end for end in ends if end < self._width))
            except ValueError as error:
                way_out = "pass one of the kind PreTrainedTokenizerFast"
                raise UnsupportedError(f"`{form.field}` cannot read the tokenizer ({error}): {way_out}") from None
        return Grammar(form, vocabulary)


def _vocabulary(tokenizer: Any, width: int, ends: tuple[int, ...]) -> LLTokenizer:
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, n_vocab=width, eos_token=list(ends))
