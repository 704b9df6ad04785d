"""Drafts with another tokenizer than the target's: each sequence is kept in the draft's own tokens as well.

A guess is translated through text; a wrong translation is rejected by verification.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase as Tokenizer

from specdec.core.budget import Budget
from specdec.core.drafts import Draft, DraftTask, SavedState, SequenceView
from specdec.core.tree import Tree, common_length
from specdec.decoding.processors import Processors
from specdec.decoding.samplers import GreedySampler
from specdec.proposers.chains import cut, valid_tokens
from specdec.proposers.views import SequenceAs, WrappedProposer, best_branch

_WINDOW = 12  # tokens
_SLACK = 8  # tokens by which a window may be longer
_PARTIAL = "\ufffd"  # decoded from a part of a character
_LONGEST_CHARACTER = 4  # tokens


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of `text`, without special tokens around them."""
    return tokenizer.encode(text, add_special_tokens=False, verbose=False) if text else []


def decode_raw(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of `ids`, with special tokens and all spaces."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""


class TextBridge(Draft):
    """Drafts through text with a draft of another vocabulary (string-level match, arXiv 2502.05202, algorithm 2).

    The draft guesses greedily, so its q is one-hot, which every way of sampling allows for.
    """

    def __init__(self, draft: Draft, target_tokenizer: Tokenizer, draft_tokenizer: Tokenizer) -> None:
        self.inner, self.models, self.needs_encoder_inputs = draft, draft.models, draft.needs_encoder_inputs
        self.target_tokenizer, self.draft_tokenizer = target_tokenizer, draft_tokenizer

    def __repr__(self) -> str:
        return f"TextBridge({self.inner!r})"

    @property
    def kind(self) -> str:
        return f"{self.inner.kind} of another tokenizer"

    def start(self, vocab_size: int) -> TextBridgeProposer:
        return TextBridgeProposer(self, vocab_size)


class TextBridgeProposer(WrappedProposer):
    """Encodes new text for the draft, where the last tokens may change, and its guesses for the target.

    The draft sees the best branch of a search. A view's `prompt_length` covers the beginning-of-text token alone: the
    rest may be encoded anew.
    """

    def __init__(self, draft: TextBridge, vocab_size: int) -> None:
        super().__init__(draft.inner.start(len(draft.draft_tokenizer)))
        self._target_tokenizer, self._draft_tokenizer = draft.target_tokenizer, draft.draft_tokenizer
        self._vocab_size = vocab_size
        self._seqs: dict[int, SequenceAs] = {}

    def propose(self, seqs: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Tree]:
        views = [self._view(seq) for seq in seqs]
        guesses = self._inner.propose(views, budgets)
        return [self._translate(*parts) for parts in zip(views, guesses, budgets, strict=True)]

    def fork(self, seq: SequenceView, source: int | SavedState, length: int) -> int:
        """Copies what both texts share in the draft's tokens; `length` counts the target's, and is returned."""
        view = self._view(seq)
        if isinstance(source, SavedState):
            tokens, inner = source.state
        else:
            tokens, inner = (self._seqs[source].tokens if source in self._seqs else []), source
        shared = common_length(tokens, view.tokens[:-1])
        return length if shared and self._inner.fork(view, inner, shared) else 0

    def save(self, seq: SequenceView, length: int) -> SavedState | None:
        if (view := self._seqs.get(seq.id)) is None:
            return None
        saved = self._inner.save(view, len(view.tokens))
        return None if saved is None else SavedState(length, (view.tokens[: saved.length], saved), saved.bytes)

    def drop(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._seqs.pop(seq_id, None)
        super().drop(seq_ids)

    def _view(self, seq: SequenceView) -> SequenceAs:
        """The sequence in the draft's tokens, after a BOS token if the draft's tokenizer adds one or `seq` has one."""
        seq, view = best_branch(seq), self._seqs.get(seq.id)
        if view is None or not _begins_as(seq.tokens, view.outer.tokens, view.num_read):
            bos, target_bos = self._draft_tokenizer.bos_token_id, self._target_tokenizer.bos_token_id
            has_bos = target_bos is not None and seq.tokens[:1] == [target_bos]
            opening = [bos] if bos is not None and (has_bos or self._draft_tokenizer.encode("")[:1] == [bos]) else []
            texts = {"tokens": opening, "prompt_length": len(opening), "encoder_tokens": None, "prediction": None}
            view = SequenceAs(seq, **texts, task=self._task(seq), num_read=int(has_bos))
            self._seqs[seq.id] = view
        view.outer = seq
        self._extend(view)
        return view

    def _task(self, seq: SequenceView) -> DraftTask:
        """The draft guesses chains of its likeliest tokens: the strategy's noise and processors go by the target's."""
        end, likeliest = self._draft_tokenizer.eos_token_id, GreedySampler(Processors(), branches=0)
        return replace(seq.task, sampler=likeliest, ends=frozenset(() if end is None else (end,)))

    def _extend(self, view: SequenceAs) -> None:
        """Adds the text up to its last complete character; the draft's list of tokens stays if it only grows."""
        length, whole = view.num_read, view.outer.tokens
        context = whole[max(0, length - _WINDOW) : length]
        before, text, count = _complete(self._target_tokenizer, context, whole[length:], _LONGEST_CHARACTER)
        view.num_read += count
        if new := text[len(before) :]:
            start, text = window(self._draft_tokenizer, view.tokens, view.prompt_length)
            tokens, old = encode(self._draft_tokenizer, text + new), view.tokens[start:]
            if tokens[: len(old)] == old:
                view.tokens += tokens[len(old) :]
            else:
                view.tokens = view.tokens[:start] + tokens

    def _translate(self, view: SequenceAs, guess: Tree, budget: Budget) -> Tree:
        """The draft's guess in the target's tokens."""
        seq, ids, end = view.outer, guess.tokens, self._draft_tokenizer.eos_token_id
        ended = end in ids
        if ended:
            ids = ids[: ids.index(end)]
        context = view.tokens[max(view.prompt_length, len(view.tokens) - _WINDOW) :]
        before, text, _ = _complete(self._draft_tokenizer, context, ids, len(ids))
        new = text[len(before) :] if text.startswith(before) else ""
        tokens = self._continuation(seq.tokens, view.num_read, new)
        if ended and self._target_tokenizer.eos_token_id is not None and bool(tokens) == bool(ids):
            tokens = [*tokens, self._target_tokenizer.eos_token_id]
        tokens = valid_tokens(tokens, self._vocab_size, seq.task.ends)
        chance = math.prod(guess.confidence or [1.0]) ** (1 / max(len(tokens), 1))
        return cut(tokens, [chance] * len(tokens), seq, budget, "bridge" if guess.tokens or guess.source else "")

    def _continuation(self, tokens: list[int], length: int, new: str) -> list[int]:
        """The target's tokens for `new` text after exactly `tokens`; empty if the two cannot be joined."""
        if not new:
            return []
        start, text = window(self._target_tokenizer, tokens[:length])
        tail, whole = tokens[start:], encode(self._target_tokenizer, text + new)
        if whole[: len(tail)] == tail:
            return whole[len(tail) :]
        if length < len(tokens):
            return []
        # The model's tokens may differ from the tokenizer's; the boundary must agree.
        alone = encode(self._target_tokenizer, text)
        if whole[: len(alone)] == alone:
            return whole[len(alone) :]
        after = encode(self._target_tokenizer, new)
        return after if decode_raw(self._target_tokenizer, tail + after) == text + new else []


def _begins_as(tokens: list[int], others: list[int], length: int) -> bool:
    """Whether a text begins with the first `length` tokens of another one, or is the same list, which only grows."""
    return tokens is others or tokens[:length] == others[:length]


def window(tokenizer: Tokenizer, ids: list[int], low: int = 0) -> tuple[int, str]:
    """Start and text of the last 12 to 20 `ids`, from a start where the text encodes to the same ids if there is one.

    (Inside a character or a word it does not.)
    """
    first = max(low, len(ids) - _WINDOW)
    for start in range(first, max(low, first - _SLACK) - 1, -1):
        text = decode_raw(tokenizer, ids[start:])
        if encode(tokenizer, text) == ids[start:]:
            return start, text
    return first, decode_raw(tokenizer, ids[first:])


def _complete(tokenizer: Tokenizer, context: list[int], new: list[int], most: int) -> tuple[str, str, int]:
    """The text of `context`, the text with as many of `new` behind it as end a character, and how many these are.

    Fewer than `most` of `new` are left out, or all.
    """
    before = decode_raw(tokenizer, context)
    for count in range(len(new), max(0, len(new) - most), -1):
        text = decode_raw(tokenizer, context + new[:count])
        if not text.endswith(_PARTIAL):
            return before, text, count
    return before, before, 0
