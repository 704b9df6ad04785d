"""What cached keys depend on, a sequence's part of a target pass, and the results of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from specdec.core.tree import EMPTY, Tree

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
class RowPass:
    """One sequence's part of a target pass: uncached text, then its branches, then the proposal.

    Nodes of branches and proposal are numbered together, from 0 on (-1 is the end of the text); `node(number)` is the
    number in the pass's `tree`. The first `num_cached` branches are cached. The proposal grows from `leaves`. A part
    that is not `complete` is a chunk of a prompt, and needs no logits.
    """

    text: list[int]
    branches: Tree
    num_cached: int
    leaves: Sequence[int]
    proposal: Tree = EMPTY
    complete: bool = True

    @property
    def tree(self) -> Tree:
        """All nodes of the pass, cached branches included."""
        tree = Tree.chain(self.text)
        if self.branches.tokens:
            tree = tree.graft(self.branches)
        if self.proposal.tokens:
            tree = tree.graft(self.proposal, [self.node(leaf) for leaf in self.leaves])
        return tree

    @property
    def keep(self) -> int:
        """How many nodes, at the end of the tree, need logits."""
        return (len(self.branches) - self.num_cached or 1) + len(self.proposal) if self.complete else 0

    @property
    def cost(self) -> int:
        """How many nodes the pass computes."""
        return len(self.text) + len(self.branches) - self.num_cached + len(self.proposal)

    def node(self, number: int) -> int:
        """The number of a node in the pass's tree."""
        return len(self.text) + number

    def path(self, numbers: Sequence[int] = ()) -> list[int]:
        """The uncached text followed by these nodes, in numbers of the pass's tree."""
        return [*range(len(self.text)), *map(self.node, numbers)]


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
