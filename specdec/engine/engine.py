"""The loop: every strategy, every draft and plain decoding are turns of `Engine.step`.

A round asks each sequence what it must see, lets the draft add what it may use, runs the target once over all of it,
and lets the sequence's strategy walk as far as the target's scores reach. The draft only decides which scores exist
early. Sequences of all requests share the rounds; prompts are read between them, in passes of their own.
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
from specdec.engine.scheduler import OpenDraft, Scheduler
from specdec.engine.turn import Stopwatch, Turn
from specdec.errors import DraftError
from specdec.models import LanguageModel, Session, plain_modes
from specdec.proposers import BestLeaf

CHUNK = 2048
"""Prompt tokens that a pass reads while no other request waits for it."""
SHARED_CHUNK = 256
"""The same while sequences of other requests are running, which wait for no more than this."""


_IDLE_DRAFTS = 2  # sessions without sequences that keep their buffers for the next request


class Engine:
    """A running set of sequences on one target: requests come in, and `step` takes all of them a round further.

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
        self.scheduler = Scheduler(model, prefixes, self._drafts)
        self.waiting: deque[Request] = deque()
        self.prefilling: list[RunningSequence] = []
        self.running: list[RunningSequence] = []
        self._requests: dict[int, Request] = {}  # by the keys of their sequences
        self._keys = 0
        self._others_first = False

    @property
    def target(self) -> Session:
        """The target's keys and values."""
        return self.scheduler.target

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.waiting or self.prefilling or self.running)

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
        self.prefilling, self.running, self._requests, self._drafts = [], [], {}, {}
        self.scheduler = Scheduler(self.model, self.scheduler.prefixes, self._drafts)

    def step(self) -> None:
        """Admits requests, reads at most a chunk of their prompts, and takes a round with all sequences that
        had begun.
        """
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
                break  # running sequences wait for one encoder at a time
        running = list(self.running)
        if self.prefilling:
            self._read()  # of sequences that begin here the first token is told before anything else is done
        running = [seq for seq in running if seq.id in self._requests]
        if running:
            self._round(running)

    @property
    def _admitted(self) -> list[Request]:
        """The requests that have sequences."""
        return list({id(request): request for request in self._requests.values()}.values())

    def _admit(self, request: Request) -> None:
        """Gives a request's sequences their places; what was kept of others makes room for them."""
        try:
            if request.drafter is not None and id(request.drafter) not in self._drafts:
                self._start_draft(request.drafter)
            if request.encode is not None:
                request.encoding = request.encode()
            for seq in request.seqs:
                self._keys += 1
                seq.id = self._keys
                self._requests[seq.id] = request
            self._make_room()
            self.scheduler.add(request)
        except Exception as error:
            return self._end(request, error)
        self.prefilling += request.seqs

    def _make_room(self) -> None:
        """Says how far the buffers may grow, and lets texts of sequences that have left take no more than what
        is over.
        """
        limit, admitted = self.budget.limit, self._admitted
        if limit is None:
            return
        ample = self.budget.ample(admitted)
        self.target.bound(*ample)
        for draft in self._drafts.values():
            if draft.session.cache is not None:
                draft.session.cache.bound(*ample)
        if self.scheduler.prefixes is not None:
            self.scheduler.prefixes.room = limit - max(self.budget.bytes(admitted), self.budget.kept_bytes)
            self.scheduler.prefixes.shrink()

    def _read(self) -> None:
        """One pass over prompts that are not read yet: the first ones, as many as a chunk has room for."""
        ready = self._ready()
        if not ready:
            return
        request = self._requests[ready[0].id]
        waited_for = any(self._requests[seq.id] is not request for seq in self.running)
        usual = SHARED_CHUNK if waited_for else CHUNK
        most = min(request.prefill_chunk or usual, usual)
        if request.traced:
            most = max(one.length for seq in request.seqs for one in seq.batch_seqs)
        self._round(self._batch(ready, request, most), most)
        self.running += [seq for seq in self.prefilling if seq.prefilled]
        self.prefilling = [seq for seq in self.prefilling if not seq.prefilled]

    def _ready(self) -> list[RunningSequence]:
        """The sequences that may be read next: those of the first request, every other time the shortest of the
        others.
        """
        order, first = list(self.prefilling), self._requests[self.prefilling[0].id]
        if self._others_first:
            order.sort(key=lambda seq: (0, seq.length) if self._requests[seq.id] is not first else (1, 0))
        self._others_first = not self._others_first
        ready: list[RunningSequence] = []
        unread = 0
        for seq in order:
            if unread >= CHUNK:
                break  # a place now would keep the sequence from what is read before its turn
            try:
                if seq.id not in self._requests or not self.scheduler.follow(seq, self._requests[seq.id]):
                    continue
            except Exception as error:  # its place cannot be had
                self._fail([seq], error)
                continue
            ready.append(seq)
            unread += self.scheduler.unread(seq)
        return [seq for seq in ready if seq.id in self._requests]

    def _batch(self, seqs: Sequence[RunningSequence], request: Request, most: int) -> list[RunningSequence]:
        """The first of these sequences that read alike, as many as `most` tokens have room for; half may be padding."""
        batch: list[RunningSequence] = []
        widest = tokens = 0
        for seq in seqs:
            own = self._requests[seq.id]
            if (own.traced, own.prefill_chunk) != (request.traced, request.prefill_chunk):
                continue
            size = min(max(map(self.scheduler.unread, seq.batch_seqs)), most)
            widest, tokens = max(widest, size), tokens + size
            if batch and (len(batch) + 1) * widest > min(most, 2 * tokens):
                break
            batch.append(seq)
        return batch

    def _round(self, seqs: list[RunningSequence], most: int | None = None) -> None:
        """One round: draft, verify, select, commit; of prompts that are longer than `most` a chunk is read."""
        watch = Stopwatch(self._device)
        proposals = self._propose(seqs, most)
        watch.lap("draft")
        turns = [self._turn(seq, proposals.get(seq.id), most) for seq in seqs if seq.id in self._requests]
        if not self._verify(turns):
            return
        watch.lap("verify")
        walked = self._walk(turns)
        watch.lap("select")
        shares = self._commit(walked)
        for turn in turns:
            if turn.error is not None:
                self._fail([turn.seq], turn.error)
        self._deliver(walked, watch.round(shares, sum(turn.nodes for turn in turns)))
        self._release([turn.seq for turn in walked if turn.seq.finish is not None])

    def _propose(self, seqs: Sequence[RunningSequence], most: int | None) -> dict[int, Tree]:
        """By key what the target may use, of sequences that have a draft and a text to go by.

        Where prompts are read only drafts that guess at once are asked: no first token waits for a draft's reading,
        unless a pass of the target takes far longer than that.
        """
        proposals: dict[int, Tree] = {}
        for draft, group in self._by_draft(seqs):
            if most is not None and not (draft.drafter.instant or self._is_offloaded):
                continue
            named = [seq for seq in group if seq.tokens and (most is None or self._ends(seq, most))]
            plans = self._plans(named)
            named = [seq for seq in named if seq.id in plans]
            # What needs no pass of a model is asked request by request: its failures are then one request's alone.
            alone = _grouped(named, lambda seq: self._requests[seq.id]) if draft.drafter.instant else [(None, named)]
            for _, seqs_ in alone:
                proposals |= self._proposals(draft.session, seqs_, [plans[seq.id] for seq in seqs_])
        return proposals

    def _proposals(
        self, session: DraftSession, seqs: Sequence[RunningSequence], plans: Sequence[Plan]
    ) -> dict[int, Tree]:
        """What a draft proposes for these sequences, of those whose plans let it; its failure ends their requests."""
        if not seqs:
            return {}
        try:
            trees = [_allowed(seq, tree) for seq, tree in zip(seqs, session.propose(seqs, plans), strict=True)]
            for seq, tree in zip(seqs, trees, strict=True):
                if tree.tokens and tree.depth >= seq.remaining:
                    self._fail([seq], _too_much(seq, tree))
                if tree.tokens and not 0 <= min(tree.tokens) <= max(tree.tokens) < self.model.vocab_size:
                    self._fail([seq], DraftError(f"the draft {tree.source!r} proposed ids that the target lacks"))
        except Exception as error:
            self._fail(seqs, error)
            return {}
        return {seq.id: tree for seq, plan, tree in zip(seqs, plans, trees, strict=True) if plan.limit > 0}

    def _plans(self, seqs: Sequence[RunningSequence]) -> dict[int, Plan]:
        """Every sequence's plan by its key, by its request's pacing; a schedule that raises ends those that go
        by it.
        """
        plans: dict[int, Plan] = {}
        for pacing, group in _grouped(seqs, lambda seq: self._requests[seq.id].pacing):
            try:
                plans |= {seq.id: plan for seq, plan in zip(group, pacing.schedule.plan(group), strict=True)}
            except Exception as error:
                self._fail(group, error)
        return plans

    def _by_draft(self, seqs: Iterable[RunningSequence]) -> list[tuple[OpenDraft, list[RunningSequence]]]:
        """The sequences that have a draft, by its session."""
        drafts = _grouped(seqs, lambda seq: self._drafts.get(id(self._requests[seq.id].drafter)))
        return [(draft, group) for draft, group in drafts if draft is not None]

    def _start_draft(self, drafter: BatchDrafter) -> None:
        """Opens the session of a drafter; all sequences that it helps are in one."""
        if drafter.hidden_layers:
            self.model.check_hidden_states(drafter.hidden_layers)
        session = drafter.start(self.model.vocab_size)
        if not isinstance(session, DraftSession):
            kind = type(session).__name__
            raise DraftError(f"{drafter!r} must start a `specdec.core.drafts.DraftSession`, got {kind}: subclass it")
        self._drafts[id(drafter)] = OpenDraft(drafter, session if session.guesses_branches else BestLeaf(session))

    def _turn(self, seq: RunningSequence, proposal: Tree | None, most: int | None) -> Turn:
        """A sequence's part of this round, and that of its unconditional sequence."""
        cache_rows = [one.cache_row for one in seq.batch_seqs if one.cache_row is not None]
        self.target.refresh(cache_rows)
        num_cached = [self.target.length(cache_row) for cache_row in cache_rows]
        if most is not None and not self._ends(seq, most):
            parts = [one.chunk(h, most) for one, h in zip(seq.batch_seqs, num_cached, strict=True)]
        else:
            parts = [
                one.part(h, EMPTY if proposal is None else proposal)
                for one, h in zip(seq.batch_seqs, num_cached, strict=True)
            ]
        return Turn(seq, cache_rows, num_cached, parts, asked=proposal is not None)

    def _ends(self, seq: RunningSequence, most: int) -> bool:
        """Whether one pass over `most` tokens comes to the end of the sequence's prompt, which nobody waits to
        continue.
        """
        unread = max(map(self.scheduler.unread, seq.batch_seqs))
        return unread <= most and (unread <= 1 or not self.scheduler.leads(seq))

    def _verify(self, turns: Sequence[Turn]) -> bool:
        """One target pass over every sequence; whether it came through."""
        parts = [(seq, part, num_cached) for turn in turns for seq, part, num_cached in turn.batch_seqs]
        if not parts:
            return False
        requests = {self._requests[turn.seq.id] for turn in turns}
        given = [seq.given(num_cached, len(part.text)) for seq, part, num_cached in parts]
        drafts = [request.drafter for request in requests if request.drafter is not None]
        layers = sorted({layer for drafter in drafts for layer in drafter.hidden_layers})
        traced = any(r.output_hidden_states or r.last_hidden for r in requests)
        try:
            found = self.target.forward(
                [cache_row for turn in turns for cache_row in turn.cache_rows],
                [part.tree for _, part, _ in parts],
                [part.keep for _, part, _ in parts],
                embeds=given if any(one is not None for one in given) else None,
                text_lengths=[0 if part.complete else seq.length for seq, part, _ in parts],
                output_hidden_states=traced or layers,
                output_attentions=any(request.output_attentions for request in requests),
            )
        except Exception as error:
            self._fail([turn.seq for turn in turns], error)
            return False
        scores = iter(found)
        for turn in turns:
            said = next(scores)
            turn.scores, turn.hidden = self._wanted(turn.seq, said), self._for_draft(turn.seq, said)
            turn.passes = said.passes
            if turn.seq.unconditional is not None:
                beside = next(scores)
                turn.scores = replace(turn.scores, unconditional=beside.logits)
                turn.passes = [*turn.passes, *beside.passes]
        return True

    def _wanted(self, seq: RunningSequence, scores: Scores) -> Scores:
        """The scores with those hidden states and attentions that the sequence's request keeps."""
        request = self._requests[seq.id]
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

    def _for_draft(self, seq: RunningSequence, scores: Scores) -> list[Tensor]:
        """The hidden states of the layers that the sequence's draft reads."""
        drafter, hidden = self._requests[seq.id].drafter, scores.hidden_states
        return [] if drafter is None or hidden is None else [hidden[layer] for layer in drafter.hidden_layers]

    def _walk(self, turns: Sequence[Turn]) -> list[Turn]:
        """Takes every sequence's strategy as far as the scores reach; those whose processors or criteria raise are left
        out.

        Their requests end after the others' keys and values are committed: until then no sequence may move.
        """
        for turn in turns:
            try:
                if turn.complete and turn.scores is not None:
                    turn.walk = turn.seq.walk(turn.parts[0], turn.scores)
            except Exception as error:
                turn.error = error
        return [turn for turn in turns if turn.error is None]

    def _commit(self, turns: Sequence[Turn]) -> list[SequenceRound]:
        """The one writer: keys and values, texts and outputs, and what drafts know of them."""
        committed = [part for turn in turns for part in turn.committed]
        self.target.commit(
            [s for s, _, _ in committed], [path for _, path, _ in committed], texts=[text for _, _, text in committed]
        )
        shares = []
        commits = {turn.seq.id: turn.commit() for turn in turns if turn.walk is not None or turn.hidden}
        for turn in turns:
            if turn.walk is None:
                continue
            seq, proposal = turn.seq, turn.parts[0].proposal
            instant = (drafter := self._requests[seq.id].drafter) is None or drafter.instant
            prefill = not seq.prefilled or (turn.asked and not seq.drafted and not instant)
            shares.append(turn.share(prefill))
            seq.take(turn.walk)
            seq.drafted |= bool(proposal.tokens or proposal.source)
        for draft, group in self._by_draft([turn.seq for turn in turns if turn.seq.id in commits]):
            try:
                draft.session.commit([commits[seq.id] for seq in group])
            except Exception as error:
                self._fail(group, error)
        return shares

    def _deliver(self, turns: Sequence[Turn], whole: Round) -> None:
        """Tells requests and schedules of the round: their own sequences, and the others that shared its passes."""
        shares = {share.id: share for share in whole.seqs}
        here = [turn.seq for turn in turns if turn.seq.id in self._requests]
        passes = {turn.seq.id: turn.passes for turn in turns}
        for request, seqs in _grouped(here, lambda seq: self._requests[seq.id]):
            request.passes += len(set().union(*(passes[seq.id] for seq in seqs)))
            request.rounds.append(_of(whole, [shares[seq.id] for seq in seqs if seq.id in shares]))
        prefilled = [seq for seq in here if seq.id in shares]
        for pacing, seqs in _grouped(prefilled, lambda seq: self._requests[seq.id].pacing):
            try:
                pacing.schedule = pacing.schedule.after(_of(whole, [shares[seq.id] for seq in seqs]))
            except Exception as error:
                self._fail(seqs, error)

    def _release(self, seqs: Iterable[RunningSequence]) -> None:
        """Sequences leave, with their keys and values; a request whose sequences are all gone is done."""
        gone = [seq for seq in seqs if seq.id in self._requests]
        if not gone:
            return
        self.scheduler.remove(gone, self._requests)
        for draft, group in self._by_draft(gone):
            try:
                draft.session.release([seq.id for seq in group])
            except Exception:  # of a session that forgets nothing: it is given up
                del self._drafts[id(draft.drafter)]
        keys = {seq.id for seq in gone}
        requests = {self._requests.pop(key) for key in keys}
        self.running = [seq for seq in self.running if seq.id not in keys]
        self.prefilling = [seq for seq in self.prefilling if seq.id not in keys]
        for request in requests:
            if all(seq.id not in self._requests for seq in request.seqs):
                self._finish(request)
        used = {id(request.drafter) for request in self._requests.values()}
        idle = [key for key in self._drafts if key not in used]
        for key in idle if self.budget.limit is not None else idle[:-_IDLE_DRAFTS]:
            del self._drafts[key]

    def _fail(self, seqs: Sequence[RunningSequence], error: Exception) -> None:
        """Ends the requests of these sequences."""
        for request in {self._requests[seq.id] for seq in seqs if seq.id in self._requests}:
            self._end(request, error)

    def _end(self, request: Request, error: Exception | None = None) -> None:
        """Ends a request early."""
        request.error = error or request.error
        self._release(request.seqs)
        self._finish(request)

    def _finish(self, request: Request) -> None:
        if not request.done:
            request.done = True
            request.pacing.users -= request.counted


def _grouped(
    seqs: Iterable[RunningSequence], of: Callable[[RunningSequence], Any]
) -> list[tuple[Any, list[RunningSequence]]]:
    """The sequences by the identity of what they are `of`, in the order of their first."""
    groups: dict[int, tuple[Any, list[RunningSequence]]] = {}
    for seq in seqs:
        groups.setdefault(id(of(seq)), (of(seq), []))[1].append(seq)
    return list(groups.values())


def _allowed(seq: RunningSequence, tree: Tree) -> Tree:
    """What the sequence's processors would let through of a chain that nobody drew; other trees as they are."""
    allowed = seq.task.allowed
    if allowed is None or not tree.tokens or not tree.is_chain or tree.q is not None or seq.tree.tokens:
        return tree
    kept = allowed(seq.tokens, tree.tokens)
    return Tree.chain(tree.tokens[:kept], tree.confidence and tree.confidence[:kept], source=tree.source)


def _of(whole: Round, seqs: list[SequenceRound]) -> Round:
    """A round as it concerns these sequences."""
    if len(seqs) == len(whole.seqs):
        return whole
    keys = {seq.id for seq in seqs}
    return replace(whole, seqs=seqs, others=[seq for seq in whole.seqs if seq.id not in keys])


def _too_much(seq: RunningSequence, tree: Tree) -> DraftError:
    return DraftError(
        f"the draft {tree.source!r} proposed {tree.depth} tokens in a row, but the text may only grow by "
        f"{seq.remaining}: propose at most `seq.remaining - 1`"
    )
