"""A sequence's row in a draft model's cache, and the chain or branches that one round grows from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.core.budget import SIBLINGS, Budget
from specdec.core.drafts import Branch, ChainRule, Level, SequenceView
from specdec.core.tree import EMPTY, Tree, common_length
from specdec.core.work import Work
from specdec.proposers.views import branch_tokens


@dataclass(eq=False, slots=True)
class CachedText:
    """What row `cache_row` of the draft's cache holds of `seq`.

    First `num_text` of the `tokens` that it was read from (a list that only grows), then either `guesses` of a chain or
    `branches`, the first `num_own` of which were the sequence's own. `branch_of` maps a node of the sequence's tree to
    its number in `branches`.
    """

    cache_row: int
    seq: SequenceView
    tokens: list[int]
    num_text: int = 0
    guesses: list[int] = field(default_factory=list)
    branches: Tree = EMPTY
    num_own: int = 0
    branch_of: dict[int, int] = field(default_factory=dict)

    def forget_rejected(self, *, keeps_guesses: bool) -> bool:
        """Forgets what the text does not have, and counts guesses that became text.

        Returns whether the cache holds tokens that must be cut off. A list of tokens only grows, so only its new tokens
        are compared.
        """
        before, now = self.num_text + len(self.guesses), self.seq.tokens
        guesses = self.guesses if keeps_guesses else []
        if now is self.tokens:
            self.num_text += common_length(guesses, now[self.num_text : before])
        else:
            self.num_text, self.tokens = common_length(self.tokens[: self.num_text] + guesses, now), now
        self.num_text, self.guesses, self.branch_of = min(self.num_text, self._readable), [], {}
        if self.num_text < before:
            self.branches = EMPTY
        return self.num_text < before

    @property
    def _readable(self) -> int:
        """How much of the text may be cached: not the last token before a leaf, which is fed again for its logits."""
        return max(len(self.seq.tokens) - (-1 in self.seq.leaves), 0)

    def settle(self, most: int) -> tuple[list[int], int]:
        """The first `most` nodes of `branches` that the text or the sequence's tree has, and how many of them are text.

        Leaves are left out: they are fed again, for their logits. The others are forgotten.
        """
        children, seq = self.branches.part(range(most)).children(), self.seq
        path: list[int] = []
        for token in seq.tokens[self.num_text : self._readable]:
            if (node := children.get((path[-1] if path else -1, token))) is None:
                break
            path.append(node)
        num_text, at = len(path), {-1: path[-1] if path else -1}
        self.num_text += num_text
        is_complete = self.num_text == len(seq.tokens)
        for node, (parent, token) in enumerate(zip(seq.tree.parents, seq.tree.tokens, strict=True)):
            cached = children.get((at.get(parent, -2), token))  # -2: none
            if is_complete and node not in seq.leaves and cached is not None:
                at[node] = cached
                path.append(cached)
        self.branches, self.num_own = self.branches.part(path, num_text), len(path) - num_text
        self.branch_of = {node: i - 1 for i, node in enumerate(at) if node >= 0}
        return path, num_text


class Feed(NamedTuple):
    """A sequence's work in a draft pass."""

    cached: CachedText
    work: Work


def is_followed(tail: list[int], text: list[int]) -> bool:
    """Whether `tail` stands in the text, and a token follows it there."""
    end = len(tail) - 1
    with suppress(ValueError):  # a text may be long, and `index` takes a tenth of a loop's time
        while True:
            end = text.index(tail[-1], end, len(text) - 1) + 1
            if text[end - len(tail) : end] == tail:
                return True
    return False


class ChainGrowth:
    """A chain that grows for one sequence in this round, with siblings; in the cache its guesses follow the text.

    `readable`: how many ids the draft has embeddings for.
    """

    def __init__(self, budget: Budget, limit: int, cached: CachedText, readable: int) -> None:
        self.seq, self.budget, self.limit, self.cached, self._readable = cached.seq, budget, limit, cached, readable
        self.tokens: list[int] = []
        self.confidence: list[float] = []
        self.q: list[Tensor] = []
        self.siblings: list[Sequence[tuple[int, float]]] = []  # of each guess, with their probabilities
        sampler = self.seq.task.sampler
        self._num_siblings = SIBLINGS if budget.siblings and sampler.branches and not sampler.needs_q else 0
        self._how = {"confident": budget.needs_confidence}
        if self._num_siblings:  # a sampler of a caller's may not know the word
            self._how["siblings"] = True
        self.gain = 0.0  # what the next pass gains

    def first(self) -> Work:
        """The tokens of the text that the cache lacks."""
        return Work.text(self.cached.cache_row, self.seq.tokens[self.cached.num_text :])

    def take(self, work: Work, logits: Tensor) -> Work | None:
        """Takes one guess from `logits` `[1, vocab]`; returns it as the next work, None at the end."""
        if self.tokens:
            self.cached.guesses.append(self.tokens[-1])
        else:
            self.cached.num_text += work.num_text
        seq, task = self.seq, self.seq.task
        token, confidence, q = task.sampler.pick(seq, self.tokens, logits[-1], **self._how)
        if not self._guess(token, confidence):
            return None
        if q is not None and self._num_siblings:
            self.siblings.append(self._beside(token, q))
        elif q is not None:
            self.q.append(q)
        ended = len(self.tokens) >= self.limit or token >= self._readable or token in task.ends
        if (match := self.budget.match) > 0 and not ended:
            ended = is_followed([*seq.tokens[-match:], *self.tokens][-match:], self._searched)
        self.gain = 0.0 if ended else self.budget.gain([self.confidence])
        # The session holds guesses as text too.
        return Work.text(work.row, [token]) if self.gain > 0 else None

    @property
    def _searched(self) -> list[int]:
        """The text, behind what else drafts copy from."""
        before = [*(self.seq.encoder_tokens or ()), *(self.seq.prediction or ())]
        return before + self.seq.tokens if before else self.seq.tokens

    def _beside(self, token: int, q: Tensor) -> list[tuple[int, float]]:
        """The likeliest tokens of `q` `[vocab]` beside a guess, with their chances; 0 where processors forbid one."""
        top = q.topk(min(self._num_siblings + 1, len(q)))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return [pair for pair in pairs if pair[0] != token and pair[1] > 0][: self._num_siblings]

    def rule(self, width: int) -> ChainRule | None:
        """The rule for drafting the chain in one call over `width` tokens; None if the sampler cannot state it."""
        task = self.seq.task
        if (choice := task.sampler.choice(self.seq)) is None:
            return None
        needs_q = task.sampler.needs_q
        text = self._searched if self.budget.match else ()
        return ChainRule(self.limit, width, choice, self.budget, task.ends, needs_q, self._num_siblings, text)

    def take_all(
        self,
        fed: Work,
        guesses: Sequence[tuple[int, float]],
        q: Tensor | None,
        siblings: Sequence[Sequence[tuple[int, float]]],
    ) -> None:
        """Takes one call's guesses with probabilities, `q` `[guesses, vocab]` and siblings; the last is not cached."""
        self.siblings = list(siblings)
        self.cached.num_text += fed.num_text
        self.tokens, self.confidence = (list(some) for some in zip(*guesses, strict=True))
        self.cached.guesses = self.tokens[:-1]
        self._guess(self.tokens.pop(), self.confidence.pop())
        if q is not None:
            self.q = [*q[: len(self.tokens)]]

    def proposal(self, source: str) -> Tree:
        """The chain, and behind it those siblings that are worth their node."""
        tree = Tree.chain(self.tokens, self.confidence, torch.stack(self.q).float() if self.q else None, source)
        beside = [
            (at - 1, token, confidence)
            for at, pairs in enumerate(self.siblings[: len(tree)])
            for token, confidence in pairs
            if self.budget.keeps_sibling(self.confidence[: at + 1], confidence)
        ]
        if not beside:
            return tree
        parents, tokens, sure = map(list, zip(*beside, strict=True))
        tokens, parents, sure = tree.tokens + tokens, tree.parents + parents, self.confidence + sure
        return Tree(tokens, parents, sure, source=source, siblings=len(beside))

    def _guess(self, token: int, confidence: float) -> bool:
        """Adds a guess unless it is invalid or not worth verifying; returns whether it did."""
        if math.isnan(confidence):
            return False  # the draft overflowed
        self.confidence.append(confidence)
        # Dropping a token that was drawn at random would change the output's distribution.
        if not self.seq.task.sampler.needs_q and not self.budget.keep(self.confidence):
            self.confidence.pop()
            return False
        self.tokens.append(token)
        return True


class TreeGrowth:
    """Levels of nodes that grow from one sequence's leaves in this round; the cache holds them as branches.

    For each of `ends`, `cached_ends` has its number among the cache's branches (-1: the end of the text), and
    `_node_ends` its number among the new nodes (-1 - i: the sequence's leaf i). `readable`: how many ids the draft has
    embeddings for.
    """

    def __init__(self, budget: Budget, limit: int, cached: CachedText, readable: int) -> None:
        self.seq, self.budget, self.cached, self._limit, self._readable = cached.seq, budget, cached, limit, readable
        seq, leaves = self.seq, zip(self.seq.leaves, self.seq.leaf_scores, strict=True)
        self.ends = [Branch(branch_tokens(seq, leaf), score) for leaf, score in leaves]
        self.cached_ends: list[int] = []
        self._node_ends = [-1 - i for i in range(len(self.ends))]
        self._nodes: list[Branch] = []
        self._parents: list[int] = []
        self._levels: list[float] = []
        self.gain = 0.0  # what the next pass gains

    def first(self) -> Work | None:
        """The cache's branches, and the nodes that it lacks of the text and of the sequence's own branches."""
        if not self._limit:
            return None
        seq, cached = self.seq, self.cached
        unread = seq.tokens[cached.num_text :]
        offset = len(cached.branches) + len(unread)
        fresh = [node for node in range(len(seq.tree)) if node not in cached.branch_of]
        end = offset - 1 if unread else -1
        number = cached.branch_of | {node: offset + i for i, node in enumerate(fresh)} | {-1: end}
        parents = [number[seq.tree.parents[node]] for node in fresh]
        chain = Tree.chain(unread) if unread else cached.branches  # where text is unread, no branches are cached
        self.cached_ends = [number[leaf] for leaf in seq.leaves]
        cached.branch_of = {node: i - len(unread) for node, i in number.items() if node >= 0}
        tokens = chain.tokens + [seq.tree.tokens[node] for node in fresh]
        return self._work(Tree(tokens, chain.parents + parents), len(unread))

    def _work(self, tree: Tree, num_text: int = 0) -> Work:
        """A pass over `tree`, which begins with the cached branches, with logits of the nodes from the first end on."""
        row, num_cached = self.cached.cache_row, len(self.cached.branches.tokens)
        return Work(row, tree, len(tree) - min(self.cached_ends), num_text, num_cached)

    def take(self, work: Work, logits: Tensor) -> Work | None:
        """Adds a level from `logits` `[nodes, vocab]`; returns the next work, None if no pass pays."""
        tree, num_text = work.tree, work.num_text
        at = [end - work.first for end in self.cached_ends]
        self.cached.num_text += num_text
        self.cached.branches = tree.part(range(len(tree)), num_text)
        if not self._nodes:
            self.cached.num_own = len(self.cached.branches)
        self.cached_ends = [max(end - num_text, -1) for end in self.cached_ends]
        return self._level(self.seq.task.sampler.expand(self.seq, self.ends, logits[at], self.budget))

    def _level(self, level: Level) -> Work | None:
        branches, first = self.cached.branches, len(self._nodes)
        self._nodes += [branch for _, branch in level]
        self._parents += [self._node_ends[end] for end, _ in level]
        self._levels.append(max((branch.confidence for _, branch in level), default=0.0))
        best, ends = set(self._best()), self.seq.task.ends
        chosen = [
            (first + i, end, branch)
            for i, (end, branch) in enumerate(level)
            if first + i in best and branch.tokens[-1] < self._readable and branch.tokens[-1] not in ends
        ][: self.budget.branches]
        parents = [self.cached_ends[end] for _, end, _ in chosen]
        self.ends = [branch for _, _, branch in chosen]
        self.cached_ends = list(range(len(branches), len(branches) + len(chosen)))
        self._node_ends = [node for node, _, _ in chosen]
        # The branches of a search count as one path.
        paths = [end.chances for end in self.ends if end.chances] or [self._levels]
        ended = not chosen or len(self._levels) >= self._limit
        self.gain = 0.0 if ended else self.budget.gain(paths, len(chosen))
        if self.gain <= 0:
            return None
        return self._work(Tree(branches.tokens + [end.tokens[-1] for end in self.ends], branches.parents + parents))

    def _best(self) -> Sequence[int]:
        """The nodes to propose: the `branches * limit` best; for a search, all."""
        nodes = range(len(self._nodes))
        if self.budget.branches is None or not self._nodes or not self._nodes[0].chances:
            return nodes
        best = sorted(nodes, key=lambda node: -self._nodes[node].score)  # no node is better than its parent
        return sorted(best[: self.budget.branches * self.budget.limit])

    def proposal(self, source: str) -> Tree:
        """The proposed nodes."""
        nodes = self._best()
        place = {node: i for i, node in enumerate(nodes)}
        branches = [self._nodes[node] for node in nodes]
        drawn = [node.q for node in branches if node.q is not None]
        return Tree(
            [node.tokens[-1] for node in branches],
            [place.get(self._parents[node], self._parents[node]) for node in nodes],
            [node.confidence for node in branches],
            drawn or None,
            source,
        )


Growth = ChainGrowth | TreeGrowth
