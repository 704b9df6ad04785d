"""Sequences as drafts of another kind read them: a search as its best branch, a prompt without its pictures."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.core.budget import Budget
from specdec.core.drafts import Draft, Proposer, SavedState, SequenceView
from specdec.core.tree import EMPTY, Tree


class SequenceAs:
    """The sequence `outer` as a draft sees it: with these `values` in place of its values.

    `num_read`: of how many tokens of the outer text `tokens` were made, where they follow it.
    """

    outer: SequenceView
    tokens: list[int]
    num_read: int

    def __init__(self, outer: SequenceView, **values: Any) -> None:
        vars(self).update(values, outer=outer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.outer, name)

    def prefix(self, extra: Sequence[int] = ()) -> Tensor:
        """The ids `[1, length]` of this text and of `extra`."""
        return torch.tensor([[*self.tokens, *extra]])


def best_branch(seq: SequenceView) -> SequenceView:
    """The best branch of a search as a text, for drafts that guess for one text; any other sequence as it is."""
    if not seq.tree.tokens:
        return seq
    tokens = seq.tokens + branch_tokens(seq, seq.leaves[0])
    return SequenceAs(seq, tokens=tokens, tree=EMPTY, leaves=(-1,), leaf_scores=(0.0,))


def branch_tokens(seq: SequenceView, leaf: int) -> list[int]:
    """The tokens of the path from the sequence's text to `leaf`, inclusive."""
    return [seq.tree.tokens[node] for node in seq.tree.path(leaf)]


class WrappedDraft(Draft):
    """Runs the draft `inner`, and describes itself like it."""

    def __init__(self, inner: Draft) -> None:
        self.inner, self.models, self.hidden_layers = inner, inner.models, inner.hidden_layers
        self.guesses_trees, self.needs_encoder_inputs = inner.guesses_trees, inner.needs_encoder_inputs
        self.is_cached = inner.is_cached


class TextAloneDraft(WrappedDraft):
    """A draft that has never seen the tokens `places`; they are left out of prompts with pictures."""

    def __init__(self, inner: Draft, places: Collection[int]) -> None:
        super().__init__(inner)
        self.places = frozenset(places)

    def __repr__(self) -> str:
        return repr(self.inner)

    def start(self, vocab_size: int) -> TextAloneProposer:
        return TextAloneProposer(self.inner.start(vocab_size), self.places)


class WrappedProposer(Proposer):
    """Has the proposer `inner` guess, for sequences as `_view` shows them."""

    def __init__(self, inner: Proposer) -> None:
        self._inner = inner

    def _view(self, seq: SequenceView) -> Any:
        return seq

    def propose(self, seqs: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Tree]:
        return self._inner.propose([self._view(seq) for seq in seqs], budgets)

    def begin_round(self, seqs: Sequence[SequenceView], budgets: Sequence[Budget]) -> Collection[int]:
        return self._inner.begin_round([self._view(seq) for seq in seqs], budgets)

    def unread(self, seq: SequenceView) -> int:
        return self._inner.unread(self._view(seq))

    def read(self, seqs: Sequence[SequenceView], most: int) -> None:
        self._inner.read([self._view(seq) for seq in seqs], most)

    def fork(self, seq: SequenceView, source: int | SavedState, length: int) -> int:
        return self._inner.fork(self._view(seq), source, length)

    def save(self, seq: SequenceView, length: int) -> SavedState | None:
        return self._inner.save(self._view(seq), length)

    def drop(self, seq_ids: Sequence[int]) -> None:
        self._inner.drop(seq_ids)

    def bound(self, rows: int, columns: int) -> None:
        self._inner.bound(rows, columns)


class TextAloneProposer(WrappedProposer):
    """A proposer over shorter views of sequences that have pictures, without the placeholders `places` in prompts."""

    def __init__(self, inner: Proposer, places: frozenset[int]) -> None:
        super().__init__(inner)
        self._places = places
        self._views: dict[int, SequenceAs] = {}

    def fork(self, seq: SequenceView, source: int | SavedState, length: int) -> int:
        """Only texts without pictures, whose tokens have the same numbers in both."""
        return super().fork(seq, source, length) if seq.task.pictures is None else 0

    def save(self, seq: SequenceView, length: int) -> SavedState | None:
        return super().save(seq, length) if seq.task.pictures is None else None

    def drop(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._views.pop(seq_id, None)
        super().drop(seq_ids)

    def _view(self, seq: SequenceView) -> Any:
        if seq.task.pictures is None:
            return seq
        view = self._views.get(seq.id)
        if view is None or view.whole is not seq.tokens:
            prompt = [token for token in seq.tokens[: seq.prompt_length] if token not in self._places]
            texts = {"tokens": prompt, "prompt_length": len(prompt), "whole": seq.tokens}
            view = self._views[seq.id] = SequenceAs(seq, num_read=seq.prompt_length, **texts)
        view.outer = seq
        view.tokens += seq.tokens[view.num_read :]
        view.num_read = len(seq.tokens)
        return view
