"""What runs in the engine: a sequence that grows by one token at a time, or a search with many live branches.

Both say what the target must see of them, walk as far as its scores reach, and then take what the walk brought.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.core.drafts import DraftTask
from specdec.core.rounds import Context, RowPass, SequenceView
from specdec.core.strategies import NodeOutput, Search, Selector, Trace
from specdec.core.tree import EMPTY, Scores, Step, Tree

KeptScores = tuple[Tensor, ...] | None
_VOID = 64  # places in a cache that dead branches may leave empty
Stop = Callable[[SequenceView, list[int], KeptScores], str | None]


class Walk(NamedTuple):
    """How far one sequence came in a round.

    `path` are the nodes to hold, of the sequence's branches followed by the proposal, and the first `text` of them have
    become text; `accepted` steps were decided by the proposal's nodes; `after` is what the sequence itself remembers of
    it.
    """

    steps: list[Step]
    path: list[int]
    text: int
    accepted: int
    finish: str | None
    after: Any


@dataclass(eq=False, kw_only=True)
class RunningSequence:
    """What sequences and searches share: a text, and a tree of branches beyond it.

    `id` is the engine's number of the sequence, and `cache_row` its number in the target's session while it runs.
    `task` is what its request wants of a draft. `unconditional` is the same sequence without its condition (guidance);
    it takes the same tokens. `embeds` `[length, width]` are read in place of the prompt's tokens, which are as many, or
    none where nobody knows them.
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
    context: Context | None = None  # what its keys and values depend on besides tokens; None: shared with nobody
    encoding: Any = None  # what the target's encoder made of its input
    prompt_length: int = field(init=False)
    tree: Tree = EMPTY
    num_cached: int = 0  # so many of the tree's nodes are in the target's cache
    leaves: Sequence[int] = (-1,)
    steps: list[Step] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    finish: str | None = None
    prefilled: bool = False  # its prompt is read
    drafted: bool = False  # a draft was asked to guess for it
    cache_reset_length: int | None = None  # how long the text may be until the target reads all of it again

    def __post_init__(self) -> None:
        self.prompt_length = self._written = len(self.tokens)
        self.num_embeds_only = 0 if self.embeds is None else len(self.embeds) - self.prompt_length
        self._ids = torch.tensor(self.tokens, dtype=torch.long, device=self.device)

    @property
    def remaining(self) -> int:
        """How many tokens may still come, at least until the text is read again."""
        return self._room(len(self.tokens))

    @property
    def leaf_scores(self) -> Sequence[float]:
        """The score of every leaf."""
        return (0.0,)

    @property
    def most_positions(self) -> int:
        """How many places in a cache it may take, proposals left out."""
        return self.num_embeds_only + self.max_length

    @property
    def batch_seqs(self) -> tuple[RunningSequence, ...]:
        """What the target must run for it: itself, and its unconditional sequence if it has one."""
        return (self,) if self.unconditional is None else (self, self.unconditional)

    @property
    def length(self) -> int:
        """Positions of its text, embeddings without ids included."""
        return self.num_embeds_only + len(self.tokens)

    def prefix(self, extra: Sequence[int] = ()) -> Tensor:
        """The text so far, followed by `extra`, as ids `[1, length]`."""
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
        """Its part of a pass after the first `num_cached` positions."""
        return RowPass(self._positions(num_cached, self.length), self.tree, self.num_cached, self.leaves, proposal)

    def chunk(self, num_cached: int, most: int) -> RowPass:
        """The next `most` positions of its text at most, without the last."""
        end = min(num_cached + most, self.length - 1)
        return RowPass(self._positions(num_cached, end), EMPTY, 0, (), complete=False)

    def given(self, num_cached: int, count: int) -> Tensor | None:
        """The embeddings of the first of `count` positions after `num_cached`, where they were given."""
        return (
            None
            if self.embeds is None or num_cached >= len(self.embeds)
            else self.embeds[num_cached : num_cached + count]
        )

    def _positions(self, begin: int, end: int) -> list[int]:
        """The text between two positions; embeddings without ids have placeholders."""
        if begin >= self.num_embeds_only:
            return self.tokens[begin - self.num_embeds_only : end - self.num_embeds_only]
        return [0] * (min(end, self.num_embeds_only) - begin) + self.tokens[: max(end - self.num_embeds_only, 0)]

    def _room(self, length: int) -> int:
        """How many tokens may follow `length` of them, up to the first that makes the target read all of them again."""
        room = self.max_length - length
        for seq in self.batch_seqs:
            if seq.cache_reset_length is not None:
                left = seq.cache_reset_length - (length + seq.length - len(self.tokens))
                room = min(room, left + 1) if left >= 0 else room
        return room

    @property
    def width(self) -> int:
        """How many rows it has in outputs that tell what led to a token."""
        return 1

    @property
    def texts(self) -> list[list[int]]:
        """The new tokens of every text that came of it, best first."""
        return [self.tokens[self.prompt_length :]]

    def walk(self, part: RowPass, scores: Scores) -> Walk:
        """The strategy's ordinary steps, for as long as the target was asked about the text that they produce."""
        raise NotImplementedError

    def tested(self, proposal: Tree, walk: Walk) -> tuple[list[tuple[float, bool]], int]:
        """The draft's beliefs that a walk put to the test, whether they came true, and on how many levels they lay."""
        raise NotImplementedError

    def take(self, walk: Walk) -> None:
        """Makes what a walk brought the sequence's own."""
        raise NotImplementedError


@dataclass(eq=False, kw_only=True)
class TextSequence(RunningSequence):
    """One sequence; `stop` ends it, `scores` are those kept of all steps."""

    selector: Selector
    stop: Stop
    scores: KeptScores = None

    def walk(self, part: RowPass, scores: Scores) -> Walk:
        """Follows the proposal from the last token of the text."""
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
        return Walk(steps, path, len(path), len(path), finish, (kept, _traces(part, scores, steps, path)))

    def tested(self, proposal: Tree, walk: Walk) -> tuple[list[tuple[float, bool]], int]:
        """Of every node that a step was taken after, all children; the step that ended the text does not count."""
        taken, steps = set(walk.path), walk.steps[:-1] if walk.finish else walk.steps
        passed = dict.fromkeys([-1, *walk.path][: len(steps)], False)
        belief = proposal.confidence or [1.0] * len(proposal)
        outcomes = []
        for node, parent in enumerate(proposal.parents):
            if parent in passed:
                passed[parent] = True
                outcomes.append((belief[node], node in taken))
        return outcomes, sum(passed.values())

    def take(self, walk: Walk) -> None:
        """New tokens, for the unconditional sequence too."""
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

    The text is what all branches share; `tree` holds the rest, the nodes that the target has seen first. `returned`
    texts are wanted of it.
    """

    search: Search
    state: Any
    returned: int = 1
    history: list[Any] | None = None
    known: dict[int, NodeOutput] = field(default_factory=dict)

    @property
    def remaining(self) -> int:
        """How many tokens may still follow a leaf."""
        return self._room(self.prompt_length + self.state.length)

    @property
    def leaf_scores(self) -> Sequence[float]:
        """The score of every leaf."""
        return self.state.leaf_scores

    @property
    def most_positions(self) -> int:
        """As many as if no branches shared any of what is new."""
        return self.num_embeds_only + self.prompt_length + self.width * (self.max_length - self.prompt_length) + _VOID

    @property
    def width(self) -> int:
        """Its beams."""
        return self.search.num_beams

    @property
    def texts(self) -> list[list[int]]:
        """The new tokens of every hypothesis that is wanted."""
        return [list(found.tokens) for found in self.state.finished[: self.returned]]

    def walk(self, part: RowPass, scores: Scores) -> Walk:
        """Searches on while the target has seen every leaf."""
        whole = self.tree.graft(part.proposal, self.leaves)
        view = _View(part, scores, whole, self.known)
        children, state = whole.children(), self.state
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
            traces += [_together([seen[leaf].trace for leaf in shown], [leaf < 0 for leaf in shown])] if shown else []
            ends = [(leaves[parent], token) for parent, token in zip(found.parents, found.tokens, strict=True)]
            nodes = [children.get(end) for end in ends]
        path, text, after = self._survivors(whole, view, ends, nodes)
        return Walk(steps, path, text, len(states) - 1, state.finish, (states, traces, *after))

    def tested(self, proposal: Tree, walk: Walk) -> tuple[list[tuple[float, bool]], int]:
        """Depth by depth the belief in the likeliest node, as far as the search came and one further."""
        levels = min(walk.accepted + (walk.finish is None), proposal.depth)
        belief = proposal.best_confidence() or [1.0] * levels
        return [(belief[i], i < walk.accepted) for i in range(levels)], levels

    def take(self, walk: Walk) -> None:
        """The new state, and the tree that is left."""
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
        self, whole: Tree, view: _View, ends: list[tuple[int, int]], nodes: list[int | None]
    ) -> tuple[list[int], int, tuple[list[int], Tree, list[int], dict[int, NodeOutput]]]:
        """The nodes to hold, how many of them everyone shares, and the tree of the others with the leaves to come."""
        paths = [whole.path(parent) for parent, _ in ends]
        shared = _common(paths)
        seen = _descendants(whole, {node for node in nodes if node is not None})
        rest = {node for path in paths for node in path} | seen
        path = [*shared, *sorted(rest - set(shared))]
        number = {node: i - len(shared) for i, node in enumerate(path)}
        place = {node: max(i, -1) for node, i in number.items()} | {-1: -1}
        # Groups may say the same: one node serves them all.
        fresh = dict.fromkeys(end for end, node in zip(ends, nodes, strict=True) if node is None)
        stays = whole.part(path, len(shared))
        tree = Tree(
            stays.tokens + [token for _, token in fresh],
            stays.parents + [place[parent] for parent, _ in fresh],
        )
        made = dict(zip(fresh, range(len(stays), len(tree)), strict=True))
        leaves = [made[end] if node is None else place[node] for end, node in zip(ends, nodes, strict=True)]
        known = {place[node]: view.seen(node) for node in seen}
        return path, len(shared), ([whole.tokens[node] for node in shared], tree, leaves, known)


class _View:
    """What the target said about the nodes of a sequence's tree followed by a proposal, in this round or before."""

    def __init__(self, part: RowPass, scores: Scores, whole: Tree, known: dict[int, NodeOutput]) -> None:
        self._scores, self._known, self._whole = scores, known, whole
        self._text = len(part.text)
        self._pass = replace(scores, hidden_states=None, attentions=None, cross_attentions=None)

    def seen(self, node: int) -> NodeOutput:
        """The target's word at `node`; -1 is the end of the text."""
        if node in self._known:
            return self._known[node]
        s, at = self._scores, self._text + node
        beside = None if s.unconditional is None else s.unconditional[at - s.first]
        return NodeOutput(s.logits[at - s.first], beside, self._trace(node, at), self._pass, at - s.first)

    def _trace(self, node: int, at: int) -> Trace:
        s = self._scores
        if s.hidden_states is None and s.attentions is None:
            return Trace(None, None, None)
        own = list(range(self._text)) if node < 0 else [at]
        columns = [*range(self._text), *(self._text + n for n in self._whole.path(node))]
        return _trace(s, own, columns)


def _common(paths: list[list[int]]) -> list[int]:
    """What all paths begin with."""
    levels = zip(*paths, strict=False)
    return [level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels)]


def _descendants(tree: Tree, nodes: set[int]) -> set[int]:
    """`nodes` and everything below them."""
    found = set(nodes)
    for node, parent in enumerate(tree.parents):
        if parent in found:
            found.add(node)
    return found


def _trace(scores: Scores, nodes: list[int], columns: list[int]) -> Trace:
    """Of `nodes` of a pass, which look at the known text and at the tree's `columns`."""
    hidden, attentions, cross = scores.hidden_states, scores.attentions, scores.cross_attentions
    own, size = [node - scores.num_cached for node in nodes], len(scores.tree)
    return Trace(
        None if hidden is None else tuple(h[own] for h in hidden),
        None if attentions is None else tuple(_attended(a, own, columns, size) for a in attentions),
        None if cross is None else tuple(a[:, own] for a in cross),
    )


def _traces(part: RowPass, scores: Scores, steps: list[Step], path: list[int]) -> list[Trace]:
    """One trace per step: the first covers all text of this round, the others one node each."""
    if scores.hidden_states is None and scores.attentions is None:
        return []
    own = part.path()
    return [_trace(scores, own if i == 0 else [step.node], part.path(path[:i])) for i, step in enumerate(steps)]


def _attended(attention: Tensor, nodes: list[int], columns: list[int], tree: int) -> Tensor:
    """Rows `nodes` of `[heads, nodes, known + tree]`, over the known text and the tree's `columns` only."""
    known = attention.shape[-1] - tree
    return attention[:, nodes][:, :, [*range(known), *(known + c for c in columns)]]


def _together(traces: list[Trace], void: list[bool]) -> Trace:
    """One trace of all leaves, which are equally deep, with zeros for those that are `void`."""

    def stacked(layer: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([torch.zeros_like(t) if gone else t for t, gone in zip(layer, void, strict=True)])

    parts = zip(*traces, strict=True)
    return Trace(*(None if p[0] is None else tuple(map(stacked, zip(*p, strict=True))) for p in parts))
