"""Drafts with another tokenizer, translated through text: a guess is decoded, then encoded for the target.

A translation may be wrong; verification rejects it then.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from specdec.core.drafts import Draft, DraftTask, Plan, Sampler, SequenceView
from specdec.core.tree import Tree
from specdec.proposers.copying import cut, known_tokens
from specdec.proposers.other_tokenizer.base import (
    DraftSequence,
    OtherTokenizerDraft,
    OtherTokenizerProposer,
    Tokenizer,
    decode,
    encode,
)
from specdec.proposers.other_tokenizer.by_tokens import VocabularyIntersection

_WINDOW = 12  # tokens
_SLACK = 8  # tokens by which a window may be longer
_PARTIAL = "\ufffd"  # decoded from a part of a character
_LONGEST_CHARACTER = 4  # tokens


def window(tokenizer: Tokenizer, ids: list[int], low: int = 0) -> tuple[int, str]:
    """Start and text of the last 12 to 20 `ids`, from a start where the text encodes to the same ids if there is one.

    (Inside a character or a word it does not.)
    """
    first = max(low, len(ids) - _WINDOW)
    for start in range(first, max(low, first - _SLACK) - 1, -1):
        text = decode(tokenizer, ids[start:])
        if encode(tokenizer, text) == ids[start:]:
            return start, text
    return first, decode(tokenizer, ids[first:])


class _Likeliest(Sampler):
    """Picks the draft's likeliest token, since the strategy's noise and processors go by the target's tokens.

    Always computes the probability, as the translated guess gets the geometric mean.
    """

    needs_q = False

    def pick(
        self, seq: SequenceView, guesses: list[int], logits: Tensor, *, confident: bool = True
    ) -> tuple[int, float, Tensor | None]:
        confidence, token = torch.softmax(logits.float(), -1).max(-1)
        return int(token), float(confidence), None


class TextBridge(OtherTokenizerDraft):
    """Drafts through text with a drafter of another vocabulary (string-level match, arXiv 2502.05202, algorithm 2).

    The draft guesses greedily, so its q is one-hot, which match and rejection verification accept. Rejection accepts
    more of `by_tokens`.
    """

    def __repr__(self) -> str:
        return f"TextBridge({self.drafter!r})"

    @cached_property
    def by_tokens(self) -> Draft:
        """The same draft limited to shared tokens; raises VocabularyError if there are none."""
        return VocabularyIntersection(self.drafter, self.target_tokenizer, self.draft_tokenizer)

    def for_sampling(self, sampling: str | None) -> Draft:
        """Text for match verification, shared tokens for rejection."""
        return self.by_tokens if sampling in ("rejection", "block") else self

    def start(self, vocab_size: int) -> TextBridgeProposer:
        return TextBridgeProposer(self, len(self.draft_tokenizer), vocab_size)


class TextBridgeProposer(OtherTokenizerProposer):
    """Encodes new text for the draft, where the last tokens may change, and its guesses for the target."""

    def task(self, seq: SequenceView) -> DraftTask:
        end = self._draft_tokenizer.eos_token_id
        ends = frozenset[int]() if end is None else frozenset({end})
        return replace(seq.task, sampler=_Likeliest(), ends=ends)

    def read(self, seq: SequenceView, draft: DraftSequence) -> None:
        """Adds the text up to its last complete character."""
        new, draft.seen = self._new_text(seq.tokens, draft.seen)
        if new:
            start, text = window(self._draft_tokenizer, draft.tokens, draft.prompt_length)
            draft.write(start, encode(self._draft_tokenizer, text + new))

    def _new_text(self, tokens: list[int], seen: int) -> tuple[str, int]:
        """The text after the first `seen` tokens up to the last complete character, and the number of its tokens."""
        anchor = max(0, seen - _WINDOW)
        before = decode(self._target_tokenizer, tokens[anchor:seen])
        for end in range(len(tokens), max(seen, len(tokens) - _LONGEST_CHARACTER), -1):
            text = decode(self._target_tokenizer, tokens[anchor:end])
            if not text.endswith(_PARTIAL):
                return text[len(before) :], end
        return "", seen

    def translate(self, seq: SequenceView, draft: DraftSequence, guess: Tree, plan: Plan) -> Tree:
        """The guess in the target's tokens, as they continue the sequence."""
        ids = guess.tokens
        ended = self._draft_tokenizer.eos_token_id in ids
        if ended:
            ids = ids[: ids.index(self._draft_tokenizer.eos_token_id)]  # type: ignore[arg-type]
        tokens = self._continuation(seq.tokens, draft.seen, self._guessed_text(draft, ids))
        if ended and self._target_tokenizer.eos_token_id is not None and bool(tokens) == bool(ids):
            tokens = [*tokens, self._target_tokenizer.eos_token_id]
        tokens = known_tokens(tokens, self._vocab_size, seq.task.ends)
        chance = math.prod(guess.confidence or [1.0]) ** (1 / max(len(tokens), 1))
        return cut(tokens, [chance] * len(tokens), seq, plan, "bridge")

    def _guessed_text(self, draft: DraftSequence, guess: list[int]) -> str:
        """The text that the guess adds, up to its last complete character."""
        start = max(draft.prompt_length, len(draft.tokens) - _WINDOW)
        before = decode(self._draft_tokenizer, draft.tokens[start:])
        for end in range(len(guess), 0, -1):
            text = decode(self._draft_tokenizer, draft.tokens[start:] + guess[:end])
            if not text.endswith(_PARTIAL):
                return text[len(before) :] if text.startswith(before) else ""
        return ""

    def _continuation(self, tokens: list[int], seen: int, new: str) -> list[int]:
        """The target's tokens for `new` text after exactly `tokens`; empty if the two cannot be joined."""
        if not new:
            return []
        start, text = window(self._target_tokenizer, tokens[:seen])
        tail, whole = tokens[start:], encode(self._target_tokenizer, text + new)
        if whole[: len(tail)] == tail:
            return whole[len(tail) :]
        if seen < len(tokens):
            return []
        # The model's tokens may differ from the tokenizer's; the boundary must agree.
        alone = encode(self._target_tokenizer, text)
        if whole[: len(alone)] == alone:
            return whole[len(alone) :]
        after = encode(self._target_tokenizer, new)
        return after if decode(self._target_tokenizer, tail + after) == text + new else []
