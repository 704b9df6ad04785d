"""What the engine runs: a text that grows token by token, or a search with many live branches.

In every round, a sequence gives the target its part of a pass (`part`), runs its strategy on the logits (`walk`), and,
once keys and values are committed, takes over the result (`take`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.core.drafts import DraftTask, SequenceView
from specdec.core.rounds import VOID_COLUMNS, Context, RowPass
from specdec.core.strategies import NodeOutput, Search, Selector, Trace
from specdec.core.traces import stacked, trace_of, traces_of
from specdec.core.tree import EMPTY, Scores, Step, Tree

KeptScores = tuple[Tensor, ...] | None
Stop = Callable[[SequenceView, list[int], KeptScores], str | None]


class Walk(NamedTuple):
    """The strategy's steps in one round.

    `path`: the nodes of branches and proposal (numbered as in `RowPass`) that stay cached; the first `text` of them
    have become text. `accepted`: the draft had guessed the tokens of the first `accepted` steps. `after`: the
    sequence's new state.
    """

    steps: list[Step]
    path: list[int]
    text: int
    accepted: int
    finish: str | None
    after: Any


@dataclass(eq=False, kw_only=True)
class RunningSequence:
    """What texts and searches share: a text, and a tree of branches that grows from it.

    `id`: the engine's number of the sequence; `cache_row`: its row of the target's cache while it runs. `task`: the
    draft's instructions. `unconditional`: the same sequence without its condition (guidance); it gets the same tokens.
    `embeds` `[length, width]` replace the prompt's tokens; where their ids are unknown, `tokens` starts empty and
    `num_embeds_only` counts them. `context`: None where keys and values are never shared. `encoding`: the encoder's
    output. The target's cache holds the first `num_cached` nodes of `tree`. `drafted`: a draft has guessed for it.
    `cache_reset_length`: the length of text beyond which the target must read all of it again.
    """

    tokens: list[int]
    max_length: int
    device: torch.device
    task: DraftTask
    encoder_tokens: list[int] | None = None
    prediction: list[int] | None = None
    embeds: Tensor | None = None
    unconditional: RunningSequence | None = None
    id: int = -1
    cache_row: int | None = None
    context: Context | None = None
    encoding: Any = None
    prompt_length: int = field(init=False)
    tree: Tree = EMPTY
    num_cached: int = 0
    leaves: Sequence[int] = (-1,)
    steps: list[Step] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    finish: str | None = None
    prefilled: bool = False
    drafted: bool = False
    cache_reset_length: int | None = None

    def __post_init__(self) -> None:
        self.prompt_length = self._written = len(self.tokens)
        self.num_embeds_only = 0 if self.embeds is None else len(self.embeds) - self.prompt_length
        self._ids = torch.tensor(self.tokens, dtype=torch.long, device=self.device)

    @property
    def remaining(self) -> int:
        """How many tokens may follow a leaf before the length limit, or before the target must reread the text."""
        return self._room(len(self.tokens))

    @property
    def leaf_scores(self) -> Sequence[float]:
        """One score per leaf."""
        return (0.0,)

    @property
    def most_positions(self) -> int:
        """How many columns of a cache it may need, proposals not counted."""
        return self.num_embeds_only + self.max_length

    @property
    def batch_seqs(self) -> tuple[RunningSequence, ...]:
        """What the target runs for it: itself, and its unconditional sequence if it has one."""
        return (self,) if self.unconditional is None else (self, self.unconditional)

    @property
    def length(self) -> int:
        """Positions of its text, embeddings without ids included."""
        return self.num_embeds_only + len(self.tokens)

    @property
    def text_ids(self) -> list[int]:
        """The ids of all positions; 0 where only an embedding is known."""
        return [0] * self.num_embeds_only + self.tokens if self.num_embeds_only else self.tokens

    def prefix(self, extra: Sequence[int] = ()) -> Tensor:
        """The text followed by `extra`, as ids `[1, length]`; valid until the next call."""
        known, total = len(self.tokens), len(self.tokens) + len(extra)
        if total > self._ids.shape[0]:
            grown = self._ids.new_zeros(2 * total)
            grown[: self._written] = self._ids[: self._written]
            self._ids = grown
        if total > self._written:
            fresh = [*self.tokens[self._written :], *extra]
            self._ids[self._written : total] = torch.tensor(fresh, device=self.device)
            self._written = known
        return self._ids[:total][None]

    def part(self, num_cached: int, proposal: Tree = EMPTY) -> RowPass:
        """Its part of a pass, where the first `num_cached` positions of the text are cached."""
        return RowPass(self.text_ids[num_cached:], self.tree, self.num_cached, self.leaves, proposal)

    def chunk(self, num_cached: int, most: int) -> RowPass:
        """At most `most` further positions of its text; never the last, whose pass needs logits."""
        end = min(num_cached + most, self.length - 1)
        return RowPass(self.text_ids[num_cached:end], EMPTY, 0, (), complete=False)

    def given(self, num_cached: int, count: int) -> Tensor | None:
        """The embeddings among the next `count` positions after `num_cached`; None without any."""
        if self.embeds is None or num_cached >= len(self.embeds):
            return None
        return self.embeds[num_cached : num_cached + count]

    def _room(self, length: int) -> int:
        """How many tokens may follow `length` tokens, at most one beyond the cache's reset length."""
        room = self.max_length - length
        for seq in self.batch_seqs:
            if seq.cache_reset_length is not None:
                left = seq.cache_reset_length - (length + seq.length - len(self.tokens))
                room = min(room, left + 1) if left >= 0 else room
        return room

    @property
    def width(self) -> int:
        """How many rows it has in outputs."""
        return 1

    @property
    def texts(self) -> list[list[int]]:
        """The new tokens of its texts, best first."""
        return [self.tokens[self.prompt_length :]]

    @property
    def finish_reasons(self) -> list[str]:
        """Why each of `texts` ended; only of a sequence that ended."""
        return [self.finish or ""]

    def walk(self, part: RowPass, scores: Scores) -> Walk:
        """The strategy's ordinary steps, as far as the pass computed logits for the text that they produce."""
        raise NotImplementedError

    def tested(self, proposal: Tree, walk: Walk) -> tuple[list[tuple[float, bool]], int]:
        """`tested` and `levels` of the round (`SequenceRound`)."""
        raise NotImplementedError

    def take(self, walk: Walk) -> None:
        """Takes over the result of a walk."""
        raise NotImplementedError


@dataclass(eq=False, kw_only=True)
class TextSequence(RunningSequence):
    """One text; `stop` ends it, and `scores` are those of its steps, where they are kept."""

    selector: Selector
    stop: Stop
    scores: KeptScores = None

    def walk(self, part: RowPass, scores: Scores) -> Walk:
        """Takes steps from the end of the text for as long as the proposal contains their tokens."""
        children = part.proposal.children()
        node: int | None = -1
        steps: list[Step] = []
        new: list[int] = []
        path: list[int] = []
        kept, finish = self.scores, None
        while node is not None and finish is None:
            step = self.selector.advance(self, new, scores, part.node(node))
            steps.append(step)
            new.append(step.token)
            if step.scores is not None:
                kept = (*(kept or ()), step.scores[None])
            finish = self.stop(self, new, kept)
            node = children.get((node, step.token))
            if node is not None:
                path.append(node)
        return Walk(steps, path, len(path), len(path), finish, (kept, traces_of(part, scores, steps, path)))

    def tested(self, proposal: Tree, walk: Walk) -> tuple[list[tuple[float, bool]], int]:
        """Counts all children of each node after which a step was taken; not those of the step that ended the text."""
        steps = walk.steps[:-1] if walk.finish else walk.steps
        accepted, reached = set(walk.path), {*[-1, *walk.path][: len(steps)]}
        confidence = proposal.confidence or [1.0] * len(proposal)
        nodes = [node for node, parent in enumerate(proposal.parents) if parent in reached]
        levels = len({proposal.parents[node] for node in nodes})
        return [(confidence[node], node in accepted) for node in nodes], levels

    def take(self, walk: Walk) -> None:
        """Appends the new tokens, to the unconditional sequence too."""
        new = [step.token for step in walk.steps]
        for seq in self.batch_seqs:
            seq.tokens += new
        self.steps += walk.steps
        self.scores, traces = walk.after
        self.traces += traces
        self.finish, self.prefilled = walk.finish, True


@dataclass(eq=False, kw_only=True)
class SearchSequence(RunningSequence):
    """A search over many branches of one prompt (beams, groups of beams, contrastive candidates).

    Its text is what all branches share; `tree` holds the rest, cached nodes first. `known`: the target's output at
    cached nodes. The request wants `returned` texts, and the states of all steps where `history` is a list.
    """

    search: Search
    state: Any
    returned: int = 1
    history: list[Any] | None = None
    known: dict[int, NodeOutput] = field(default_factory=dict)

    @property
    def remaining(self) -> int:
        """How many tokens may follow a leaf."""
        return self._room(self.prompt_length + self.state.length)

    @property
    def leaf_scores(self) -> Sequence[float]:
        """One score per leaf."""
        return self.state.leaf_scores

    @property
    def most_positions(self) -> int:
        """Counted as if no two branches shared a new token."""
        new = self.width * (self.max_length - self.prompt_length)
        return self.num_embeds_only + self.prompt_length + new + VOID_COLUMNS

    @property
    def width(self) -> int:
        """The number of beams."""
        return self.search.num_beams

    @property
    def texts(self) -> list[list[int]]:
        """The new tokens of the best `returned` hypotheses."""
        return [list(found.tokens) for found in self.state.finished[: self.returned]]

    @property
    def finish_reasons(self) -> list[str]:
        """Each hypothesis' own reason."""
        return [found.reason for found in self.state.finished[: self.returned]]

    def walk(self, part: RowPass, scores: Scores) -> Walk:
        """Takes the search's steps for as long as the pass, or an earlier one, computed every leaf."""
        tree = self.tree.graft(part.proposal, self.leaves)
        view = _View(part, scores, tree, self.known)
        children, state = tree.children(), self.state
        nodes: list[int | None] = list(self.leaves)
        ends: list[tuple[int, int]] = []
        steps: list[Step] = []
        traces: list[Trace] = []
        states: list[Any] = []
        while state.finish is None and None not in nodes:
            leaves = [node for node in nodes if node is not None]
            seen = [view.seen(node) for node in leaves]
            found = self.search.advance(self, state, seen)
            state = found.state
            states.append(state)
            steps += [] if found.step is None else [found.step]
            shown = range(len(seen)) if found.shown is None else found.shown
            traces += [stacked([seen[leaf].trace for leaf in shown], [leaf < 0 for leaf in shown])] if shown else []
            ends = [(leaves[parent], token) for parent, token in zip(found.parents, found.tokens, strict=True)]
            nodes = [children.get(end) for end in ends]
        path, text, after = self._survivors(tree, view, ends, nodes)
        return Walk(steps, path, text, len(states) - 1, state.finish, (states, traces, *after))

    def tested(self, proposal: Tree, walk: Walk) -> tuple[list[tuple[float, bool]], int]:
        """The highest confidence of each depth that the search reached, and of the next one."""
        levels = min(walk.accepted + (walk.finish is None), proposal.depth)
        confidence = proposal.best_confidence() or [1.0] * levels
        return [(confidence[i], i < walk.accepted) for i in range(levels)], levels

    def take(self, walk: Walk) -> None:
        """Takes over the new state, the text that all branches now share, and the tree of the others."""
        states, traces, shared, self.tree, self.leaves, self.known = walk.after
        self.state = states[-1]
        if self.history is not None:
            self.history += states
        for seq in self.batch_seqs:
            seq.tokens += shared
            seq.tree, seq.num_cached, seq.leaves = self.tree, len(walk.path) - walk.text, self.leaves
        self.steps += walk.steps
        self.traces += [trace for trace in traces if trace != (None, None, None)]
        self.finish, self.prefilled = walk.finish, True

    def _survivors(
        self, tree: Tree, view: _View, ends: list[tuple[int, int]], nodes: list[int | None]
    ) -> tuple[list[int], int, tuple[list[int], Tree, list[int], dict[int, NodeOutput]]]:
        """What stays after the last step, whose new leaves are `ends` (parent, token), computed as `nodes` or not yet.

        The nodes to keep, how many of them all branches share, and (shared tokens, new tree, leaves, known outputs).
        """
        paths = [tree.path(parent) for parent, _ in ends]
        shared = _common(paths)
        seen = _descendants(tree, {node for node in nodes if node is not None})
        rest = {node for path in paths for node in path} | seen
        path = [*shared, *sorted(rest - set(shared))]
        number = {-1: -1} | {node: max(i - len(shared), -1) for i, node in enumerate(path)}  # in the new tree
        # Two groups of beams may choose the same token: one node serves both.
        fresh = dict.fromkeys(end for end, node in zip(ends, nodes, strict=True) if node is None)
        stays = tree.part(path, len(shared))
        new_tree = Tree(
            stays.tokens + [token for _, token in fresh],
            stays.parents + [number[parent] for parent, _ in fresh],
        )
        made = dict(zip(fresh, range(len(stays), len(new_tree)), strict=True))
        leaves = [made[end] if node is None else number[node] for end, node in zip(ends, nodes, strict=True)]
        known = {number[node]: view.seen(node) for node in seen}
        return path, len(shared), ([tree.tokens[node] for node in shared], new_tree, leaves, known)


class _View:
    """The target's output at the nodes of `tree` (branches, then the proposal), from this pass or an earlier one."""

    def __init__(self, part: RowPass, scores: Scores, tree: Tree, known: dict[int, NodeOutput]) -> None:
        self._part, self._scores, self._tree, self._known = part, scores, tree, known
        self._logits = replace(scores, hidden_states=None, attentions=None, cross_attentions=None)

    def seen(self, node: int) -> NodeOutput:
        """The output at `node`; -1 is the end of the text."""
        if node in self._known:
            return self._known[node]
        scores = self._scores
        at = self._part.node(node) - scores.first
        unconditional = None if scores.unconditional is None else scores.unconditional[at]
        return NodeOutput(scores.logits[at], unconditional, self._trace(node), self._logits, at)

    def _trace(self, node: int) -> Trace:
        if self._scores.hidden_states is None and self._scores.attentions is None:
            return Trace(None, None, None)
        own = self._part.path() if node < 0 else [self._part.node(node)]
        return trace_of(self._scores, own, self._part.path(self._tree.path(node)))


def _common(paths: list[list[int]]) -> list[int]:
    """The longest common prefix of all paths."""
    levels = zip(*paths, strict=False)
    return [level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels)]


def _descendants(tree: Tree, nodes: set[int]) -> set[int]:
    """`nodes` and all nodes below them."""
    found = set(nodes)
    for node, parent in enumerate(tree.parents):
        if parent in found:
            found.add(node)
    return found
