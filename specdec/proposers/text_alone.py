"""Drafts that read text alone beside a target that sees: they get sequences without the placeholders of pictures."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from specdec.core.drafts import Draft, Plan, Proposer, SequenceView
from specdec.core.tree import Tree


class TextAloneDraft(Draft):
    """`drafter`, which has never seen the tokens `places`; they are left out of prompts with pictures."""

    def __init__(self, drafter: Draft, places: Collection[int]) -> None:
        self.drafter, self.places = drafter, frozenset(places)
        self.models, self.guesses_trees = drafter.models, drafter.guesses_trees
        self.needs_encoder_inputs = drafter.needs_encoder_inputs

    def __repr__(self) -> str:
        return repr(self.drafter)

    def start(self, vocab_size: int) -> TextAloneProposer:
        return TextAloneProposer(self.drafter.start(vocab_size), self.places)


class TextAloneProposer(Proposer):
    """A proposer over shorter views of sequences that have pictures."""

    def __init__(self, proposer: Proposer, places: frozenset[int]) -> None:
        self._proposer, self._places = proposer, places
        self._views: dict[int, _TextAlone] = {}

    @property
    def cache(self) -> Any:
        return self._proposer.cache

    def propose(self, seqs: Sequence[SequenceView], plans: Sequence[Plan]) -> list[Tree]:
        return self._proposer.propose([self._view(seq) for seq in seqs], plans)

    def drop(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._views.pop(seq_id, None)
        self._proposer.drop(seq_ids)

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
