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

Kept = tuple[Tensor, ...] | None
Stop = Callable[[Row, list[int], Kept], str | None]
_NOTHING = Tree([], [])


class Trace(NamedTuple):
    """Per layer, the hidden states `[nodes, width]` and attentions `[heads, nodes, length]` that led to one token."""

    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor, ...] | None
    cross_attentions: tuple[Tensor, ...] | None


@dataclass(eq=False, kw_only=True)
class RunningRow:
    """One sequence at work: its text, its strategy, and what was kept of every step.

    `shadow` is the same row without its condition (guidance); it takes the same tokens. `embeds` `[length, width]` are
    read in place of the prompt's tokens, which are as many, or none where nobody knows them.
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
    scores: Kept = None
    traces: list[Trace] = field(default_factory=list)
    finish: str | None = None

    def __post_init__(self) -> None:
        self.prompt_length = self._written = len(self.tokens)
        self._untold = 0 if self.embeds is None else len(self.embeds) - self.prompt_length
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
        """What the target must still see after the first `held` positions; embeddings have placeholders for ids."""
        placeholders = max(self._untold - held, 0)
        return Tree.chain([0] * placeholders + self.tokens[max(held - self._untold, 0) :])

    def given(self, held: int, count: int) -> Tensor | None:
        """The embeddings of the first of `count` positions after `held`, where they were given."""
        return None if self.embeds is None or held >= len(self.embeds) else self.embeds[held : held + count]


class Walk(NamedTuple):
    """How far one row came in a round: its steps, the proposed nodes that they took, all scores kept so far."""

    steps: list[Step]
    path: list[int]
    scores: Kept
    finish: str | None


class Stopwatch:
    """The seconds of a round, and what they went into."""

    def __init__(self) -> None:
        self.spent = {"draft": 0.0, "verify": 0.0, "select": 0.0}
        self._began = self._last = clock()

    def lap(self, phase: str) -> None:
        """Counts the time since the last lap for `phase`."""
        now = clock()
        self.spent[phase] += now - self._last
        self._last = now

    def round(self, shares: list[RowRound], nodes: int) -> Round:
        """What the round came to."""
        total = clock() - self._began
        return Round(shares, nodes, self.spent["draft"], self.spent["verify"], self.spent["select"], total)


class Engine:
    """A running set of rows on one target and one draft: `add` rows, `step` until they finish, `release` them early.

    `draft=None` is plain decoding. `prefill_chunk` bounds the prompt tokens of one pass, unless hidden states or
    attentions are kept: those of the prompt come from one pass.
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
        watch = Stopwatch()
        needs = self._frontiers()
        watch.lap("verify")
        proposals = self._propose()
        watch.lap("draft")
        scores = self._verify(needs, proposals)
        watch.lap("verify")
        walks = [self._walk(*row) for row in zip(self.rows, proposals, scores, strict=True)]
        watch.lap("select")
        shares = self._commit(needs, proposals, scores, walks)
        round_ = watch.round(shares, sum(map(len, needs)) + sum(map(len, proposals)))
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
            if max(map(len, needs)) <= self._prefill_chunk or self._hidden_states or self._attentions:
                return needs
            chunks = [Tree.chain(need.tokens[:-1][: self._prefill_chunk]) for need in needs]
            self.target.forward(chunks, [0] * len(chunks), embeds=self._embeds(chunks))
            self.target.commit([list(range(len(chunk))) for chunk in chunks])

    def _propose(self) -> list[Tree]:
        """One tree per row of what the target may use; empty ones without a draft, or without a text to go by."""
        if self.draft is None or not all(row.tokens for row in self.rows):
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
            embeds=self._embeds(needs),
            output_hidden_states=self._hidden_states,
            output_attentions=self._attentions,
        )
        shadows = iter(scores[len(self.rows) :])
        return [
            s if row.shadow is None else replace(s, unconditional=next(shadows).logits)
            for row, s in zip(self.rows, scores, strict=False)
        ]

    def _embeds(self, trees: list[Tree]) -> list[Tensor | None] | None:
        """The embeddings given for nodes of these trees; None where there are none."""
        lanes = zip(self._lanes, self.target.lengths, trees, strict=True)
        given = [lane.given(held, len(tree)) for lane, held, tree in lanes]
        return None if all(part is None for part in given) else given

    def _walk(self, row: RunningRow, proposal: Tree, scores: Scores) -> Walk:
        """The strategy's ordinary steps, for as long as the target was asked about the text that they produce."""
        children = proposal.children()
        node: int | None = -1  # of the proposal; before it stands the last token of the text
        steps: list[Step] = []
        new: list[int] = []
        path: list[int] = []
        kept, finish = row.scores, None
        while node is not None and finish is None:
            step = row.selector.advance(row, new, scores, scores.first + 1 + node)
            steps.append(step)
            new.append(step.token)
            if step.scores is not None:
                kept = (*(kept or ()), step.scores[None])
            finish = row.stop(row, new, kept)
            node = children.get((node, step.token))
            if node is not None:
                path.append(node)
        return Walk(steps, path, kept, finish)

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
            shares.append(_share(row, proposal, walk))
            for lane in (row, row.shadow):
                if lane is not None:
                    lane.tokens += [step.token for step in walk.steps]
            row.steps += walk.steps
            row.traces += _traces(s, walk)
            row.scores, row.finish = walk.scores, walk.finish
        if finished := [row.key for row in self.rows if row.finish is not None]:
            self.release(finished)
        return shares


def _share(row: RunningRow, proposal: Tree, walk: Walk) -> RowRound:
    return RowRound(
        key=row.key,
        drafted=len(proposal),
        accepted=len(walk.path),
        prefill=not row.steps,
        source=proposal.source,
        confidence=proposal.confidence,
        steps=walk.steps,
        finish=walk.finish,
    )


def _traces(scores: Scores, walk: Walk) -> list[Trace]:
    """One trace per step: the first covers all text of this round's frontier, the others one node each."""
    hidden, attentions, cross = scores.hidden_states, scores.attentions, scores.cross_attentions
    if hidden is None and attentions is None:
        return []
    own, size = list(range(scores.first + 1)), len(scores.tree)
    traces = []
    for i, step in enumerate(walk.steps):
        nodes = own if i == 0 else [step.node]
        columns = own + [scores.first + 1 + node for node in walk.path[:i]]
        traces.append(
            Trace(
                None if hidden is None else tuple(h[nodes] for h in hidden),
                None if attentions is None else tuple(_attended(a, nodes, columns, size) for a in attentions),
                None if cross is None else tuple(a[:, nodes] for a in cross),
            )
        )
    return traces


def _attended(attention: Tensor, nodes: list[int], columns: list[int], tree: int) -> Tensor:
    """Rows `nodes` of `[heads, nodes, known + tree]`, over the known text and the tree's `columns` only."""
    known = attention.shape[-1] - tree
    return attention[:, nodes][:, :, [*range(known), *(known + c for c in columns)]]
