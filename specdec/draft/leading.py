"""Lets a draft that knows only sequences help a search: it continues the best branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.types import EMPTY, DraftSession, Plan, Row, Tree


@dataclass(slots=True)
class ReadRow:
    """A row as a draft reads it that knows only sequences of its own tokens."""

    key: int
    tokens: list[int]
    prompt_length: int
    remaining: int = 2**31
    encoder_tokens: list[int] | None = None
    prediction: list[int] | None = None
    tree: Tree = EMPTY
    leaves: Sequence[int] = (-1,)
    leaf_scores: Sequence[float] = (0.0,)

    def prefix(self, extra: Sequence[int] = ()) -> Tensor:
        return torch.tensor([[*self.tokens, *extra]])


class Leading:
    """A session of sequences at work on searches; what it proposes continues their first leaf."""

    branches = True

    def __init__(self, session: DraftSession) -> None:
        self._session = session

    def propose(self, rows: Sequence[Row], plans: Sequence[Plan]) -> list[Tree]:
        """The inner session's chain after the best branch of each row."""
        return self._session.propose([_leader(row) for row in rows], plans)

    def release(self, keys: Sequence[int]) -> None:
        """Passed on."""
        self._session.release(keys)


def tail(row: Row, leaf: int) -> list[int]:
    """The tokens between the row's text and the end of branch `leaf`, its last included."""
    return [row.tree.tokens[node] for node in row.tree.path(leaf)]


def _leader(row: Row) -> ReadRow:
    """The best branch of a search as a sequence."""
    tokens = row.tokens + tail(row, row.leaves[0])
    return ReadRow(row.key, tokens, row.prompt_length, row.remaining, row.encoder_tokens, row.prediction)
