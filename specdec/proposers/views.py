"""Sequences as drafts of another kind read them: a search as its best branch, a prompt without its pictures."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.core.budget import Budget
from specdec.core.drafts import Draft, DraftTask, Proposer, SavedState, SequenceView
from specdec.core.tree import EMPTY, Tree


@dataclass(slots=True)
class ReadSequence:
    """A text, as a `SequenceView`, for a draft that is given other tokens than the target's sequence `outer` has."""

    id: int
    tokens: list[int]
    prompt_length: int
    task: DraftTask
    outer: SequenceView
    remaining: int = 2**31
    encoder_tokens: list[int] | None = None
    encoding: object | None = None
    prediction: list[int] | None = None
    tree: Tree = EMPTY
    leaves: Sequence[int] = (-1,)
    leaf_scores: Sequence[float] = (0.0,)

    def prefix(self, extra: Sequence[int] = ()) -> Tensor:
        return torch.tensor([[*self.tokens, *extra]])


def best_branch(seq: SequenceView) -> SequenceView:
    """The best branch of a search as a text, for drafts that guess for one text; any other sequence as it is."""
    if not seq.tree.tokens:
        return seq
    tokens, inputs = seq.tokens + branch_tokens(seq, seq.leaves[0]), (seq.encoder_tokens, seq.encoding, seq.prediction)
    return ReadSequence(seq.id, tokens, seq.prompt_length, seq.task, seq, seq.remaining, *inputs)


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


class TextAloneProposer(Proposer):
    """A proposer over shorter views of sequences that have pictures."""

    def __init__(self, proposer: Proposer, places: frozenset[int]) -> None:
        self._inner, self._places = proposer, places
        self._views: dict[int, _TextAlone] = {}

    def propose(self, seqs: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Tree]:
        return self._inner.propose([self._view(seq) for seq in seqs], budgets)

    def begin_round(self, seqs: Sequence[SequenceView], budgets: Sequence[Budget]) -> Collection[int]:
        return self._inner.begin_round([self._view(seq) for seq in seqs], budgets)

    def unread(self, seq: SequenceView) -> int:
        return self._inner.unread(self._view(seq))

    def read(self, seqs: Sequence[SequenceView], most: int) -> None:
        self._inner.read([self._view(seq) for seq in seqs], most)

    def fork(self, seq: SequenceView, source: int | SavedState, length: int) -> int:
        """Only texts without pictures, whose tokens have the same numbers in both."""
        return self._inner.fork(seq, source, length) if seq.task.pictures is None else 0

    def save(self, seq: SequenceView, length: int) -> SavedState | None:
        return self._inner.save(seq, length) if seq.task.pictures is None else None

    def drop(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._views.pop(seq_id, None)
        self._inner.drop(seq_ids)

    def bound(self, rows: int, columns: int) -> None:
        self._inner.bound(rows, columns)

    def _view(self, seq: SequenceView) -> Any:
        if seq.task.pictures is None:
            return seq
        view = self._views.get(seq.id)
        if view is None or view.source is not seq.tokens:
            view = self._views[seq.id] = _TextAlone(seq, self._places)
        view.follow(seq)
        return view


class _TextAlone:
    """A sequence without the placeholders in its prompt; what it has beside its tokens is the sequence's."""

    def __init__(self, seq: SequenceView, places: frozenset[int]) -> None:
        self.source = seq.tokens
        self.tokens = [token for token in seq.tokens[: seq.prompt_length] if token not in places]
        self.prompt_length, self._read = len(self.tokens), seq.prompt_length

    def follow(self, seq: SequenceView) -> None:
        """Takes in the sequence's new tokens."""
        self._seq = seq
        self.tokens += seq.tokens[self._read :]
        self._read = len(seq.tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._seq, name)
