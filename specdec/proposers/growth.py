"""What a draft model's cache holds of a sequence, and the chain or branches that grow from it in one round."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.core.drafts import Branch, ChainRule, Plan
from specdec.core.rounds import SequenceView
from specdec.core.tree import EMPTY, Tree
from specdec.proposers.best_branch import branch_tokens

GoesOn = Callable[[SequenceView, int], bool]  # whether a guess may follow a token of a sequence


@dataclass(eq=False, slots=True)
class CachedText:
    """What the draft's cache holds of one sequence, number `cache_row` of the model's session.

    `text` tokens of the sequence's text, then `guesses` of a chain. In place of a chain there may be `branches`;
    `where` says which of them a node is, of the sequence's branches followed by the proposal. A sequence is
    `unreadable` once its text has a token that the draft has no embedding for. `open` sequences wait to hear what
    became of their proposal.
    """

    cache_row: int
    text: int = 0
    guesses: int = 0
    branches: Tree = EMPTY
    where: dict[int, int] = field(default_factory=dict)
    unreadable: bool = False
    open: bool = False


class Chain:
    """The chain that grows for one sequence in this round; its guesses lie behind the sequence's text in the cache."""

    def __init__(self, seq: SequenceView, plan: Plan, limit: int, cached: CachedText, goes_on: GoesOn) -> None:
        self.seq, self.plan, self.limit, self.cached, self._goes_on = seq, plan, limit, cached, goes_on
        self.tokens: list[int] = []
        self.confidence: list[float] = []
        self.q: list[Tensor] = []
        self.text = 0

    def first(self) -> Tree | None:
        """What the cache lacks of the text."""
        missing = self.seq.tokens[self.cached.text :]
        self.text = len(missing)
        return Tree.chain(missing)

    def keep(self, tree: Tree) -> int:
        """Only the last node's logits are wanted."""
        return 1

    def take(self, tree: Tree, logits: Tensor) -> Tree | None:
        """One guess from `logits` `[1, vocab]`; it is fed if the next draft pass pays."""
        self._fed(tree)
        rule = self.seq.task.rule
        token, confidence, q = rule.pick(self.seq, self.tokens, logits[-1], confident=self.plan.needs_confidence)
        if not self._guess(token, confidence):
            return None
        if q is not None:
            self.q.append(q)
        goes_on = len(self.tokens) < self.limit and self.plan.go_on([self.confidence])
        self.text = 1
        return Tree.chain([token]) if goes_on and self._goes_on(self.seq, token) else None

    def rule(self, width: int) -> ChainRule | None:
        """How it grows, guessing among `width` tokens, in numbers; None where the rule or the plan must be asked."""
        task = self.seq.task
        until, choose = getattr(self.plan, "until", None), getattr(task.rule, "choice", None)
        if until is None or choose is None or (choice := choose(self.seq)) is None:
            return None
        return ChainRule(self.limit, width, choice, until, task.ends, self.plan.needs_confidence, task.rule.needs_q)

    def take_all(self, text: Tree, guesses: Sequence[tuple[int, float]], q: Tensor | None) -> None:
        """All guesses after a text with their probabilities, and `q` `[guesses, vocab]`; the cache lacks the last."""
        self.cached.text += len(text)
        self.cached.guesses = len(guesses) - 1
        self.tokens, self.confidence = (list(some) for some in zip(*guesses, strict=True))
        self._guess(self.tokens.pop(), self.confidence.pop())
        if q is not None:
            self.q = [*q[: len(self.tokens)]]

    def proposal(self, source: str) -> Tree:
        """The guesses."""
        return Tree.chain(self.tokens, self.confidence, torch.stack(self.q).float() if self.q else None, source)

    def _guess(self, token: int, confidence: float) -> bool:
        """Takes a guess, unless it is none or not worth the target's time."""
        if math.isnan(confidence):
            return False  # a draft that overflowed has nothing to say
        self.confidence.append(confidence)
        # A token drawn at random must not be dropped after it was seen: that would bend the output's distribution.
        if not self.seq.task.rule.needs_q and not self.plan.keep(self.confidence):
            self.confidence.pop()
            return False
        self.tokens.append(token)
        return True

    def _fed(self, tree: Tree) -> None:
        """Notes what the cache holds now."""
        if self.tokens:
            self.cached.guesses += 1
        else:
            self.cached.text += len(tree)


class Branches:
    """The levels that grow from one sequence's leaves in this round; the cache holds them as branches.

    Of every end, `at` says which of the cache's branches it is (-1: the end of the text), and `_proposed` which node of
    the levels (-1 - i: the sequence's leaf i).
    """

    def __init__(self, seq: SequenceView, plan: Plan, limit: int, cached: CachedText, goes_on: GoesOn) -> None:
        self.seq, self.plan, self.cached, self._limit, self._goes_on = seq, plan, cached, limit, goes_on
        leaves = zip(seq.leaves, seq.leaf_scores, strict=True)
        self.ends = [Branch(branch_tokens(seq, leaf), score) for leaf, score in leaves]
        self.at: list[int] = []
        self.text = 0
        self._proposed = [-1 - i for i in range(len(self.ends))]
        self._nodes: list[Branch] = []
        self._parents: list[int] = []
        self._fed: dict[int, int] = {}  # node of the levels -> branch of the cache
        self._levels: list[float] = []

    def first(self) -> Tree | None:
        """The cache's branches, and what it lacks of the text and of the sequence's own branches."""
        if not self._limit:
            return None
        seq, cached = self.seq, self.cached
        missing = seq.tokens[cached.text :]
        known = len(cached.branches) + len(missing)
        fresh = [node for node in range(len(seq.tree)) if node not in cached.where]
        number = {**cached.where, **{node: known + i for i, node in enumerate(fresh)}, -1: known - 1 if missing else -1}
        parents = [number[seq.tree.parents[node]] for node in fresh]
        chain = Tree.chain(missing) if missing else cached.branches  # text that is missing has no branches after it
        self.at = [number[leaf] for leaf in seq.leaves]
        self.text = len(missing)
        cached.where = {node: i - len(missing) for node, i in number.items() if node >= 0}
        return Tree(chain.tokens + [seq.tree.tokens[node] for node in fresh], chain.parents + parents)

    def keep(self, tree: Tree) -> int:
        """From the first of the ends on."""
        return len(tree) - min(self.at)

    def take(self, tree: Tree, logits: Tensor) -> Tree | None:
        """The next level, from `logits` `[nodes, vocab]`; what the cache's branches become, None if no pass pays."""
        first = len(tree) - len(logits)
        at = torch.tensor([end - first for end in self.at], device=logits.device)
        text, self.text = self.text, 0
        self.cached.text += text
        self.cached.branches = tree.part(range(len(tree)), text)
        self.at = [max(end - text, -1) for end in self.at]
        branching = self.seq.task.branching
        assert branching is not None
        return self._level(branching.expand(self.seq, self.ends, logits[at], self.plan))

    def _level(self, level: list[tuple[int, Branch]]) -> Tree | None:
        branches, first = self.cached.branches, len(self._nodes)
        self._nodes += [branch for _, branch in level]
        self._parents += [self._proposed[end] for end, _ in level]
        self._levels.append(max((branch.confidence for _, branch in level), default=0.0))
        best = set(self._best())
        open_ = [
            i for i, (_, branch) in enumerate(level) if first + i in best and self._goes_on(self.seq, branch.tokens[-1])
        ]
        chosen = [(first + i, *level[i]) for i in open_[: self.plan.branches]]
        parents = [self.at[end] for _, end, _ in chosen]
        self.ends = [branch for _, _, branch in chosen]
        self.at = list(range(len(branches), len(branches) + len(chosen)))
        self._proposed = [node for node, _, _ in chosen]
        if not chosen or len(self._levels) >= self._limit or not self.plan.go_on(self._paths(), len(chosen)):
            return None
        self._fed |= dict(zip(self._proposed, self.at, strict=True))
        return Tree(branches.tokens + [end.tokens[-1] for end in self.ends], branches.parents + parents)

    def _paths(self) -> list[Sequence[float]]:
        """The draft's belief in what it would continue; the branches of a search are one path."""
        return [end.chances for end in self.ends if end.chances] or [self._levels]

    def _best(self) -> Sequence[int]:
        """The nodes worth proposing: the best, as many as chains of the planned length would have; of a search, all."""
        nodes = range(len(self._nodes))
        if self.plan.branches is None or not self._nodes or not self._nodes[0].chances:
            return nodes
        best = sorted(nodes, key=lambda node: -self._nodes[node].score)  # no node is better than its parent
        return sorted(best[: self.plan.branches * self.plan.limit])

    def proposal(self, source: str) -> Tree:
        """The nodes worth proposing; from here on the cache goes by their numbers."""
        nodes = self._best()
        place = {node: i for i, node in enumerate(nodes)}
        kept = [self._nodes[node] for node in nodes]
        drawn = [node.q for node in kept if node.q is not None]
        own = len(self.seq.tree)
        self.cached.where |= {own + place[node]: at for node, at in self._fed.items() if node in place}
        return Tree(
            [node.tokens[-1] for node in kept],
            [place.get(self._parents[node], self._parents[node]) for node in nodes],
            [node.confidence for node in kept],
            drawn or None,
            source,
        )
