"""Trees of candidate tokens, and the steps that the target's logits decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_NO_Q = torch.empty(0)  # stands at text, which was not drawn


@dataclass(frozen=True, slots=True)
class Tree:
    """Candidate tokens of one sequence, parents before children.

    A node with parent `-1` follows the text. In a proposal for a sequence with several leaves, parent `-1 - i` is leaf
    i. `confidence` is the draft's probability of each node. `q[node]` `[vocab]` is the distribution that the node was
    drawn from (float32, after processors); `q=None`: the draft is one-hot, certain of its guess. `source` names the
    proposer. The last `siblings` nodes are proposed beside those of a chain, which the others are.
    """

    tokens: list[int]
    parents: list[int]
    confidence: list[float] | None = None
    q: Sequence[Tensor] | Tensor | None = None
    source: str = ""
    siblings: int = 0

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

    def extended(self, tokens: list[int], confidence: list[float], source: str) -> Tree:
        """This chain with more tokens, which were not drawn, behind its last one; its siblings stay the last nodes."""
        end, sure = len(self) - self.siblings, self.confidence or [1.0] * len(self)
        return Tree(
            [*self.tokens[:end], *tokens, *self.tokens[end:]],
            [*range(-1, end + len(tokens) - 1), *self.parents[end:]],
            [*sure[:end], *confidence, *sure[end:]],
            None if self.q is None else [*self.q, *[_NO_Q] * len(tokens)],
            source,
            self.siblings,
        )

    @property
    def is_chain(self) -> bool:
        """Whether every node continues the one before it."""
        return self.parents == list(range(-1, len(self.parents) - 1))

    @property
    def stem(self) -> int:
        """How many nodes a chain has without its siblings; 0 of a tree that is none."""
        return len(self) - self.siblings if self.siblings or self.is_chain else 0

    def graft(self, other: Tree, leaves: Sequence[int] = ()) -> Tree:
        """This tree with `other` growing from its nodes `leaves`, by default the last one; keeps no confidences."""
        n = len(self.tokens)
        ends = leaves or (n - 1,)
        return Tree(
            self.tokens + other.tokens,
            self.parents + [p + n if p >= 0 else ends[-1 - p] for p in other.parents],
            q=None if other.q is None else [_NO_Q] * n + list(other.q),
        )

    def part(self, nodes: Sequence[int], text: int = 0) -> Tree:
        """The tree of `nodes` (parents before children) once the first `text` of them have become text."""
        number = {node: i - text for i, node in enumerate(nodes)}
        branches = nodes[text:]
        return Tree(
            [self.tokens[node] for node in branches],
            [max(number.get(self.parents[node], -1), -1) for node in branches],
            source=self.source,
        )

    def children(self) -> dict[tuple[int, int], int]:
        """`(parent, token) -> node`; of equal siblings the first."""
        children: dict[tuple[int, int], int] = {}
        for node, key in enumerate(zip(self.parents, self.tokens, strict=True)):
            children.setdefault(key, node)
        return children

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The nodes of a path from the root that has the first of `tokens`, as many as a path has."""
        children, path, node = self.children(), list[int](), -1
        for token in tokens:
            if (node := children.get((node, token), -1)) < 0:
                break
            path.append(node)
        return path

    def tested(self, path: Sequence[int], steps: int) -> tuple[list[tuple[float, bool]], int]:
        """The confidence of each node that a text reached in `steps` tokens along `path`, and whether it became text.

        Besides, on how many levels these nodes lie. Siblings are left out.
        """
        reached, sure = {*[-1, *path][:steps]}, self.confidence or [1.0] * len(self.tokens)
        guesses = self.parents[: len(self) - self.siblings]
        nodes = [node for node, parent in enumerate(guesses) if parent in reached]
        return [(sure[node], node in path) for node in nodes], len({self.parents[node] for node in nodes})

    @property
    def depth(self) -> int:
        """The length of its longest path, in tokens."""
        return len(self.tokens) if self.is_chain else max(depths_of(self.parents)) + 1

    def path(self, node: int) -> list[int]:
        """The nodes from the root to `node`, `node` included."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]


def common_length(text: Sequence[int], other: Sequence[int]) -> int:
    """The length of the longest common prefix of two texts, in tokens."""
    least, most = 0, min(len(text), len(other))
    while least < most:  # binary search: comparing slices is fast
        middle = (least + most + 1) // 2
        least, most = (middle, most) if text[least:middle] == other[least:middle] else (least, middle - 1)
    return least


def place_after(text: Sequence[int], part: Sequence[int]) -> int | None:
    """Where a text goes on after the first occurrence of `part`; None without one."""
    pattern = list(part)
    starts = (start for start, token in enumerate(text) if not pattern or token == pattern[0])
    whole = (start for start in starts if list(text[start : start + len(pattern)]) == pattern)
    return next((start + len(pattern) for start in whole), None if pattern else 0)


def depths_of(parents: Sequence[int]) -> list[int]:
    """How many ancestors each node has."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


EMPTY = Tree([], [])


class TopTokens(NamedTuple):
    """The likeliest tokens at one node, best first, and their log-probabilities under the target."""

    tokens: list[int]
    log_probs: list[float]


@dataclass(frozen=True, slots=True)
class Step:
    """One emitted token; a search emits the token of its best leaf.

    On request: `logits` and `scores` `[vocab]` (of a search `[leaves, vocab]`), before and after processors; `log_prob`
    of the token under the target, and the `top` tokens beside it.
    """

    token: int
    logits: Tensor | None = None
    scores: Tensor | None = None
    log_prob: float | None = None
    top: TopTokens | None = None
