"""A search as a text: its best branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.core.drafts import DraftTask, SequenceView
from specdec.core.tree import EMPTY, Tree


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


def best_branch(seq: SequenceView) -> SequenceView:
    """The best branch of a search as a text, for drafts that guess for one text; any other sequence as it is."""
    if not seq.tree.tokens:
        return seq
    tokens, inputs = seq.tokens + branch_tokens(seq, seq.leaves[0]), (seq.encoder_tokens, seq.encoding, seq.prediction)
    return ReadSequence(seq.id, tokens, seq.prompt_length, seq.task, seq.remaining, *inputs)


def branch_tokens(seq: SequenceView, leaf: int) -> list[int]:
    """The tokens of the path from the sequence's text to `leaf`, inclusive."""
    return [seq.tree.tokens[node] for node in seq.tree.path(leaf)]
