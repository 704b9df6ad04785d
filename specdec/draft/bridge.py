"""Drafts that speak another tokenizer: text goes over, a guess comes back as text and is encoded for the target.

Whatever the two tokenizers do to the text, the result is only a proposal: verification decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from specdec.draft.leading import ReadRow
from specdec.draft.text import cut, legible
from specdec.types import EMPTY, BatchDrafter, Call, DraftSession, Plan, Row, Tree

_WINDOW = 12
_SLACK = 8
_PARTIAL = "\ufffd"
_LONGEST_CHARACTER = 4


class Tokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    bos_token_id: int | None
    eos_token_id: int | None

    def encode(self, text: str, **options: Any) -> list[int]: ...

    def decode(self, token_ids: list[int], **options: Any) -> str: ...

    def get_vocab(self) -> dict[str, int]: ...

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]: ...

    @property
    def all_special_tokens(self) -> list[str]: ...


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of `text` as the middle of a longer one."""
    return tokenizer.encode(text, add_special_tokens=False, verbose=False) if text else []


def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of `ids`, special tokens and spaces as they are."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""


def window(tokenizer: Tokenizer, ids: list[int], low: int = 0) -> tuple[int, str]:
    """Where the last dozen or so of `ids` begin, and their text; prefers a start from which they encode to themselves.

    A window may begin inside a character or a word, and then its text has other tokens.
    """
    first = max(low, len(ids) - _WINDOW)
    for start in range(first, max(low, first - _SLACK) - 1, -1):
        text = decode(tokenizer, ids[start:])
        if encode(tokenizer, text) == ids[start:]:
            return start, text
    return first, decode(tokenizer, ids[first:])


def begin(target: Tokenizer, drafts: Tokenizer, tokens: list[int]) -> tuple[list[int], int]:
    """The draft's beginning of text, if it wants one or `tokens` have the target's, and how many tokens that covers."""
    bos = drafts.bos_token_id
    begun = target.bos_token_id is not None and tokens[:1] == [target.bos_token_id]
    wanted = bos is not None and (begun or drafts.encode("")[:1] == [bos])
    return [bos] if wanted and bos is not None else [], int(begun)


class _Likeliest:
    """The draft's own best guess: noise and processors of the strategy are keyed by the target's tokens."""

    needs_q = False

    def pick(self, row: Row, guesses: list[int], logits: Tensor) -> tuple[int, float, Tensor | None]:
        confidence, token = torch.softmax(logits.float(), -1).max(-1)
        return int(token), float(confidence), None


@dataclass(slots=True)
class DraftRow(ReadRow):
    """A row as the draft reads it, in the draft's tokens; `seen` target tokens are in it.

    Its `prompt_length` covers the beginning of text alone: everything after that may be encoded anew.
    """

    seen: int = 0


@dataclass(frozen=True, slots=True)
class _DraftPlan:
    """The plan of a row, with a limit of its own."""

    limit: int
    plan: Plan

    @property
    def branches(self) -> int:
        return 1

    def go_on(self, paths: Sequence[Sequence[float]], width: int = 1) -> bool:
        return self.plan.go_on(paths)

    def keep(self, confidence: Sequence[float]) -> bool:
        return self.plan.keep(confidence)


class TextBridge:
    """Drafts through text with a drafter of another vocabulary (string-level match, arXiv 2502.05202, algorithm 2).

    The draft guesses greedily; what comes back is one-hot, which match and rejection verification both take.
    """

    def __init__(self, drafter: BatchDrafter, target_tokenizer: Tokenizer, draft_tokenizer: Tokenizer) -> None:
        self.drafter = drafter
        self.target_tokenizer, self.draft_tokenizer = target_tokenizer, draft_tokenizer

    def __repr__(self) -> str:
        return f"TextBridge({self.drafter!r})"

    @property
    def parts(self) -> tuple[BatchDrafter, Tokenizer, Tokenizer]:
        """What it bridges: the drafter, the target's tokenizer and the draft's."""
        return self.drafter, self.target_tokenizer, self.draft_tokenizer

    def start(self, call: Call) -> BridgeSession:
        """A session on the rows of `call`; an encoder-decoder draft reads `call.draft_inputs`."""
        # Width is the draft's own affair: no logits of it are cut or padded to the target's.
        size, end = _size(self.draft_tokenizer), self.draft_tokenizer.eos_token_id
        ends = frozenset() if end is None else frozenset({end})
        inner = replace(call, rule=_Likeliest(), branching=None, encoding=None, vocab_size=size, ends=ends)
        return BridgeSession(self.drafter.start(inner), self.target_tokenizer, self.draft_tokenizer, call)


class BridgeSession:
    """A text bridge at work on the rows of one call."""

    def __init__(self, draft: DraftSession, target: Tokenizer, drafts: Tokenizer, call: Call) -> None:
        self._draft, self._target, self._drafts, self._call = draft, target, drafts, call
        self._rows: dict[int, DraftRow] = {}

    def propose(self, rows: Sequence[Row], plans: Sequence[Plan]) -> list[Tree]:
        """One chain per row: the draft's guess, as the target's tokenizer writes it after the row's text."""
        if not any(plan.limit > 0 for plan in plans):
            return [EMPTY] * len(rows)
        try:
            read = [self._read(row) for row in rows]
            inner = [
                _DraftPlan(min(plan.limit, row.remaining - 1) if draft.tokens else 0, plan)
                for row, draft, plan in zip(rows, read, plans, strict=True)
            ]
            guesses = self._draft.propose(read, inner)
            return [
                self._proposal(row, draft, guess, plan)
                for row, draft, guess, plan in zip(rows, read, guesses, plans, strict=True)
            ]
        except BaseException:
            self.release([row.key for row in rows])
            raise

    def release(self, keys: Sequence[int]) -> None:
        """Forgets finished rows, here and in the draft."""
        for key in keys:
            self._rows.pop(key, None)
        self._draft.release(keys)

    def _read(self, row: Row) -> DraftRow:
        """The row in the draft's tokens, up to the last whole character."""
        draft = self._rows.get(row.key)
        if draft is None:
            opening, seen = begin(self._target, self._drafts, row.tokens)
            draft = self._rows[row.key] = DraftRow(row.key, opening, len(opening), seen=seen)
        new, draft.seen = self._new_text(row.tokens, draft.seen)
        if new:
            start, text = window(self._drafts, draft.tokens, draft.prompt_length)
            draft.tokens[start:] = encode(self._drafts, text + new)
        return draft

    def _new_text(self, tokens: list[int], seen: int) -> tuple[str, int]:
        """The text after the first `seen` tokens, and the tokens it ends at: half a character waits for the rest."""
        anchor = max(0, seen - _WINDOW)
        before = decode(self._target, tokens[anchor:seen])
        for end in range(len(tokens), max(seen, len(tokens) - _LONGEST_CHARACTER), -1):
            text = decode(self._target, tokens[anchor:end])
            if not text.endswith(_PARTIAL):
                return text[len(before) :], end
        return "", seen

    def _proposal(self, row: Row, draft: DraftRow, guess: Tree, plan: Plan) -> Tree:
        ids = guess.tokens
        ended = self._drafts.eos_token_id in ids
        if ended:
            ids = ids[: ids.index(self._drafts.eos_token_id)]  # type: ignore[arg-type]
        tokens = self._continuation(row.tokens, draft.seen, self._guessed_text(draft, ids))
        if ended and self._target.eos_token_id is not None and bool(tokens) == bool(ids):
            tokens = [*tokens, self._target.eos_token_id]
        tokens = legible(tokens, self._call)
        chance = math.prod(guess.confidence or [1.0]) ** (1 / max(len(tokens), 1))
        return cut(tokens, [chance] * len(tokens), row, plan, "bridge")

    def _guessed_text(self, draft: DraftRow, guess: list[int]) -> str:
        """The text of the draft's guess after its row, whole characters only."""
        start = max(draft.prompt_length, len(draft.tokens) - _WINDOW)
        before = decode(self._drafts, draft.tokens[start:])
        for end in range(len(guess), 0, -1):
            text = decode(self._drafts, draft.tokens[start:] + guess[:end])
            if not text.endswith(_PARTIAL):
                return text[len(before) :] if text.startswith(before) else ""
        return ""

    def _continuation(self, tokens: list[int], seen: int, new: str) -> list[int]:
        """What `new` text is in the target's tokens, after exactly `tokens`; empty where the two cannot be joined."""
        if not new:
            return []
        start, text = window(self._target, tokens[:seen])
        tail, whole = tokens[start:], encode(self._target, text + new)
        if whole[: len(tail)] == tail:
            return whole[len(tail) :]
        if seen < len(tokens):
            return []
        # The text so far may not be the tokens that the tokenizer would choose for it; only the boundary counts.
        alone = encode(self._target, text)
        if whole[: len(alone)] == alone:
            return whole[len(alone) :]
        after = encode(self._target, new)
        return after if decode(self._target, tail + after) == text + new else []


def _size(tokenizer: Tokenizer) -> int:
    return len(tokenizer)  # type: ignore[arg-type]
