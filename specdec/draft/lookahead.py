"""A draft model that looks ahead with branches: it runs a search ahead of the target, or guesses trees for a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.draft.cached import PREFILL_CHUNK, CachedSession
from specdec.draft.chain import ChainSession
from specdec.draft.leading import tail
from specdec.select.rules import fit
from specdec.types import EMPTY, Branch, Call, Plan, Row, Tree

if TYPE_CHECKING:
    from specdec.models import LanguageModel


@dataclass(slots=True)
class _Branches:
    """What the draft's cache holds of one search: its shared text, and the crown of branches beyond it."""

    tokens: list[int] = field(default_factory=list)
    crown: Tree = EMPTY

    def keep(self, tree: Tree, path: list[int], trunk: int) -> None:
        """Holds the nodes `path` of `tree`, the first `trunk` of them as text."""
        self.tokens += [tree.tokens[node] for node in path[:trunk]]
        self.crown = tree.part(path, trunk)


class _Look:
    """The levels that grow from one row's leaves in this round.

    Of every end, `held` says where it is in the draft's crown, and `_proposed` where in the proposal.
    """

    def __init__(self, row: Row, plan: Plan, limit: int, slot: int) -> None:
        self.row, self.slot = row, slot
        leaves = zip(row.leaves, row.leaf_scores, strict=True)
        self.ends = [Branch(tail(row, leaf), score) for leaf, score in leaves]
        self.held: list[int] = []
        self.plan, self._limit = plan, limit
        self._proposed = [-1 - i for i in range(len(self.ends))]
        self._nodes: list[Branch] = []
        self._parents: list[int] = []
        self._levels: list[float] = []

    def grow(self, spread: list[tuple[int, Branch]], crown: Tree, goes_on: Callable[[int], bool]) -> Tree | None:
        """Adds a level to the proposal; what the `crown` must become for the next, None where that does not pay.

        `goes_on` tells the tokens that a guess may follow.
        """
        first = len(self._nodes)
        self._nodes += [branch for _, branch in spread]
        self._parents += [self._proposed[end] for end, _ in spread]
        self._levels.append(max((branch.confidence for _, branch in spread), default=0.0))
        best = set(self._best())
        open_ = [i for i, (_, branch) in enumerate(spread) if goes_on(branch.tokens[-1]) and first + i in best]
        chosen = [(first + i, *spread[i]) for i in open_[: self.plan.branches]]
        crowned = [self.held[end] for _, end, _ in chosen]
        self.ends = [branch for _, _, branch in chosen]
        self.held = list(range(len(crown), len(crown) + len(chosen)))
        self._proposed = [node for node, _, _ in chosen]
        if not chosen or len(self._levels) >= self._limit or not self.plan.go_on(self._paths(), len(chosen)):
            return None
        return Tree(crown.tokens + [end.tokens[-1] for end in self.ends], crown.parents + crowned)

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

    def tree(self, source: str) -> Tree:
        """The proposal."""
        nodes = self._best()
        place = {node: i for i, node in enumerate(nodes)}
        kept = [self._nodes[node] for node in nodes]
        drawn = [node.q for node in kept if node.q is not None]
        return Tree(
            [node.tokens[-1] for node in kept],
            [place.get(self._parents[node], self._parents[node]) for node in nodes],
            [node.confidence for node in kept],
            drawn or None,
            source,
        )


class LookaheadSession(CachedSession[_Branches]):
    """A draft model at work on the rows of one call, with a tree of guesses for each.

    Texts get chains, from a cache of their own, in rounds whose plans have one branch: a schedule may change its mind.
    """

    branches = True

    def __init__(self, model: LanguageModel, call: Call, source: str, encoding: object | None = None) -> None:
        super().__init__(model, call, source, encoding)
        self._chains = ChainSession(model, call, source, encoding)

    def propose(self, rows: Sequence[Row], plans: Sequence[Plan]) -> list[Tree]:
        """A tree per row, level by level, or a chain."""
        if all(plan.branches == 1 and not row.tree.tokens for row, plan in zip(rows, plans, strict=True)):
            return self._chains.propose(rows, plans)
        return super().propose(rows, plans)

    def release(self, keys: Sequence[int]) -> None:
        """Frees the caches of finished rows."""
        self._chains.release(keys)
        super().release(keys)

    def _draft(self, rows: Sequence[Row], plans: Sequence[Plan], limits: Sequence[int]) -> list[Tree]:
        looks = {
            row.key: _Look(row, plan, limit, self._slots[row.key])
            for row, plan, limit in zip(rows, plans, limits, strict=True)
            if limit and self._is_readable(row)
        }
        self._look_ahead(list(looks.values()))
        return [looks[row.key].tree(self._source) if row.key in looks else EMPTY for row in rows]

    def _is_readable(self, row: Row) -> bool:
        """Whether the draft has embeddings for all that its cache lacks of `row`."""
        held = self._held[self._slots[row.key]].tokens
        return max(row.tokens[len(held) :] + row.tree.tokens, default=0) < self._model.vocab_size

    def _look_ahead(self, looks: list[_Look]) -> None:
        """Feeds what the searches are ahead by, then level after level of the draft's own search."""
        rule = self._call.branching
        assert rule is not None
        self._rewind_texts(looks)
        growing = {look.slot: look for look in looks}
        trees, trunks = self._aligned(looks)
        while trees:
            logits = self._see(trees, trunks, growing)
            trees, trunks = {}, {}
            for slot, ends in logits.items():
                look = growing[slot]
                spread = rule.spread(look.row, look.ends, ends, look.plan)
                tree = look.grow(spread, self._held[slot].crown, self._goes_on)
                if tree is not None:
                    trees[slot] = tree

    def _new_held(self, tokens: list[int]) -> _Branches:
        return _Branches(tokens)

    def _rewind_texts(self, looks: list[_Look]) -> None:
        """Takes the cache back where a search's text is not what it was taken for; reads long prompts in chunks."""
        assert self._session is not None
        lengths = [len(held.tokens) for held in self._held]
        for look in looks:
            lengths[look.slot] = _agreement(self._held[look.slot].tokens, look.row)
        self._session.truncate(lengths)
        self._session.refresh()
        for held, length in zip(self._held, self._session.lengths, strict=True):
            if length < len(held.tokens):
                del held.tokens[length:]
                held.crown = EMPTY
        self._drop_crowns({look.slot for look in looks if self._chunk(look)})
        while trees := {look.slot: chunk for look in looks if (chunk := self._chunk(look))}:
            self._see(trees, {slot: len(tree) for slot, tree in trees.items()}, {})

    def _drop_crowns(self, slots: set[int]) -> None:
        """Forgets the branches of rows whose text went on for so long without this draft."""
        assert self._session is not None
        crowns = [list(range(len(held.crown))) for held in self._held]
        if any(crowns[slot] for slot in slots):
            paths = [[] if slot in slots else crown for slot, crown in enumerate(crowns)]
            self._session.commit(paths, trunks=[0] * len(paths))
            for slot in slots:
                self._held[slot].crown = EMPTY

    def _chunk(self, look: _Look) -> Tree:
        """A part of a prompt that is too long for one pass; empty where it is not."""
        unread = look.row.tokens[len(self._held[look.slot].tokens) :]
        return Tree.chain(unread[:PREFILL_CHUNK]) if len(unread) > PREFILL_CHUNK else EMPTY

    def _aligned(self, looks: list[_Look]) -> tuple[dict[int, Tree], dict[int, int]]:
        """Drops branches that died; what each crown must become, and how much of it is text by now."""
        assert self._session is not None
        paths = [list(range(len(held.crown))) for held in self._held]
        settled = [0] * len(paths)
        trees, trunks = {}, {}
        for look in looks:
            slot, held = look.slot, self._held[look.slot]
            text = Tree.chain(look.row.tokens[len(held.tokens) :])
            wanted = text.graft(look.row.tree) if look.row.tree.tokens else text
            leaves = [len(text) + leaf for leaf in look.row.leaves]
            place = _found(wanted, held.crown, leaves)
            paths[slot], settled[slot] = list(place.values()), sum(node < len(text) for node in place)
            held.keep(held.crown, paths[slot], settled[slot])
            fresh = [node for node in range(len(wanted)) if node not in place]
            number = {node: i - settled[slot] for i, node in enumerate([*place, *fresh])}
            parents = [max(number.get(wanted.parents[node], -1), -1) for node in fresh]
            trees[slot] = Tree(
                held.crown.tokens + [wanted.tokens[node] for node in fresh], held.crown.parents + parents
            )
            trunks[slot] = len(text) - settled[slot]
            look.held = [number[leaf] for leaf in leaves]
        self._session.commit(paths, trunks=settled)
        return trees, trunks

    def _see(self, trees: dict[int, Tree], trunks: dict[int, int], looks: dict[int, _Look]) -> dict[int, Tensor]:
        """One pass that makes crowns what `trees` say; logits `[ends, vocab of the target]` at every look's ends."""
        assert self._session is not None
        all_trees = [trees.get(slot, held.crown) for slot, held in enumerate(self._held)]
        ends = {slot: looks[slot].held for slot in trees if slot in looks}
        keep = [len(tree) - min(ends[slot]) if slot in ends else 0 for slot, tree in enumerate(all_trees)]
        scores = self._session.forward(all_trees, keep)
        paths = [list(range(len(tree))) for tree in all_trees]
        settled = [trunks.get(slot, 0) for slot in range(len(paths))]
        self._session.commit(paths, trunks=settled, final=False)
        logits = {}
        for slot, tree in trees.items():
            self._held[slot].keep(tree, paths[slot], settled[slot])
            if slot in ends:
                at = torch.tensor([end - scores[slot].first for end in ends[slot]])
                seen = scores[slot].logits
                logits[slot] = fit(seen[at.to(seen.device)], self._call.vocab_size)
                looks[slot].held = [max(end - settled[slot], -1) for end in ends[slot]]
        return logits


def _found(wanted: Tree, crown: Tree, leaves: list[int]) -> dict[int, int]:
    """Nodes of `wanted` that the `crown` has, and where; leaves are always fed anew, for their logits."""
    children, place = crown.children(), {-1: -1}
    for node, (parent, token) in enumerate(zip(wanted.parents, wanted.tokens, strict=True)):
        found = children.get((place[parent], token)) if parent in place and node not in leaves else None
        if found is not None:
            place[node] = found
    del place[-1]
    return place


def _agreement(held: list[int], row: Row) -> int:
    """How many held tokens are the row's text; its last is fed anew where branches begin there, for its logits."""
    end = min(len(held), len(row.tokens) - (not row.tree.tokens))
    if held[:end] == row.tokens[:end]:
        return end
    return next(i for i in range(end) if held[i] != row.tokens[i])
