"""What cached keys depend on, and the results of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from specdec.core.tree import Step

CHUNK = 2048
"""The most prompt tokens of one pass, while no other sequence waits for it."""
SHARED_CHUNK = 256
"""The same while sequences that have read their prompts wait for this pass."""
VOID_COLUMNS = 64
"""Columns of a row of the cache that dead branches may leave empty before the row is compacted."""


class Context(NamedTuple):
    """What keys and values depend on besides the tokens: sequences share them only where their contexts are equal.

    `model`: digest of the target's state; `salt`: the caller's; `inputs`: digest of embeddings or encoder inputs.
    """

    model: bytes
    salt: str = ""
    inputs: bytes = b""


@dataclass(frozen=True, slots=True)
class SequenceRound:
    """The result of a round for one sequence.

    `drafted`: nodes of the proposal; `depth`: its longest path. The draft had guessed the tokens of the first
    `accepted` steps. `finish`: why the sequence ended, or None. `tested`: the confidence of each node that the strategy
    reached, and whether it was accepted; these nodes lie on `levels` levels of the proposal. `prefill`: the target or
    the draft read a prompt in this round.
    """

    id: int
    drafted: int
    depth: int
    accepted: int
    prefill: bool
    source: str
    tested: Sequence[tuple[float, bool]]
    levels: int
    steps: list[Step]
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of the loop: each sequence's result, the nodes that the target computed, and the seconds.

    A request gets rounds with its own `seqs`; `others` shared the passes. Nodes and seconds cover both.
    """

    seqs: list[SequenceRound]
    nodes: int
    draft_seconds: float
    verify_seconds: float
    select_seconds: float
    seconds: float
    others: Sequence[SequenceRound] = ()

    def of(self, seqs: list[SequenceRound]) -> Round:
        """The round with these sequences as its own, and the rest as others."""
        if len(seqs) == len(self.seqs):
            return self
        ids = {seq.id for seq in seqs}
        return replace(self, seqs=seqs, others=[seq for seq in self.seqs if seq.id not in ids])
