"""Lets a draft that proposes for single texts help a search: it continues the best branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.core.drafts import Commit, DraftSession, DraftTask, Plan, SavedState, SequenceView
from specdec.core.tree import EMPTY, Tree
from specdec.options.checks import common_length


@dataclass(slots=True)
class ReadSequence:
    """A text, as a `SequenceView`, for a draft that is given other tokens than the target's sequence has."""

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


class BestBranch(DraftSession):
    """Wraps a session that proposes for single texts; for a search, it continues the first leaf.

    The best branch may change from round to round; then the inner session rewinds.
    """

    guesses_branches = True

    def __init__(self, session: DraftSession) -> None:
        self._session = session
        self._texts: dict[int, list[int]] = {}

    def propose(self, seqs: Sequence[SequenceView], plans: Sequence[Plan]) -> list[Tree]:
        """The inner session's proposals after the best branch of each sequence."""
        return self._session.propose([self._best_branch(seq) for seq in seqs], plans)

    @property
    def cache(self) -> Any:
        return self._session.cache

    def join(self, seq: SequenceView, source: int | SavedState, length: int) -> int:
        return self._session.join(seq, source, length)

    def keep(self, seq: SequenceView, length: int) -> SavedState | None:
        """Asks the inner session, except for searches."""
        return None if seq.id in self._texts else self._session.keep(seq, length)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Commits to the inner session, except for searches."""
        self._session.commit([commit for commit in commits if commit.seq.id not in self._texts])

    def rewind(self, seq: SequenceView, length: int) -> None:
        self._session.rewind(seq, length)

    def release(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._texts.pop(seq_id, None)
        self._session.release(seq_ids)

    def _best_branch(self, seq: SequenceView) -> SequenceView:
        """The best branch of a search as a text; any other sequence as it is."""
        if not seq.tree.tokens:
            return seq
        tokens = seq.tokens + branch_tokens(seq, seq.leaves[0])
        inputs = (seq.encoder_tokens, seq.encoding, seq.prediction)
        branch = ReadSequence(seq.id, tokens, seq.prompt_length, seq.task, seq.remaining, *inputs)
        before = self._texts.get(seq.id, [])
        if (same := common_length(before, tokens)) < len(before):
            self._session.rewind(branch, same)
        self._texts[seq.id] = tokens
        return branch


def branch_tokens(seq: SequenceView, leaf: int) -> list[int]:
    """The tokens of the path from the sequence's text to `leaf`, inclusive."""
    return [seq.tree.tokens[node] for node in seq.tree.path(leaf)]
