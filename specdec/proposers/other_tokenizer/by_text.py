"""Drafts that speak another tokenizer: text goes over, a guess comes back as text and is encoded for the target.

Whatever the two tokenizers do to the text, the result is only a proposal: verification decides.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from specdec.core.drafts import BatchDrafter, DraftSession, DraftTask, Plan
from specdec.core.rounds import SequenceView
from specdec.core.tree import Tree
from specdec.proposers.copying import cut, known_tokens
from specdec.proposers.other_tokenizer.base import (
    DraftSequence,
    OtherTokenizerDrafter,
    OtherTokenizerSession,
    Tokenizer,
    decode,
    encode,
)
from specdec.proposers.other_tokenizer.by_tokens import VocabularyIntersection

_WINDOW = 12
_SLACK = 8
_PARTIAL = "\ufffd"
_LONGEST_CHARACTER = 4


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


class _Likeliest:
    """The draft's own best guess: noise and processors of the strategy are keyed by the target's tokens.

    Its probability is always told, as that of the whole guess is put into one number.
    """

    needs_q = False

    def pick(
        self, seq: SequenceView, guesses: list[int], logits: Tensor, *, confident: bool = True
    ) -> tuple[int, float, Tensor | None]:
        confidence, token = torch.softmax(logits.float(), -1).max(-1)
        return int(token), float(confidence), None


class TextBridge(OtherTokenizerDrafter):
    """Drafts through text with a drafter of another vocabulary (string-level match, arXiv 2502.05202, algorithm 2).

    The draft guesses greedily; what comes back is one-hot, which match and rejection verification both take. Under
    rejection shared tokens serve better (`by_tokens`).
    """

    def __repr__(self) -> str:
        return f"TextBridge({self.drafter!r})"

    @cached_property
    def by_tokens(self) -> BatchDrafter:
        """The same draft, of tokens that both vocabularies have; raises VocabularyError if there are none."""
        return VocabularyIntersection(self.drafter, self.target_tokenizer, self.draft_tokenizer)

    def for_sampling(self, sampling: str | None) -> BatchDrafter:
        """Text for match verification, shared tokens for rejection."""
        return self.by_tokens if sampling in ("rejection", "block") else self

    def start(self, vocab_size: int) -> TextBridgeSession:
        # Width is the draft's own affair: no logits of it are cut or padded to the target's.
        inner = self.drafter.start(len(self.draft_tokenizer))
        return TextBridgeSession(inner, self.target_tokenizer, self.draft_tokenizer, vocab_size)


class TextBridgeSession(OtherTokenizerSession):
    """A bridge at work: sequences in the draft's own tokens, which change at their end as the text goes on."""

    def __init__(self, draft: DraftSession, target: Tokenizer, drafts: Tokenizer, vocab_size: int) -> None:
        super().__init__(draft, target, drafts)
        self._vocab_size = vocab_size

    def task(self, seq: SequenceView) -> DraftTask:
        end = self._drafts.eos_token_id
        ends = frozenset[int]() if end is None else frozenset({end})
        return replace(seq.task, rule=_Likeliest(), branching=None, ends=ends)

    def read(self, seq: SequenceView, draft: DraftSequence) -> None:
        """Adds the text up to the last whole character."""
        new, draft.seen = self._new_text(seq.tokens, draft.seen)
        if new:
            start, text = window(self._drafts, draft.tokens, draft.prompt_length)
            draft.tokens[start:] = encode(self._drafts, text + new)

    def _new_text(self, tokens: list[int], seen: int) -> tuple[str, int]:
        """The text after the first `seen` tokens, and the tokens it ends at: half a character waits for the rest."""
        anchor = max(0, seen - _WINDOW)
        before = decode(self._target, tokens[anchor:seen])
        for end in range(len(tokens), max(seen, len(tokens) - _LONGEST_CHARACTER), -1):
            text = decode(self._target, tokens[anchor:end])
            if not text.endswith(_PARTIAL):
                return text[len(before) :], end
        return "", seen

    def translated(self, seq: SequenceView, draft: DraftSequence, guess: Tree, plan: Plan) -> Tree:
        """The guess as the target's tokenizer writes it after the sequence's text."""
        ids = guess.tokens
        ended = self._drafts.eos_token_id in ids
        if ended:
            ids = ids[: ids.index(self._drafts.eos_token_id)]  # type: ignore[arg-type]
        tokens = self._continuation(seq.tokens, draft.seen, self._guessed_text(draft, ids))
        if ended and self._target.eos_token_id is not None and bool(tokens) == bool(ids):
            tokens = [*tokens, self._target.eos_token_id]
        tokens = known_tokens(tokens, self._vocab_size, seq.task.ends)
        chance = math.prod(guess.confidence or [1.0]) ** (1 / max(len(tokens), 1))
        return cut(tokens, [chance] * len(tokens), seq, plan, "bridge")

    def _guessed_text(self, draft: DraftSequence, guess: list[int]) -> str:
        """The text of the draft's guess after its sequence, whole characters only."""
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
