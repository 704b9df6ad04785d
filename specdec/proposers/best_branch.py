"""Lets a draft that knows only sequences help a search: it continues the best branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.core.drafts import Commit, DraftSession, DraftTask, Plan, SavedState
from specdec.core.rounds import SequenceView
from specdec.core.tree import EMPTY, Tree
from specdec.options.checks import common_length


@dataclass(slots=True)
class ReadSequence:
    """A sequence as a draft reads it that knows only sequences of its own tokens."""

    id: int
    tokens: list[int]
    prompt_length: int
    task: DraftTask
    remaining: int = 2**31
    encoder_tokens: list[int] | None = None
    encoding: object | None = None
    prediction: list[int] | None = None
    tree: Tree = EMPTY
    leaves: Sequence[int] = (-1,)
    leaf_scores: Sequence[float] = (0.0,)

    def prefix(self, extra: Sequence[int] = ()) -> Tensor:
        return torch.tensor([[*self.tokens, *extra]])


class BestLeaf(DraftSession):
    """A session of sequences at work on searches; what it proposes continues their first leaf.

    The best branch of a search may be another one in every round: then the inner session is told to go back.
    """

    guesses_branches = True

    def __init__(self, session: DraftSession) -> None:
        self._session = session
        self._texts: dict[int, list[int]] = {}

    def propose(self, seqs: Sequence[SequenceView], plans: Sequence[Plan]) -> list[Tree]:
        """The inner session's chain after the best branch of each sequence."""
        return self._session.propose([self._leader(seq) for seq in seqs], plans)

    @property
    def cache(self) -> Any:
        return self._session.cache

    def join(self, seq: SequenceView, source: int | SavedState, length: int) -> int:
        return self._session.join(seq, source, length)

    def keep(self, seq: SequenceView, length: int) -> SavedState | None:
        """Passed on for sequences that are no searches."""
        return None if seq.id in self._texts else self._session.keep(seq, length)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Passed on for sequences that are no searches."""
        self._session.commit([commit for commit in commits if commit.seq.id not in self._texts])

    def rewind(self, seq: SequenceView, length: int) -> None:
        self._session.rewind(seq, length)

    def release(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._texts.pop(key, None)
        self._session.release(keys)

    def _leader(self, seq: SequenceView) -> SequenceView:
        """The best branch of a search as a sequence; a text is one already."""
        if not seq.tree.tokens:
            return seq
        tokens = seq.tokens + branch_tokens(seq, seq.leaves[0])
        inputs: dict[str, Any] = {
            "encoder_tokens": seq.encoder_tokens,
            "encoding": seq.encoding,
            "prediction": seq.prediction,
        }
        leader = ReadSequence(seq.id, tokens, seq.prompt_length, seq.task, seq.remaining, **inputs)
        before = self._texts.get(seq.id, [])
        if (same := common_length(before, tokens)) < len(before):
            self._session.rewind(leader, same)
        self._texts[seq.id] = tokens
        return leader


def branch_tokens(seq: SequenceView, leaf: int) -> list[int]:
    """The tokens between the sequence's text and the end of branch `leaf`, its last included."""
    return [seq.tree.tokens[node] for node in seq.tree.path(leaf)]
