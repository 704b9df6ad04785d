"""The draft of a call that names none, and whose form forces tokens."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.core.budget import Budget
from specdec.core.drafts import Draft, Proposer, SequenceView
from specdec.core.tree import EMPTY, Tree


class FormDraft(Draft, Proposer):
    """Guesses nothing, for any target: the engine proposes the tokens that a form forces."""

    instant = True

    def start(self, vocab_size: int) -> Proposer:
        return self

    def propose(self, seqs: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Tree]:
        return [EMPTY] * len(seqs)
