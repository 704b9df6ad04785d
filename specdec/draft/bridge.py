"""Drafts that speak another tokenizer: text goes over, a guess comes back as text and is encoded for the target.

Whatever the two tokenizers do to the text, the result is only a proposal: verification decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from specdec.draft.best_leaf import ReadRow
from specdec.draft.text import cut, known_tokens
from specdec.types import EMPTY, BatchDrafter, Commit, DraftSession, Plan, Row, Tree
from specdec.values import common_length

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

    def pick(
        self, row: Row, guesses: list[int], logits: Tensor, *, confident: bool = True
    ) -> tuple[int, float, Tensor | None]:
        confidence, token = torch.softmax(logits.float(), -1).max(-1)
        return int(token), float(confidence), None


@dataclass(slots=True)
class DraftRow(ReadRow):
    """A row as the draft reads it, in the draft's tokens; `seen` target tokens are in it.

    Its `prompt_length` covers the beginning of text alone: everything after that may be encoded anew. `guess` is what
    the draft said last.
    """

    seen: int = 0
    guess: list[int] = field(default_factory=list)

    def tell(self, draft: DraftSession, before: list[int]) -> None:
        """Tells the draft how its guess compares with the row's text, and what of the text was `before` another one."""
        same = common_length(before, self.tokens)
        new = self.tokens[same:] if same == len(before) else []
        right = common_length(self.guess, new)
        self.guess = []
        draft.commit([Commit(self, list(range(right)), right)])
        if same < len(before):
            draft.rewind(self, same)


@dataclass(frozen=True, slots=True)
class _DraftPlan:
    """The plan of a row, with a limit of its own."""

    limit: int
    plan: Plan

    @property
    def branches(self) -> int:
        return 1

    @property
    def needs_confidence(self) -> bool:
        return True  # all of a guess is put into one number

    def go_on(self, paths: Sequence[Sequence[float]], width: int = 1) -> bool:
        return self.plan.go_on(paths)

    def keep(self, confidence: Sequence[float]) -> bool:
        return self.plan.keep(confidence)


class TextBridge(BatchDrafter):
    """Drafts through text with a drafter of another vocabulary (string-level match, arXiv 2502.05202, algorithm 2).

    The draft guesses greedily; what comes back is one-hot, which match and rejection verification both take. Under
    rejection shared tokens serve better (`by_tokens`).
    """

    guesses_trees = reads_predictions = False

    def __init__(self, drafter: BatchDrafter, target_tokenizer: Tokenizer, draft_tokenizer: Tokenizer) -> None:
        self.drafter = drafter
        self.models = drafter.models
        self.target_tokenizer, self.draft_tokenizer = target_tokenizer, draft_tokenizer

    def __repr__(self) -> str:
        return f"TextBridge({self.drafter!r})"

    @cached_property
    def by_tokens(self) -> BatchDrafter:
        """The same draft, of tokens that both vocabularies have; raises VocabularyError if there are none."""
        from specdec.draft.intersection import VocabularyIntersection  # it builds on this module

        return VocabularyIntersection(self.drafter, self.target_tokenizer, self.draft_tokenizer)

    def for_sampling(self, sampling: str | None) -> BatchDrafter:
        """Text for match verification, shared tokens for rejection."""
        return self.by_tokens if sampling in ("rejection", "block") else self

    def start(self, vocab_size: int) -> BridgeSession:
        """A session without rows."""
        # Width is the draft's own affair: no logits of it are cut or padded to the target's.
        inner = self.drafter.start(_size(self.draft_tokenizer))
        return BridgeSession(inner, self.target_tokenizer, self.draft_tokenizer, vocab_size)


class BridgeSession(DraftSession):
    """A bridge at work: rows in the draft's own tokens, which change at their end as the text goes on."""

    def __init__(self, draft: DraftSession, target: Tokenizer, drafts: Tokenizer, vocab_size: int) -> None:
        self._draft, self._target, self._drafts, self._vocab_size = draft, target, drafts, vocab_size
        end = drafts.eos_token_id
        self._ends = frozenset() if end is None else frozenset({end})
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
            for draft, guess in zip(read, guesses, strict=True):
                draft.guess = guess.tokens
            return [
                self._proposal(row, draft, guess, plan)
                for row, draft, guess, plan in zip(rows, read, guesses, plans, strict=True)
            ]
        except BaseException:
            self.release([row.key for row in rows])
            raise

    @property
    def cache(self) -> Any:
        """The draft's."""
        return self._draft.cache

    def rewind(self, row: Row, length: int) -> None:
        """Reads the row's text anew."""
        self.release([row.key])

    def release(self, keys: Sequence[int]) -> None:
        """Forgets rows, here and in the draft."""
        for key in keys:
            self._rows.pop(key, None)
        self._draft.release(keys)

    def _read(self, row: Row) -> DraftRow:
        """The row in the draft's tokens, up to the last whole character."""
        draft = self._rows.get(row.key)
        if draft is None:
            opening, seen = begin(self._target, self._drafts, row.tokens)
            task = replace(row.task, rule=_Likeliest(), branching=None, ends=self._ends)
            draft = self._rows[row.key] = DraftRow(row.key, opening, len(opening), task, seen=seen)
        before = list(draft.tokens)
        new, draft.seen = self._new_text(row.tokens, draft.seen)
        if new:
            start, text = window(self._drafts, draft.tokens, draft.prompt_length)
            draft.tokens[start:] = encode(self._drafts, text + new)
        draft.tell(self._draft, before)
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
        tokens = known_tokens(tokens, self._vocab_size, row.task.ends)
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
