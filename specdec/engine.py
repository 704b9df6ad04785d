"""The loop: every strategy, every draft and plain decoding are turns of `Engine.step`.

A round asks each row what it must see, lets the draft add what it may use, runs the target once over all of it, and
lets the row's strategy walk as far as the target's scores reach. The draft only decides which scores exist early.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter as clock

from torch import Tensor

from specdec.errors import DraftError
from specdec.models import Encoding, Session, add_rows
from specdec.rows import RunningRow, Walk
from specdec.schedule import Schedule
from specdec.types import EMPTY, DraftSession, Round, RowRound, Scores, Tree


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
    attentions are kept: those of the prompt come from one pass. `last_hidden` keeps the last layer's hidden states.
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
        last_hidden: bool = False,
    ) -> None:
        self.target = target
        self.draft = draft
        self.schedule = schedule
        self.rows: list[RunningRow] = []
        self._lanes: list[RunningRow] = []  # the target's rows: all `rows` and their shadows, as they came
        self._prefill_chunk = prefill_chunk
        self._layers = slice(None) if output_hidden_states else slice(-1, None)
        self._hidden_states = output_hidden_states or last_hidden
        self._attentions = output_attentions

    def add(self, rows: Sequence[RunningRow], encoding: Encoding | None = None) -> None:
        """Rows join the set; a prompt that several continue is read once, `encoding` has an entry per source."""
        lanes = [*rows, *(row.shadow for row in rows if row.shadow is not None)]
        sources = [i if lane.source is None else lane.source for i, lane in enumerate(lanes)]
        # What led to a token must come from the pass that its row asks for.
        apart = self._hidden_states or self._attentions
        texts = [[] if apart or lane.embeds is not None else lane.tokens for lane in lanes]
        add_rows(self.target, texts, sources, encoding, self._prefill_chunk)
        for lane in lanes:
            lane.reread = self.target.reread
        self.rows += rows
        self._lanes += lanes

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
        nodes = sum(map(len, needs)) - sum(lane.crown for lane in self._lanes) + sum(map(len, proposals))
        scores = self._verify(needs, proposals)
        watch.lap("verify")
        walks = [row.walk(tree, s) for row, tree, s in zip(self.rows, proposals, scores, strict=True)]
        watch.lap("select")
        shares = self._commit(needs, proposals, walks)
        round_ = watch.round(shares, nodes)
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
        """What the target must have seen of every lane, after long prompts were read in chunks up to their last one."""
        self.target.refresh()
        while True:
            held = list(zip(self._lanes, self.target.lengths, strict=True))
            unread = [lane.unread(length) for lane, length in held]
            if max(map(len, unread)) <= self._prefill_chunk or self._hidden_states or self._attentions:
                return [lane.frontier(length) for lane, length in held]
            chunks = [Tree.chain(tokens[:-1][: self._prefill_chunk]) for tokens in unread]
            # Those that have read everything sit out with their crowns.
            trees = [chunk.graft(crown) for chunk, crown in zip(chunks, self.target.crowns, strict=True)]
            wholes = [length + len(new) + lane.tree.depth for new, (lane, length) in zip(unread, held, strict=True)]
            self.target.forward(trees, [0] * len(trees), embeds=self._embeds(chunks), wholes=wholes)
            self.target.commit([list(range(len(tree))) for tree in trees], trunks=list(map(len, chunks)))

    def _propose(self) -> list[Tree]:
        """One tree per row of what the target may use; empty ones without a draft, or without a text to go by."""
        if self.draft is None or not all(row.tokens for row in self.rows):
            return [EMPTY] * len(self.rows)
        proposals = self.draft.propose(self.rows, self.schedule.plan(self.rows))
        for row, tree in zip(self.rows, proposals, strict=True):
            if tree.tokens and tree.depth >= row.remaining:
                raise DraftError(
                    f"the draft {tree.source!r} proposed {tree.depth} tokens in a row, "
                    f"but the text may only grow by {row.remaining}: propose at most `row.remaining - 1`"
                )
        return proposals

    def _verify(self, needs: list[Tree], proposals: list[Tree]) -> list[Scores]:
        """One target pass over every lane; a shadow sees its row's proposal and lends its logits to it."""
        by_key = {row.key: tree for row, tree in zip(self.rows, proposals, strict=True)}
        trees, asked = [], []
        for lane, need in zip(self._lanes, needs, strict=True):
            offered = by_key[lane.key]
            text = len(need) - len(lane.tree)
            trees.append(need.graft(offered, [text + leaf for leaf in lane.leaves]))
            asked.append(lane.asked + len(offered))
        scores = self.target.forward(
            trees,
            asked,
            embeds=self._embeds(needs),
            output_hidden_states=self._hidden_states,
            output_attentions=self._attentions,
        )
        by_lane = {lane: self._kept(found) for lane, found in zip(self._lanes, scores, strict=True)}
        return [
            by_lane[row] if row.shadow is None else replace(by_lane[row], unconditional=by_lane[row.shadow].logits)
            for row in self.rows
        ]

    def _kept(self, scores: Scores) -> Scores:
        """The scores with the layers of hidden states that are wanted."""
        hidden = scores.hidden_states
        return scores if hidden is None else replace(scores, hidden_states=hidden[self._layers])

    def _embeds(self, trees: list[Tree]) -> list[Tensor | None] | None:
        """The embeddings given for nodes of these trees; None where there are none."""
        lanes = zip(self._lanes, self.target.lengths, trees, strict=True)
        given = [lane.given(held, len(tree)) for lane, held, tree in lanes]
        return None if all(part is None for part in given) else given

    def _commit(self, needs: list[Tree], proposals: list[Tree], walks: list[Walk]) -> list[RowRound]:
        """The one writer: text, outputs, keys and values, and who leaves."""
        by_key = {row.key: walk for row, walk in zip(self.rows, walks, strict=True)}
        paths, trunks = [], []
        for lane, need in zip(self._lanes, needs, strict=True):
            text, walk = len(need) - len(lane.tree), by_key[lane.key]
            paths.append([*range(text), *(text + node for node in walk.path)])
            trunks.append(text + walk.trunk)
        self.target.commit(paths, trunks=trunks)
        shares = []
        for row, proposal, walk in zip(self.rows, proposals, walks, strict=True):
            shares.append(_share(row, proposal, walk))
            row.take(walk)
        if finished := [row.key for row in self.rows if row.finish is not None]:
            self.release(finished)
        return shares


def _share(row: RunningRow, proposal: Tree, walk: Walk) -> RowRound:
    tested, levels = row.tested(proposal, walk)
    return RowRound(
        key=row.key,
        drafted=len(proposal),
        depth=proposal.depth,
        accepted=walk.accepted,
        prefill=not row.steps,
        source=proposal.source,
        tested=tested,
        levels=levels,
        steps=walk.steps,
        finish=walk.finish,
    )
