"""The loop: every strategy, every draft and plain decoding are turns of `Engine.step`.

A round asks each row what it must see, lets the draft add what it may use, runs the target once over all of it, and
lets the row's strategy walk as far as the target's scores reach. The draft only decides which scores exist early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter as clock
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.errors import DraftError
from specdec.models import Encoding, Session
from specdec.schedule import Schedule
from specdec.types import DraftSession, Round, Row, RowRound, Scores, Selector, Step, Tree

Stop = Callable[[Row, list[int]], "str | None"]
_NOTHING = Tree([], [])


class Trace(NamedTuple):
    """Per layer, the hidden states `[nodes, width]` and attentions `[heads, nodes, length]` that led to one token."""

    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor, ...] | None
    cross_attentions: tuple[Tensor, ...] | None


@dataclass(eq=False)
class RunningRow:
    """One sequence at work: its text, its strategy, and what was kept of every step.

    `shadow` is the same row without its condition (guidance); it takes the same tokens. `embeds` `[length, width]`
    stands for the first tokens of the text, whose ids are then placeholders.
    """

    key: int
    tokens: list[int]
    selector: Selector
    stop: Stop
    max_length: int
    device: torch.device
    encoder_tokens: list[int] | None = None
    embeds: Tensor | None = None
    shadow: RunningRow | None = None
    prompt_length: int = field(init=False)
    steps: list[Step] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    finish: str | None = None

    def __post_init__(self) -> None:
        self.prompt_length = self._written = len(self.tokens)
        self._ids = torch.tensor(self.tokens, dtype=torch.long, device=self.device)

    @property
    def remaining(self) -> int:
        """How many tokens may still come."""
        return self.max_length - len(self.tokens)

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

    def frontier(self, held: int) -> Tree:
        """The text that the target must still see, given that it holds the first `held` tokens."""
        return Tree.chain(self.tokens[held:])


class Walk(NamedTuple):
    """How far one row came in a round: its steps, and the proposed nodes whose keys and values stay."""

    steps: list[Step]
    path: list[int]
    accepted: int
    finish: str | None


class Engine:
    """A running set of rows on one target and one draft: `add` rows, `step` until they finish, `release` them early.

    `draft=None` is plain decoding. `prefill_chunk` bounds the prompt tokens of one pass.
    """

    def __init__(
        self,
        target: Session,
        draft: DraftSession | None,
        schedule: Schedule,
        *,
        prefill_chunk: int = 2048,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> None:
        self.target = target
        self.draft = draft
        self.schedule = schedule
        self.rows: list[RunningRow] = []
        self._lanes: list[RunningRow] = []  # the target's rows: `rows`, then the shadows of those that have one
        self._prefill_chunk = prefill_chunk
        self._hidden_states = output_hidden_states
        self._attentions = output_attentions

    def add(self, rows: Sequence[RunningRow], encoding: Encoding | None = None) -> None:
        """Rows join an empty set; `encoding` holds their encoder outputs in order, then those of their shadows."""
        lanes = [*rows, *(row.shadow for row in rows if row.shadow is not None)]
        self.target.add(len(lanes), encoding)
        self.rows, self._lanes = list(rows), lanes

    def run(self) -> Iterator[Round]:
        """Turns until every row has finished."""
        while self.rows:
            yield self.step()

    def step(self) -> Round:
        """One round: draft, verify, select, commit."""
        began = clock()
        needs = self._frontiers()
        proposals = self._propose()
        drafted = clock()
        scores = self._verify(needs, proposals)
        verified = clock()
        walks = [self._walk(row, s) for row, s in zip(self.rows, scores, strict=True)]
        selected = clock()
        shares = self._commit(needs, proposals, scores, walks)
        nodes = sum(map(len, needs)) + sum(map(len, proposals))
        spent = (drafted - began, verified - drafted, selected - verified, clock() - began)
        round_ = Round(shares, nodes, *spent)
        self.schedule = self.schedule.after(round_)
        return round_

    def release(self, keys: Sequence[int]) -> None:
        """Rows leave the running set, and their keys and values with them."""
        gone = set(keys)
        kept = [i for i, lane in enumerate(self._lanes) if lane.key not in gone]
        self.rows = [row for row in self.rows if row.key not in gone]
        self._lanes = [self._lanes[i] for i in kept]
        self.target.select(kept)
        if self.draft is not None:
            self.draft.release(keys)

    def _frontiers(self) -> list[Tree]:
        """What the target must see of every lane, after long prompts were read in chunks up to their last one."""
        while True:
            needs = [lane.frontier(held) for lane, held in zip(self._lanes, self.target.lengths, strict=True)]
            if max(map(len, needs)) <= self._prefill_chunk:
                return needs
            chunks = [Tree.chain(need.tokens[:-1][: self._prefill_chunk]) for need in needs]
            self.target.forward(chunks, [0] * len(chunks), embeds=self._embeds())
            self.target.commit([list(range(len(chunk))) for chunk in chunks])

    def _propose(self) -> list[Tree]:
        """One tree per row of what the target may use; empty ones without a draft."""
        if self.draft is None:
            return [_NOTHING] * len(self.rows)
        proposals = self.draft.propose(self.rows, self.schedule.plan(self.rows))
        for row, tree in zip(self.rows, proposals, strict=True):
            if tree.tokens and max(tree.depths()) + 1 >= row.remaining:
                raise DraftError(
                    f"the draft {tree.source!r} proposed {max(tree.depths()) + 1} tokens in a row, "
                    f"but the text may only grow by {row.remaining}: propose at most `row.remaining - 1`"
                )
        return proposals

    def _verify(self, needs: list[Tree], proposals: list[Tree]) -> list[Scores]:
        """One target pass over every lane; a shadow sees its row's proposal and lends its logits to it."""
        by_key = {row.key: tree for row, tree in zip(self.rows, proposals, strict=True)}
        offered = [by_key[lane.key] for lane in self._lanes]
        scores = self.target.forward(
            [need.graft(tree) for need, tree in zip(needs, offered, strict=True)],
            [1 + len(tree) for tree in offered],
            embeds=self._embeds(),
            output_hidden_states=self._hidden_states,
            output_attentions=self._attentions,
        )
        shadows = iter(scores[len(self.rows) :])
        return [
            s if row.shadow is None else replace(s, unconditional=next(shadows).logits)
            for row, s in zip(self.rows, scores, strict=False)
        ]

    def _embeds(self) -> list[Tensor | None] | None:
        """The parts of prompts given as embeddings that the target has not seen yet."""
        if all(lane.embeds is None for lane in self._lanes):
            return None
        return [
            lane.embeds[held:] if lane.embeds is not None and held < len(lane.embeds) else None
            for lane, held in zip(self._lanes, self.target.lengths, strict=True)
        ]

    def _walk(self, row: RunningRow, scores: Scores) -> Walk:
        """The strategy's ordinary steps, for as long as the target was asked about the text that they produce."""
        children = scores.tree.children()
        node, offered_from = scores.first, scores.first + 1
        steps: list[Step] = []
        new: list[int] = []
        path: list[int] = []
        while True:
            step = row.selector.advance(row, new, scores, node)
            steps.append(step)
            new.append(step.token)
            finish = row.stop(row, new)
            child = children.get((node, step.token))
            if child is None or finish is not None:
                return Walk(steps, path, len(steps) - (child is None), finish)
            node = child
            path.append(child - offered_from)

    def _commit(
        self, needs: list[Tree], proposals: list[Tree], scores: list[Scores], walks: list[Walk]
    ) -> list[RowRound]:
        """The one writer: text, outputs, keys and values, and who leaves."""
        paths = {row.key: walk.path for row, walk in zip(self.rows, walks, strict=True)}
        self.target.commit(
            [
                [*range(len(need)), *(len(need) + node for node in paths[lane.key])]
                for lane, need in zip(self._lanes, needs, strict=True)
            ]
        )
        shares = []
        for row, proposal, s, walk in zip(self.rows, proposals, scores, walks, strict=True):
            prefill = len(row.tokens) == row.prompt_length
            for lane in (row, row.shadow):
                if lane is not None:
                    lane.tokens += [step.token for step in walk.steps]
            row.steps += walk.steps
            row.traces += _traces(s, walk)
            row.finish = walk.finish
            shares.append(_share(row.key, proposal, walk, prefill))
        if finished := [row.key for row in self.rows if row.finish is not None]:
            self.release(finished)
        return shares


def _share(key: int, proposal: Tree, walk: Walk, prefill: bool) -> RowRound:
    return RowRound(
        key, len(proposal), walk.accepted, prefill, proposal.source, proposal.confidence, walk.steps, walk.finish
    )


def _traces(scores: Scores, walk: Walk) -> list[Trace]:
    """One trace per step: the first covers all text of this round's frontier, the others one node each."""
    if scores.hidden_states is None and scores.attentions is None:
        return []
    traces = []
    own = list(range(scores.first + 1))
    for i, step in enumerate(walk.steps):
        nodes = own if i == 0 else [step.node]
        columns = own + [scores.first + 1 + n for n in walk.path[:i]]
        traces.append(
            Trace(
                _pick(scores.hidden_states, lambda h, nodes=nodes: h[nodes]),
                _pick(scores.attentions, lambda a, nodes=nodes, c=columns: _attended(a, nodes, c, len(scores.tree))),
                _pick(scores.cross_attentions, lambda a, nodes=nodes: a[:, nodes]),
            )
        )
    return traces


def _pick(layers: tuple[Tensor, ...] | None, take: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...] | None:
    return None if layers is None else tuple(take(layer) for layer in layers)


def _attended(attention: Tensor, nodes: list[int], columns: list[int], tree: int) -> Tensor:
    """Rows `nodes` of `[heads, nodes, known + tree]`, over the known text and the tree's `columns` only."""
    known = attention.shape[-1] - tree
    return attention[:, nodes][:, :, [*range(known), *(known + c for c in columns)]]
