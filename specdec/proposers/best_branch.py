"""Lets a draft that knows only sequences help a search: it continues the best branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.core.drafts import Commit, DraftSession, DraftTask, Kept, Plan
from specdec.core.rounds import SequenceView
from specdec.core.tree import EMPTY, Tree
from specdec.options.checks import common_length


@dataclass(slots=True)
class ReadSequence:
    """A row as a draft reads it that knows only sequences of its own tokens."""

    key: int
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

    def propose(self, rows: Sequence[SequenceView], plans: Sequence[Plan]) -> list[Tree]:
        """The inner session's chain after the best branch of each row."""
        return self._session.propose([self._leader(row) for row in rows], plans)

    @property
    def cache(self) -> Any:
        return self._session.cache

    def join(self, row: SequenceView, source: int | Kept, length: int) -> int:
        return self._session.join(row, source, length)

    def keep(self, row: SequenceView, length: int) -> Kept | None:
        """Passed on for rows that are no searches."""
        return None if row.key in self._texts else self._session.keep(row, length)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Passed on for rows that are no searches."""
        self._session.commit([commit for commit in commits if commit.row.key not in self._texts])

    def rewind(self, row: SequenceView, length: int) -> None:
        self._session.rewind(row, length)

    def release(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._texts.pop(key, None)
        self._session.release(keys)

    def _leader(self, row: SequenceView) -> SequenceView:
        """The best branch of a search as a sequence; a text is one already."""
        if not row.tree.tokens:
            return row
        tokens = row.tokens + branch_tokens(row, row.leaves[0])
        inputs: dict[str, Any] = {
            "encoder_tokens": row.encoder_tokens,
            "encoding": row.encoding,
            "prediction": row.prediction,
        }
        leader = ReadSequence(row.key, tokens, row.prompt_length, row.task, row.remaining, **inputs)
        before = self._texts.get(row.key, [])
        if (same := common_length(before, tokens)) < len(before):
            self._session.rewind(leader, same)
        self._texts[row.key] = tokens
        return leader


def branch_tokens(row: SequenceView, leaf: int) -> list[int]:
    """The tokens between the row's text and the end of branch `leaf`, its last included."""
    return [row.tree.tokens[node] for node in row.tree.path(leaf)]
