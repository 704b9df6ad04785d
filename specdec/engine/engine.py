"""The loop: every strategy, every draft and plain decoding are turns of `Engine.step`.

A round asks each row what it must see, lets the draft add what it may use, runs the target once over all of it, and
lets the row's strategy walk as far as the target's scores reach. The draft only decides which scores exist early.
Rows of all requests share the rounds; prompts are read between them, in passes of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec.core.drafts import BatchDrafter, DraftSession, Plan
from specdec.core.rounds import Round, SequenceRound
from specdec.core.sequence import RunningSequence
from specdec.core.tree import EMPTY, Scores, Tree
from specdec.engine.memory_budget import KvBudget
from specdec.engine.prefix_cache import Prefixes
from specdec.engine.request import Request
from specdec.engine.scheduler import OpenDraft, Places
from specdec.engine.turn import Stopwatch, Turn
from specdec.errors import DraftError
from specdec.models import LanguageModel, Session, plain_modes
from specdec.proposers import BestLeaf

CHUNK = 2048
"""Prompt tokens that a pass reads while no other request waits for it."""
SHARED_CHUNK = 256
"""The same while rows of other requests are running, which wait for no more than this."""


_IDLE_DRAFTS = 2  # sessions without rows that keep their buffers for the next request


class Engine:
    """A running set of rows on one target: requests come in, and `step` takes all of them a round further.

    One thread at a time may call it (`Dispatcher`). What goes wrong in one request ends that request alone.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        kv_budget: int | float | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        self.model = model
        self._device, self._is_offloaded = model.device, model.is_offloaded  # both are searched for in the model
        self.budget = KvBudget(kv_budget, model)
        self._drafts: dict[int, OpenDraft] = {}  # by the identity of the drafter
        self.places = Places(model, prefixes, self._drafts)
        self.waiting: deque[Request] = deque()
        self.reading: list[RunningSequence] = []
        self.running: list[RunningSequence] = []
        self._requests: dict[int, Request] = {}  # by the keys of their rows
        self._keys = 0
        self._others_first = False

    @property
    def target(self) -> Session:
        """The target's keys and values."""
        return self.places.target

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.waiting or self.reading or self.running)

    def submit(self, request: Request) -> None:
        """Lets a request wait for its turn."""
        request.counted = True
        request.pacing.users += 1
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Ends a request; its keys and values are free at once."""
        with suppress(ValueError):
            self.waiting.remove(request)
        self._end(request)

    def abort(self, error: BaseException) -> None:
        """Ends every request with `error`, and forgets all keys and values: a pass was left half-way."""
        for request in {id(request): request for request in [*self.waiting, *self._admitted]}.values():
            request.error = error
            self._finish(request)
        self.waiting.clear()
        self.reading, self.running, self._requests, self._drafts = [], [], {}, {}
        self.places = Places(self.model, self.places.prefixes, self._drafts)

    def step(self) -> None:
        """Admits requests, reads at most a chunk of their prompts, and takes a round with all rows that had begun."""
        # Buffers outlive a call: made under a caller's inference mode, nobody could write to them outside.
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            with plain_modes():
                self._step()
        else:
            self._step()

    def _step(self) -> None:
        while self.waiting and self.budget.fits(self.waiting[0], self._admitted):
            request = self.waiting[0]
            self._admit(request)
            self.waiting.popleft()
            if request.encode is not None and self.running:
                break  # running rows wait for one encoder at a time
        running = list(self.running)
        if self.reading:
            self._read()  # of rows that begin here the first token is told before anything else is done
        running = [row for row in running if row.key in self._requests]
        if running:
            self._round(running)

    @property
    def _admitted(self) -> list[Request]:
        """The requests that have rows."""
        return list({id(request): request for request in self._requests.values()}.values())

    def _admit(self, request: Request) -> None:
        """Gives a request's rows their places; what was kept of others makes room for them."""
        try:
            if request.drafter is not None and id(request.drafter) not in self._drafts:
                self._start_draft(request.drafter)
            if request.encode is not None:
                request.encoding = request.encode()
            for row in request.rows:
                self._keys += 1
                row.key = self._keys
                self._requests[row.key] = request
            self._make_room()
            self.places.add(request)
        except Exception as error:
            return self._end(request, error)
        self.reading += request.rows

    def _make_room(self) -> None:
        """Says how far the stores may grow, and lets texts of rows that have left take no more than what is over."""
        limit, admitted = self.budget.limit, self._admitted
        if limit is None:
            return
        ample = self.budget.ample(admitted)
        self.target.bound(*ample)
        for draft in self._drafts.values():
            if draft.session.cache is not None:
                draft.session.cache.bound(*ample)
        if self.places.prefixes is not None:
            self.places.prefixes.room = limit - max(self.budget.bytes(admitted), self.budget.kept_bytes)
            self.places.prefixes.shrink()

    def _read(self) -> None:
        """One pass over prompts that are not read yet: the first ones, as many as a chunk has room for."""
        ready = self._ready()
        if not ready:
            return
        request = self._requests[ready[0].key]
        waited_for = any(self._requests[row.key] is not request for row in self.running)
        usual = SHARED_CHUNK if waited_for else CHUNK
        most = min(request.prefill_chunk or usual, usual)
        if request.traced:
            most = max(one.length for row in request.rows for one in row.batch_rows)
        self._round(self._batch(ready, request, most), most)
        self.running += [row for row in self.reading if row.begun]
        self.reading = [row for row in self.reading if not row.begun]

    def _ready(self) -> list[RunningSequence]:
        """The rows that may be read next: those of the first request, every other time the shortest of the others."""
        order, first = list(self.reading), self._requests[self.reading[0].key]
        if self._others_first:
            order.sort(key=lambda row: (0, row.length) if self._requests[row.key] is not first else (1, 0))
        self._others_first = not self._others_first
        ready: list[RunningSequence] = []
        unread = 0
        for row in order:
            if unread >= CHUNK:
                break  # a place now would keep the row from what is read before its turn
            try:
                if row.key not in self._requests or not self.places.follow(row, self._requests[row.key]):
                    continue
            except Exception as error:  # its place cannot be had
                self._fail([row], error)
                continue
            ready.append(row)
            unread += self.places.unread(row)
        return [row for row in ready if row.key in self._requests]

    def _batch(self, rows: Sequence[RunningSequence], request: Request, most: int) -> list[RunningSequence]:
        """The first of these rows that read alike, as many as `most` tokens have room for; half may be padding."""
        batch: list[RunningSequence] = []
        widest = tokens = 0
        for row in rows:
            own = self._requests[row.key]
            if (own.traced, own.prefill_chunk) != (request.traced, request.prefill_chunk):
                continue
            size = min(max(map(self.places.unread, row.batch_rows)), most)
            widest, tokens = max(widest, size), tokens + size
            if batch and (len(batch) + 1) * widest > min(most, 2 * tokens):
                break
            batch.append(row)
        return batch

    def _round(self, rows: list[RunningSequence], most: int | None = None) -> None:
        """One round: draft, verify, select, commit; of prompts that are longer than `most` a chunk is read."""
        watch = Stopwatch(self._device)
        proposals = self._propose(rows, most)
        watch.lap("draft")
        turns = [self._turn(row, proposals.get(row.key), most) for row in rows if row.key in self._requests]
        if not self._verify(turns):
            return
        watch.lap("verify")
        walked = self._walk(turns)
        watch.lap("select")
        shares = self._commit(walked)
        for turn in turns:
            if turn.error is not None:
                self._fail([turn.row], turn.error)
        self._deliver(walked, watch.round(shares, sum(turn.nodes for turn in turns)))
        self._release([turn.row for turn in walked if turn.row.finish is not None])

    def _propose(self, rows: Sequence[RunningSequence], most: int | None) -> dict[int, Tree]:
        """By key what the target may use, of rows that have a draft and a text to go by.

        Where prompts are read only drafts that guess at once are asked: no first token waits for a draft's reading,
        unless a pass of the target takes far longer than that.
        """
        proposals: dict[int, Tree] = {}
        for draft, group in self._by_draft(rows):
            if most is not None and not (draft.drafter.instant or self._is_offloaded):
                continue
            named = [row for row in group if row.tokens and (most is None or self._ends(row, most))]
            plans = self._plans(named)
            named = [row for row in named if row.key in plans]
            # What needs no pass of a model is asked request by request: its failures are then one request's alone.
            alone = _grouped(named, lambda row: self._requests[row.key]) if draft.drafter.instant else [(None, named)]
            for _, rows_ in alone:
                proposals |= self._proposals(draft.session, rows_, [plans[row.key] for row in rows_])
        return proposals

    def _proposals(
        self, session: DraftSession, rows: Sequence[RunningSequence], plans: Sequence[Plan]
    ) -> dict[int, Tree]:
        """What a draft proposes for these rows, of those whose plans let it; its failure ends their requests."""
        if not rows:
            return {}
        try:
            trees = [_allowed(row, tree) for row, tree in zip(rows, session.propose(rows, plans), strict=True)]
            for row, tree in zip(rows, trees, strict=True):
                if tree.tokens and tree.depth >= row.remaining:
                    self._fail([row], _too_much(row, tree))
                if tree.tokens and not 0 <= min(tree.tokens) <= max(tree.tokens) < self.model.vocab_size:
                    self._fail([row], DraftError(f"the draft {tree.source!r} proposed ids that the target lacks"))
        except Exception as error:
            self._fail(rows, error)
            return {}
        return {row.key: tree for row, plan, tree in zip(rows, plans, trees, strict=True) if plan.limit > 0}

    def _plans(self, rows: Sequence[RunningSequence]) -> dict[int, Plan]:
        """Every row's plan by its key, by its request's pacing; a schedule that raises ends those that go by it."""
        plans: dict[int, Plan] = {}
        for pacing, group in _grouped(rows, lambda row: self._requests[row.key].pacing):
            try:
                plans |= {row.key: plan for row, plan in zip(group, pacing.schedule.plan(group), strict=True)}
            except Exception as error:
                self._fail(group, error)
        return plans

    def _by_draft(self, rows: Iterable[RunningSequence]) -> list[tuple[OpenDraft, list[RunningSequence]]]:
        """The rows that have a draft, by its session."""
        drafts = _grouped(rows, lambda row: self._drafts.get(id(self._requests[row.key].drafter)))
        return [(draft, group) for draft, group in drafts if draft is not None]

    def _start_draft(self, drafter: BatchDrafter) -> None:
        """Opens the session of a drafter; all rows that it helps are in one."""
        if drafter.hidden_layers:
            self.model.check_hidden_states(drafter.hidden_layers)
        session = drafter.start(self.model.vocab_size)
        if not isinstance(session, DraftSession):
            kind = type(session).__name__
            raise DraftError(f"{drafter!r} must start a `specdec.core.drafts.DraftSession`, got {kind}: subclass it")
        self._drafts[id(drafter)] = OpenDraft(drafter, session if session.guesses_branches else BestLeaf(session))

    def _turn(self, row: RunningSequence, proposal: Tree | None, most: int | None) -> Turn:
        """A row's part of this round, and that of its unconditional row."""
        slots = [one.slot for one in row.batch_rows if one.slot is not None]
        self.target.refresh(slots)
        held = [self.target.length(slot) for slot in slots]
        if most is not None and not self._ends(row, most):
            parts = [one.chunk(h, most) for one, h in zip(row.batch_rows, held, strict=True)]
        else:
            parts = [
                one.part(h, EMPTY if proposal is None else proposal)
                for one, h in zip(row.batch_rows, held, strict=True)
            ]
        return Turn(row, slots, held, parts, asked=proposal is not None)

    def _ends(self, row: RunningSequence, most: int) -> bool:
        """Whether one pass over `most` tokens comes to the end of the row's prompt, which nobody waits to continue."""
        unread = max(map(self.places.unread, row.batch_rows))
        return unread <= most and (unread <= 1 or not self.places.leads(row))

    def _verify(self, turns: Sequence[Turn]) -> bool:
        """One target pass over every row; whether it came through."""
        parts = [(row, part, held) for turn in turns for row, part, held in turn.batch_rows]
        if not parts:
            return False
        requests = {self._requests[turn.row.key] for turn in turns}
        given = [row.given(held, len(part.text)) for row, part, held in parts]
        drafts = [request.drafter for request in requests if request.drafter is not None]
        layers = sorted({layer for drafter in drafts for layer in drafter.hidden_layers})
        traced = any(r.output_hidden_states or r.last_hidden for r in requests)
        try:
            found = self.target.forward(
                [slot for turn in turns for slot in turn.slots],
                [part.tree for _, part, _ in parts],
                [part.keep for _, part, _ in parts],
                embeds=given if any(one is not None for one in given) else None,
                wholes=[0 if part.complete else row.length for row, part, _ in parts],
                output_hidden_states=traced or layers,
                output_attentions=any(request.output_attentions for request in requests),
            )
        except Exception as error:
            self._fail([turn.row for turn in turns], error)
            return False
        scores = iter(found)
        for turn in turns:
            said = next(scores)
            turn.scores, turn.hidden = self._wanted(turn.row, said), self._for_draft(turn.row, said)
            turn.passes = said.passes
            if turn.row.unconditional is not None:
                beside = next(scores)
                turn.scores = replace(turn.scores, unconditional=beside.logits)
                turn.passes = [*turn.passes, *beside.passes]
        return True

    def _wanted(self, row: RunningSequence, scores: Scores) -> Scores:
        """The scores with those hidden states and attentions that the row's request keeps."""
        request = self._requests[row.key]
        if scores.hidden_states is None and scores.attentions is None:
            return scores
        hidden = scores.hidden_states if request.output_hidden_states or request.last_hidden else None
        attentions = (scores.attentions, scores.cross_attentions) if request.output_attentions else (None, None)
        return replace(
            scores,
            hidden_states=None if hidden is None else hidden[request.layers],
            attentions=attentions[0],
            cross_attentions=attentions[1],
        )

    def _for_draft(self, row: RunningSequence, scores: Scores) -> list[Tensor]:
        """The hidden states of the layers that the row's draft reads."""
        drafter, hidden = self._requests[row.key].drafter, scores.hidden_states
        return [] if drafter is None or hidden is None else [hidden[layer] for layer in drafter.hidden_layers]

    def _walk(self, turns: Sequence[Turn]) -> list[Turn]:
        """Takes every row's strategy as far as the scores reach; those whose processors or criteria raise are left out.

        Their requests end after the others' keys and values are committed: until then no row may move.
        """
        for turn in turns:
            try:
                if turn.complete and turn.scores is not None:
                    turn.walk = turn.row.walk(turn.parts[0], turn.scores)
            except Exception as error:
                turn.error = error
        return [turn for turn in turns if turn.error is None]

    def _commit(self, turns: Sequence[Turn]) -> list[SequenceRound]:
        """The one writer: keys and values, texts and outputs, and what drafts know of them."""
        held = [part for turn in turns for part in turn.committed]
        self.target.commit([s for s, _, _ in held], [path for _, path, _ in held], texts=[text for _, _, text in held])
        shares = []
        commits = {turn.row.key: turn.commit() for turn in turns if turn.walk is not None or turn.hidden}
        for turn in turns:
            if turn.walk is None:
                continue
            row, proposal = turn.row, turn.parts[0].proposal
            instant = (drafter := self._requests[row.key].drafter) is None or drafter.instant
            prefill = not row.begun or (turn.asked and not row.drafted and not instant)
            shares.append(turn.share(prefill))
            row.take(turn.walk)
            row.drafted |= bool(proposal.tokens or proposal.source)
        for draft, group in self._by_draft([turn.row for turn in turns if turn.row.key in commits]):
            try:
                draft.session.commit([commits[row.key] for row in group])
            except Exception as error:
                self._fail(group, error)
        return shares

    def _deliver(self, turns: Sequence[Turn], whole: Round) -> None:
        """Tells requests and schedules of the round: their own rows, and the others that shared its passes."""
        shares = {share.key: share for share in whole.rows}
        here = [turn.row for turn in turns if turn.row.key in self._requests]
        passes = {turn.row.key: turn.passes for turn in turns}
        for request, rows in _grouped(here, lambda row: self._requests[row.key]):
            request.passes += len(set().union(*(passes[row.key] for row in rows)))
            request.rounds.append(_of(whole, [shares[row.key] for row in rows if row.key in shares]))
        begun = [row for row in here if row.key in shares]
        for pacing, rows in _grouped(begun, lambda row: self._requests[row.key].pacing):
            try:
                pacing.schedule = pacing.schedule.after(_of(whole, [shares[row.key] for row in rows]))
            except Exception as error:
                self._fail(rows, error)

    def _release(self, rows: Iterable[RunningSequence]) -> None:
        """Rows leave, with their keys and values; a request whose rows are all gone is done."""
        gone = [row for row in rows if row.key in self._requests]
        if not gone:
            return
        self.places.remove(gone, self._requests)
        for draft, group in self._by_draft(gone):
            try:
                draft.session.release([row.key for row in group])
            except Exception:  # of a session that forgets nothing: it is given up
                del self._drafts[id(draft.drafter)]
        keys = {row.key for row in gone}
        requests = {self._requests.pop(key) for key in keys}
        self.running = [row for row in self.running if row.key not in keys]
        self.reading = [row for row in self.reading if row.key not in keys]
        for request in requests:
            if all(row.key not in self._requests for row in request.rows):
                self._finish(request)
        used = {id(request.drafter) for request in self._requests.values()}
        idle = [key for key in self._drafts if key not in used]
        for key in idle if self.budget.limit is not None else idle[:-_IDLE_DRAFTS]:
            del self._drafts[key]

    def _fail(self, rows: Sequence[RunningSequence], error: Exception) -> None:
        """Ends the requests of these rows."""
        for request in {self._requests[row.key] for row in rows if row.key in self._requests}:
            self._end(request, error)

    def _end(self, request: Request, error: Exception | None = None) -> None:
        """Ends a request early."""
        request.error = error or request.error
        self._release(request.rows)
        self._finish(request)

    def _finish(self, request: Request) -> None:
        if not request.done:
            request.done = True
            request.pacing.users -= request.counted


def _grouped(
    rows: Iterable[RunningSequence], of: Callable[[RunningSequence], Any]
) -> list[tuple[Any, list[RunningSequence]]]:
    """The rows by the identity of what they are `of`, in the order of their first."""
    groups: dict[int, tuple[Any, list[RunningSequence]]] = {}
    for row in rows:
        groups.setdefault(id(of(row)), (of(row), []))[1].append(row)
    return list(groups.values())


def _allowed(row: RunningSequence, tree: Tree) -> Tree:
    """What the row's processors would let through of a chain that nobody drew; other trees as they are."""
    allowed = row.task.allowed
    if allowed is None or not tree.tokens or not tree.is_chain or tree.q is not None or row.tree.tokens:
        return tree
    kept = allowed(row.tokens, tree.tokens)
    return Tree.chain(tree.tokens[:kept], tree.confidence and tree.confidence[:kept], source=tree.source)


def _of(whole: Round, rows: list[SequenceRound]) -> Round:
    """A round as it concerns these rows."""
    if len(rows) == len(whole.rows):
        return whole
    keys = {row.key for row in rows}
    return replace(whole, rows=rows, others=[row for row in whole.rows if row.key not in keys])


def _too_much(row: RunningSequence, tree: Tree) -> DraftError:
    return DraftError(
        f"the draft {tree.source!r} proposed {tree.depth} tokens in a row, but the text may only grow by "
        f"{row.remaining}: propose at most `row.remaining - 1`"
    )
