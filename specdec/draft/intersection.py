"""A draft of another vocabulary that draws only tokens which both vocabularies have, with q in the target's ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from specdec.draft.bridge import DraftRow, Tokenizer, begin, decode, encode
from specdec.errors import VocabularyError
from specdec.types import EMPTY, BatchDrafter, DraftRule, DraftSession, Plan, Row, Tree

_FOREIGN = 2**40
"""Added to a target token that the draft lacks: no draft can read such an id, and it can be taken off again."""


class VocabularyIntersection(BatchDrafter):
    """Drafts with the tokens that both vocabularies have (token-level intersection, arXiv 2502.05202, algorithm 4).

    Tokens are the same when their strings are, however each tokenizer writes a leading space; a token that is special
    in one must be special in the other. Raises VocabularyError if nothing is shared.
    """

    guesses_trees = reads_predictions = False

    def __init__(self, drafter: BatchDrafter, target_tokenizer: Tokenizer, draft_tokenizer: Tokenizer) -> None:
        self.drafter = drafter
        self.models = drafter.models
        self.target_tokenizer, self.draft_tokenizer = target_tokenizer, draft_tokenizer
        self.to_draft = shared_tokens(target_tokenizer, draft_tokenizer)
        if not self.to_draft:
            raise VocabularyError("target and draft tokenizers have no token in common: use match verification")

    def __repr__(self) -> str:
        return f"VocabularyIntersection({self.drafter!r}, {len(self.to_draft)} tokens)"

    def start(self, vocab_size: int) -> IntersectionSession:
        """A session without rows, whose rules see logits over the target's vocabulary."""
        to_draft = {t: d for t, d in self.to_draft.items() if t < vocab_size}
        inner = self.drafter.start(max(to_draft.values(), default=0) + 1)
        return IntersectionSession(inner, to_draft, vocab_size, self.target_tokenizer, self.draft_tokenizer)


def shared_tokens(target: Tokenizer, draft: Tokenizer) -> dict[int, int]:
    """Target id -> draft id of every token that both have."""
    theirs = _by_meaning(draft)
    ours = _by_meaning(target)
    return {ours[meaning]: theirs[meaning] for meaning in ours if meaning in theirs}


def _by_meaning(tokenizer: Tokenizer) -> dict[tuple[str, bool], int]:
    """(string with a plain leading space, special or not) -> id."""
    special = set(tokenizer.all_special_tokens)
    sign = _space_sign(tokenizer)
    return {
        (" " + token[len(sign) :] if sign and token.startswith(sign) else token, token in special): token_id
        for token, token_id in tokenizer.get_vocab().items()
    }


def _space_sign(tokenizer: Tokenizer) -> str:
    """How the tokenizer writes a space at the beginning of a token: `Ġ`, `▁`, or nothing of the kind."""
    ids = encode(tokenizer, " ")
    token: str = tokenizer.convert_ids_to_tokens(ids[:1])[0] if ids else ""
    return token[0] if token and token[0] in "Ġ▁ " else ""


@dataclass(slots=True)
class _MappedRow(DraftRow):
    """A row in the draft's tokens that remembers the target's."""

    outer: Row | None = None


class _Shared:
    """The tokens that both vocabularies have."""

    def __init__(self, to_draft: dict[int, int], vocab_size: int) -> None:
        self.to_draft, self._vocab_size = to_draft, vocab_size
        self._to_target = {d: t for t, d in to_draft.items()}
        self._targets, self._drafts = torch.tensor(list(to_draft)), torch.tensor(list(to_draft.values()))

    def widened(self, logits: Tensor) -> Tensor:
        """Draft `logits` as `[vocab of the target]`; everything that the draft lacks is impossible."""
        self._targets, self._drafts = self._targets.to(logits.device), self._drafts.to(logits.device)
        wide = logits.new_full((self._vocab_size,), float("-inf"))
        wide[self._targets] = logits[self._drafts]
        return wide

    def in_target(self, guesses: list[int]) -> list[int]:
        """Drawn draft ids as target ids."""
        return [guess - _FOREIGN if guess >= _FOREIGN else self._to_target[guess] for guess in guesses]


class _MappedRule:
    """Lets the strategy's rule pick in the target's vocabulary and tells the draft its own id."""

    def __init__(self, rule: DraftRule, tokens: _Shared) -> None:
        self._rule, self._tokens = rule, tokens

    @property
    def needs_q(self) -> bool:
        return self._rule.needs_q

    def pick(
        self, row: Row, guesses: list[int], logits: Tensor, *, confident: bool = True
    ) -> tuple[int, float, Tensor | None]:
        """The rule's pick from the draft `logits` moved to the target's ids; everything else is impossible."""
        assert isinstance(row, _MappedRow)
        assert row.outer is not None
        wide = self._tokens.widened(logits)
        token, confidence, q = self._rule.pick(row.outer, self._tokens.in_target(guesses), wide, confident=confident)
        return self._tokens.to_draft.get(token, _FOREIGN + token), confidence, q


class IntersectionSession(DraftSession):
    """An intersection draft at work."""

    def __init__(
        self, draft: DraftSession, to_draft: dict[int, int], vocab_size: int, target: Tokenizer, drafts: Tokenizer
    ) -> None:
        self._draft, self._target, self._drafts = draft, target, drafts
        self._tokens = _Shared(to_draft, vocab_size)
        self._rows: dict[int, _MappedRow] = {}

    def propose(self, rows: Sequence[Row], plans: Sequence[Plan]) -> list[Tree]:
        """One chain per row, in the target's ids."""
        if not any(plan.limit > 0 for plan in plans):
            return [EMPTY] * len(rows)
        try:
            read = [self._read(row) for row in rows]
            trees = self._draft.propose(read, plans)
            for one, tree in zip(read, trees, strict=True):
                one.guess = tree.tokens
        except BaseException:
            self.release([row.key for row in rows])
            raise
        return [replace(tree, tokens=self._tokens.in_target(tree.tokens)) for tree in trees]

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

    def _read(self, row: Row) -> _MappedRow:
        """The row in the draft's ids: shared tokens one by one, what lies between them through its text."""
        read = self._rows.get(row.key)
        if read is None:
            opening, seen = begin(self._target, self._drafts, row.tokens)
            ends = frozenset(self._tokens.to_draft[end] for end in row.task.ends if end in self._tokens.to_draft)
            task = replace(row.task, rule=_MappedRule(row.task.rule, self._tokens), branching=None, ends=ends)
            read = self._rows[row.key] = _MappedRow(row.key, opening, len(opening), task, seen=seen)
        read.outer, read.remaining = row, row.remaining
        before = list(read.tokens)
        for shared, run in groupby(row.tokens[read.seen :], key=self._tokens.to_draft.__contains__):
            ids = list(run)
            if shared:
                read.tokens += [self._tokens.to_draft[token] for token in ids]
            else:
                read.tokens += encode(self._drafts, decode(self._target, ids))
        read.seen = len(row.tokens)
        read.tell(self._draft, before)
        return read
