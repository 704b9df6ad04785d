"""Sequences, their part of a target pass, and what a round came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from specdec.core.tree import EMPTY, Tree

if TYPE_CHECKING:
    from specdec.core.drafts import DraftTask
    from specdec.core.tree import Step


class Context(NamedTuple):
    """What a text's keys and values depend on besides its tokens, as digests: equal where these are equal.

    `model` is the target's state, `salt` the caller's, `inputs` embeddings or what an encoder reads, if any.
    """

    model: bytes
    salt: str = ""
    inputs: bytes = b""


@dataclass(frozen=True, slots=True)
class RowPass:
    """One sequence's part of a target pass: text that it has not read, its branches, the draft's proposal, in this
    order.

    Branches and proposal are numbered together, from 0 on (-1 is the end of the text); a node's number in the `tree` of
    the pass is `node(number)`. The first `num_cached` branches are in the cache. `leaves` are the branches that the
    proposal grows from. A part that is not `complete` leaves text unread, and asks for no scores.
    """

    text: list[int]
    branches: Tree
    num_cached: int
    leaves: Sequence[int]
    proposal: Tree = EMPTY
    complete: bool = True

    @property
    def tree(self) -> Tree:
        """All nodes of the pass."""
        tree = Tree.chain(self.text)
        if self.branches.tokens:
            tree = tree.graft(self.branches)
        if not self.proposal.tokens:
            return tree
        return tree.graft(self.proposal, [self.node(leaf) for leaf in self.leaves])

    @property
    def keep(self) -> int:
        """How many nodes, at the end of the tree, need scores."""
        return (len(self.branches) - self.num_cached or 1) + len(self.proposal) if self.complete else 0

    @property
    def cost(self) -> int:
        """How many nodes the target computes."""
        return len(self.text) + len(self.branches) - self.num_cached + len(self.proposal)

    def node(self, number: int) -> int:
        """The number in the tree of the pass."""
        return len(self.text) + number

    def path(self, numbers: Sequence[int] = ()) -> list[int]:
        """The unread text and these nodes after it, in the numbers of the tree."""
        text = len(self.text)
        return [*range(text), *(text + number for number in numbers)]


@dataclass(frozen=True, slots=True)
class SequenceRound:
    """What a round came to for one sequence.

    `drafted` counts proposed nodes and `depth` the longest path of them; the first `accepted` of `steps` were decided
    by proposed nodes; `finish` says why the sequence ended, if it did. `tested` are the draft's beliefs in the nodes
    that came into question, and whether they came true; they lay on `levels` levels of the proposal. `prefill` says
    that a prompt was read in this round, by the target or the draft.
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
    """One turn of the loop: what it came to for every sequence, the nodes of its target passes, and where the seconds
    went.

    A request's rounds have its own `seqs`; `others` took part in the same passes, whose nodes and seconds are all told.
    """

    seqs: list[SequenceRound]
    nodes: int
    draft_seconds: float
    verify_seconds: float
    select_seconds: float
    seconds: float
    others: Sequence[SequenceRound] = ()


class SequenceView(Protocol):
    """One sequence or search as drafts and strategies may see it: its id, its text so far, where the prompt ends.

    A search has a text that all its branches share, and a tree of branches that grow from it; `leaves` are the nodes
    that will be continued, best first, with their `leaf_scores`. One sequence has the leaf -1, the end of its text.
    `remaining` is how many tokens may still follow a leaf. `encoder_tokens` are the ids an encoder-decoder target read,
    `encoding` is what its encoder made of its input, `prediction` are ids that the output may resemble. `task` is what
    the sequence's request wants of a draft.
    """

    id: int
    tokens: list[int]
    tree: Tree
    leaves: Sequence[int]
    prompt_length: int
    encoder_tokens: list[int] | None
    encoding: object | None
    prediction: list[int] | None
    task: DraftTask

    @property
    def leaf_scores(self) -> Sequence[float]: ...

    @property
    def remaining(self) -> int: ...

    def prefix(self, extra: Sequence[int] = ()) -> Tensor:
        """The text so far, followed by `extra`, as ids `[1, length]` where the logits are, to be read at once."""
