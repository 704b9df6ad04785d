"""Trees of candidate tokens, what the target says of their nodes, and the steps that come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

_NO_Q = torch.empty(0)  # known text was not drawn


@dataclass(frozen=True, slots=True)
class Tree:
    """Candidate tokens of one sequence, parents before children; `-1` is the parent of nodes that continue the known
    text.

    In a draft's proposal for a sequence with several leaves, the parent `-1 - i` stands for leaf i.

    `confidence` is the draft's probability of each node; `q[node]` `[vocab]` its whole distribution (float32, after
    processors) where the node was drawn from one; `q=None` stands for a one-hot draft, which is certain of its guess.
    `source` names who proposed it.
    """

    tokens: list[int]
    parents: list[int]
    confidence: list[float] | None = None
    q: Sequence[Tensor] | Tensor | None = None
    source: str = ""

    @classmethod
    def chain(
        cls,
        tokens: list[int],
        confidence: list[float] | None = None,
        q: Sequence[Tensor] | Tensor | None = None,
        source: str = "",
    ) -> Tree:
        """A tree with one path."""
        return cls(tokens, list(range(-1, len(tokens) - 1)), confidence, q, source)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether every node continues the one before it."""
        return self.parents == list(range(-1, len(self.parents) - 1))

    def graft(self, other: Tree, leaves: Sequence[int] = ()) -> Tree:
        """This tree with `other` growing from its nodes `leaves`; without any, from the last one."""
        n = len(self.tokens)
        ends = leaves or (n - 1,)
        return Tree(
            self.tokens + other.tokens,
            self.parents + [p + n if p >= 0 else ends[-1 - p] for p in other.parents],
            None if other.confidence is None else [1.0] * n + other.confidence,
            None if other.q is None else [_NO_Q] * n + list(other.q),
            other.source,
        )

    def part(self, nodes: Sequence[int], text: int = 0) -> Tree:
        """Of these `nodes`, parents before children, those after the first `text`, as a tree that grows from them."""
        number = {node: i - text for i, node in enumerate(nodes)}
        kept = nodes[text:]
        return Tree(
            [self.tokens[node] for node in kept],
            [max(number.get(self.parents[node], -1), -1) for node in kept],
            source=self.source,
        )

    def children(self) -> dict[tuple[int, int], int]:
        """`(parent, token) -> node`, the first of equal siblings."""
        found: dict[tuple[int, int], int] = {}
        for node, key in enumerate(zip(self.parents, self.tokens, strict=True)):
            found.setdefault(key, node)
        return found

    def follow(self, tokens: Sequence[int]) -> tuple[int, bool]:
        """How many of `tokens` are on one path from the known text, and whether the tree guessed another one next."""
        children, node, count = self.children(), -1, 0
        for token in tokens:
            after = children.get((node, token))
            if after is None:
                return count, node in self.parents
            node, count = after, count + 1
        return count, False

    def depths(self) -> list[int]:
        """Distance of every node from the known text; its direct continuation has depth 0."""
        return depths_of(self.parents)

    @property
    def depth(self) -> int:
        """How many tokens its longest path has."""
        return max(self.depths(), default=-1) + 1

    def best_confidence(self) -> list[float] | None:
        """The draft's belief in the likeliest node of every depth, where it has one."""
        if self.confidence is None:
            return None
        best = [0.0] * self.depth
        for depth, confidence in zip(self.depths(), self.confidence, strict=True):
            best[depth] = max(best[depth], confidence)
        return best

    def path(self, node: int) -> list[int]:
        """The nodes from the known text to `node`, both ends of the walk included."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]


def depths_of(parents: Sequence[int]) -> list[int]:
    """How many ancestors each node has."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


EMPTY = Tree([], [])


@dataclass(frozen=True, slots=True)
class Scores:
    """What one target pass said about one sequence's tree.

    `logits` `[nodes - first, vocab]` are the target's own, for the nodes from `first` on (inner positions of a prompt
    are not kept). `unconditional` has the same shape when guidance runs a paired sequence. `hidden_states` and
    `attentions` hold, per layer, `[nodes, width]` and `[heads, nodes, known + nodes]` when they were asked for (None
    for layers that were not); the first `num_cached` nodes of the tree were computed in an earlier pass and have none.
    `passes` are the numbers of the forwards that the sequence took part in. `cache` is where the sequence's strategy
    keeps what it worked out for all nodes at once.
    """

    tree: Tree
    first: int
    logits: Tensor
    unconditional: Tensor | None = None
    hidden_states: tuple[Any, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
    num_cached: int = 0
    passes: Sequence[int] = ()
    cache: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


class TopTokens(NamedTuple):
    """The likeliest tokens at one node, the first the likeliest, and their log-probabilities under the target."""

    tokens: list[int]
    log_probs: list[float]


@dataclass(frozen=True, slots=True)
class Step:
    """One emitted token, the tree node whose scores decided it, and what was asked to be kept about it.

    `logits` and `scores` `[vocab]` are the target's own and the processed ones, None unless they were asked for; of a
    search they are `[leaves, vocab]`, the token is the best live leaf's. `log_prob` is the target's own, and `top` the
    likeliest tokens beside it, where they are asked for.
    """

    token: int
    node: int
    logits: Tensor | None = None
    scores: Tensor | None = None
    log_prob: float | None = None
    top: TopTokens | None = None
