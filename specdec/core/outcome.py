"""What a round brings one sequence: the strategy's steps, as far as the target's logits reach; results of rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from specdec.core.drafts import Hidden
from specdec.core.sequence import RunningSequence
from specdec.core.strategies import NO_TRACE, Trace, View, stacked, trace_of
from specdec.core.tree import EMPTY, Step, Tree, depths_of
from specdec.core.work import READ_ALONG, Logits, Work

NewLeaf = tuple[int, int]  # the node before it, and its token
_MOST_TIMES = 8  # times the bytes of a view that it may keep in memory


@dataclass(frozen=True, slots=True)
class SequenceRound:
    """The result of a round for one sequence.

    `drafted`: nodes of the proposal without its `siblings`; `depth`: its longest path. The draft had guessed the tokens
    of the first `accepted` steps. `finish`: why the sequence ended, or None. `tested`: the confidence of each node that
    the strategy reached, and whether it was accepted; these nodes lie on `levels` levels of the proposal. `prefill`: in
    this round the target read its prompt, or a draft model its prompt or a longer part of its text. `read`: tokens of
    the text that a draft model read; the last one is not counted, the draft reads it again for its first guess.
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
    read: int = 0
    siblings: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of the loop: each sequence's result, the nodes that the target computed, and the seconds.

    Requests and schedules get rounds with the `seqs` of the request. Nodes and seconds cover all sequences that shared
    the passes, and schedules learn of these `others`. Under guidance, a node that two rows compute is one.
    """

    seqs: list[SequenceRound]
    nodes: int
    draft_seconds: float
    verify_seconds: float
    select_seconds: float
    seconds: float
    others: Sequence[SequenceRound] = ()

    def of(self, seqs: list[SequenceRound]) -> Round:
        """The round of these `seqs`, whose `others` are all other sequences."""
        if len(seqs) == len(self.seqs):
            return self
        ids = {seq.id for seq in seqs}
        return replace(self, seqs=seqs, others=[seq for seq in self.seqs if seq.id not in ids])


@dataclass(slots=True, eq=False)
class Outcome:
    """A sequence's steps in one round, and what they leave of its branches and its proposal.

    `works` and `out`: what the target computed for it, in one row or, under guidance, two. Without steps and states it
    was a chunk of a prompt. `path`: the nodes of branches and proposal (numbered as in `Work`) that stay cached; the
    first `num_text` of them have become text. `tokens`: what the text gains. `states`: the strategy's after each step.
    `accepted`: the draft had guessed the tokens of the first `accepted` steps. `tree`, `leaves` and `views` are the
    sequence's from now on.
    """

    seq: RunningSequence
    works: Sequence[Work]
    out: Logits
    steps: list[Step] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    finish: str | None = None
    accepted: int = 0
    path: list[int] = field(default_factory=list)
    num_text: int = 0
    tokens: list[int] = field(default_factory=list)
    tree: Tree = EMPTY
    leaves: Sequence[int] = (-1,)
    views: dict[int, View] = field(default_factory=dict)

    def hidden(self, layers: Sequence[int], length: int) -> Hidden:
        """The hidden states of the new text and of new nodes on the path, without positions that have no ids.

        `length`: positions of text that were cached before the pass.
        """
        work, first = self.out.work, length - self.seq.num_embeds_only
        nodes = work.path([node for node in self.path if node >= work.num_cached])[max(-first, 0) :]
        rows = [node - work.num_cached for node in nodes]
        is_run = bool(rows) and rows == list(range(rows[0], rows[0] + len(rows)))
        places = slice(rows[0], rows[-1] + 1) if is_run else rows  # a slice copies nothing
        assert self.out.hidden_states is not None
        parts = [self.out.hidden_states[layer][places] for layer in layers]
        if parts[0].untyped_storage().nbytes() > _MOST_TIMES * parts[0].nbytes:
            parts = [part.clone() for part in parts]  # a view would keep the whole pass in memory
        return Hidden(max(first, 0), work.num_cached, parts)

    def apply(self) -> None:
        """Makes the outcome the sequence's own; its unconditional sequence gets the same tokens."""
        seq = self.seq
        for row_seq in seq.batch_seqs:
            row_seq.tokens += self.tokens
            row_seq.tree, row_seq.num_cached, row_seq.leaves = self.tree, len(self.path) - self.num_text, self.leaves
        if seq.history is not None:
            seq.history += self.states
        seq.state, seq.views = self.states[-1], self.views
        seq.steps += self.steps
        seq.traces += self.traces
        seq.finish, seq.prefilled = self.finish, True

    def round(self, read: int) -> SequenceRound:
        """The result of the round, without tensors of a pass; `read`: as in `SequenceRound`.

        Of a text, a guess was tested if the strategy took a step at its parent that did not end the text. Of a search,
        the highest confidence of each depth that it reached, and of the next one.
        """
        proposal, depth = self.out.work.proposal, self.out.work.proposal.depth
        if self.seq.is_search:
            confidence = proposal.confidence or [1.0] * len(proposal)
            levels, best = min(self.accepted + (self.finish is None), depth), [0.0] * depth
            for at, chance in zip(depths_of(proposal.parents), confidence, strict=True):
                best[at] = max(best[at], chance)
            tested = [(best[i], i < self.accepted) for i in range(levels)]
        else:
            tested, levels = proposal.tested(self.path, len(self.steps) - bool(self.finish))
        return SequenceRound(
            id=self.seq.id,
            drafted=len(proposal) - proposal.siblings,
            depth=depth,
            accepted=self.accepted,
            prefill=read >= READ_ALONG or not self.seq.prefilled,
            source=proposal.source,
            tested=tested,
            levels=levels,
            steps=self.steps,
            finish=self.finish,
            read=read,
            siblings=proposal.siblings,
        )


def accept(outcome: Outcome, out: Logits) -> None:
    """Takes the strategy's ordinary steps, for as long as the pass, or an earlier one, computed every leaf.

    A node of the proposal is *accepted* if a step leads to it: the draft guessed what the strategy takes from the
    target's logits. Unless an accepted node ends the text, one more step takes a token that the draft did not guess: a
    *corrected token* if the draft guessed others there, a *bonus token* if it guessed none, as without a proposal.
    `out` has only those hidden states and attentions that the request keeps.
    """
    seq, proposal, strategy = outcome.seq, out.work.proposal, outcome.seq.strategy
    tree = seq.tree.graft(proposal, seq.leaves) if seq.tree.tokens else proposal
    children, state, traces = tree.children(), seq.state, out.hidden_states is not None or out.attentions is not None
    bare = replace(out, hidden_states=None, attentions=None, cross_attentions=None) if traces else out
    offset = out.work.num_text - out.work.first  # node n after the text has its logits in row offset + n

    def view(node: int) -> View:
        """The target's output at a node of `tree`, from this pass or an earlier one; -1 is the end of the text."""
        if node in seq.views:
            return seq.views[node]
        return View(bare, offset + node, trace_of(out, tree.path(node)) if traces else NO_TRACE)

    nodes: list[int | None] = list(seq.leaves)
    ends: list[NewLeaf] = []
    while outcome.finish is None and None not in nodes:
        leaves = [node for node in nodes if node is not None]
        views = [view(leaf) for leaf in leaves]
        move = strategy.advance(seq, state, views, outcome.steps)
        state, outcome.finish = move.state, move.finish
        outcome.states.append(state)
        if move.step is not None:
            outcome.steps.append(move.step)
        if traces:
            shown = range(len(views)) if move.shown is None else move.shown
            if not seq.is_search:
                outcome.traces.append(views[0].trace)
            elif shown:
                outcome.traces.append(stacked([views[leaf].trace for leaf in shown], [leaf < 0 for leaf in shown]))
        ends = [(leaves[parent], token) for parent, token in zip(move.parents, move.tokens, strict=True)]
        nodes = [children.get(end) for end in ends]
    if seq.is_search:
        outcome.accepted = len(outcome.states) - 1
        _settle(outcome, tree, view, ends, nodes)
    else:
        [last] = nodes  # a final token may have been guessed too
        outcome.path = tree.path(ends[0][0] if last is None else last)
        outcome.accepted = outcome.num_text = len(outcome.path)
        outcome.tokens = [step.token for step in outcome.steps]


def _settle(
    outcome: Outcome, tree: Tree, view: Callable[[int], View], ends: list[NewLeaf], nodes: list[int | None]
) -> None:
    """What stays of a search's `tree`, whose new leaves are `ends`, computed as `nodes` or not yet.

    The path that all leaves share becomes text.
    """
    paths = [tree.path(parent) for parent, _ in ends]
    shared = [level[0] for level in takewhile(lambda level: len(set(level)) == 1, zip(*paths, strict=False))]
    leaf_nodes = {node for node in nodes if node is not None}
    branch_nodes = {node for path in paths for node in path} | leaf_nodes
    path = [*shared, *sorted(branch_nodes - set(shared))]
    number = {-1: -1} | {node: max(i - len(shared), -1) for i, node in enumerate(path)}  # in the new tree
    # Two groups of beams may choose the same token: one node serves both.
    new_leaves = dict.fromkeys(end for end, node in zip(ends, nodes, strict=True) if node is None)
    branches = tree.part(path, len(shared))
    outcome.tree = Tree(
        branches.tokens + [token for _, token in new_leaves],
        branches.parents + [number[parent] for parent, _ in new_leaves],
    )
    new_nodes = dict(zip(new_leaves, range(len(branches), len(outcome.tree)), strict=True))
    outcome.leaves = [new_nodes[end] if node is None else number[node] for end, node in zip(ends, nodes, strict=True)]
    outcome.views = {number[node]: view(node) for node in leaf_nodes}
    outcome.path, outcome.num_text, outcome.tokens = path, len(shared), [tree.tokens[node] for node in shared]
