"""The loop: every strategy, every draft and plain decoding are turns of `Engine.step`.

In a round, the draft proposes nodes for each sequence, the target computes logits for all of them in one pass, each
sequence's strategy takes its ordinary steps as far as these logits reach, and the results are committed. So the draft
only decides which logits are computed early. The sequences of all requests share the rounds; prompts are read between
them, in passes of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor

from specdec.core.drafts import Draft, Plan, Proposer
from specdec.core.rounds import CHUNK, SHARED_CHUNK, Round, SequenceRound
from specdec.core.sequence import RunningSequence
from specdec.core.tree import EMPTY, Scores, Tree
from specdec.engine.memory_budget import MemoryBudget
from specdec.engine.prefix_cache import PrefixCache
from specdec.engine.request import Request
from specdec.engine.scheduler import OpenDraft, Scheduler
from specdec.engine.turn import Stopwatch, Turn
from specdec.errors import DraftError
from specdec.models import LanguageModel, Session

_IDLE_DRAFTS = 2  # proposers without sequences that keep their buffers for the next request


class Engine:
    """The running sequences of one target: `submit` adds requests, `step` takes all of them a round further.

    Only one thread at a time may call it, with gradients and autocast off (`Driver`). An error of one request ends that
    request alone.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        kv_budget: int | float | None = None,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self.model = model
        self._device, self._is_offloaded = (
            model.device,
            model.is_offloaded,
        )  # kept, since each property walks all modules
        self.budget = MemoryBudget(kv_budget, model)
        self._drafts: dict[int, OpenDraft] = {}  # by the identity of the drafter
        self.scheduler = Scheduler(model, prefix_cache, self._drafts)
        self.waiting: deque[Request] = deque()
        self.prefilling: list[RunningSequence] = []
        self.running: list[RunningSequence] = []
        self._requests: dict[int, Request] = {}  # by the ids of their sequences
        self._last_id = 0
        self._others_first = False

    @property
    def target(self) -> Session:
        """The target's session, which holds its keys and values."""
        return self.scheduler.target

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return not (self.waiting or self.prefilling or self.running)

    def submit(self, request: Request) -> None:
        """Adds a request to those that wait for memory."""
        request.counted = True
        request.pacing.users += 1
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Ends a request and frees its keys and values."""
        with suppress(ValueError):
            self.waiting.remove(request)
        self._end(request)

    def abort(self, error: BaseException) -> None:
        """Ends every request with `error` and drops all keys and values, since a pass may have been interrupted."""
        for request in {id(request): request for request in [*self.waiting, *self._admitted]}.values():
            request.error = error
            self._finish(request)
        self.waiting.clear()
        self.prefilling, self.running, self._requests, self._drafts = [], [], {}, {}
        self.scheduler = Scheduler(self.model, self.scheduler.prefix_cache, self._drafts)

    def step(self) -> None:
        """Admits requests, reads at most one chunk of prompts, and runs a round of the sequences that were running."""
        while self.waiting and self.budget.fits(self.waiting[0], self._admitted):
            request = self.waiting[0]
            self._admit(request)
            self.waiting.popleft()
            if request.encode is not None and self.running:
                break  # running sequences wait for one encoder pass at a time
        # A sequence whose prompt ends in this step joins in the next one, after its first token is delivered.
        running = list(self.running)
        if self.prefilling:
            self._prefill()
        running = [seq for seq in running if seq.id in self._requests]
        if running:
            self._round(running)

    @property
    def _admitted(self) -> list[Request]:
        """The requests with sequences in the engine."""
        return list({id(request): request for request in self._requests.values()}.values())

    def _admit(self, request: Request) -> None:
        """Takes in a request: starts its draft, runs its encoder, makes room in the caches."""
        try:
            if request.drafter is not None and id(request.drafter) not in self._drafts:
                self._start_draft(request.drafter)
            if request.encode is not None:
                request.encoding = request.encode()
            for seq in request.seqs:
                self._last_id += 1
                seq.id = self._last_id
                self._requests[seq.id] = request
            self._make_room()
            self.scheduler.add(request)
        except Exception as error:
            return self._end(request, error)
        self.prefilling += request.seqs

    def _make_room(self) -> None:
        """Bounds the caches of target and drafts, and shrinks the prefix cache to the memory that is left."""
        limit, admitted = self.budget.limit, self._admitted
        if limit is None:
            return
        ample = self.budget.ample(admitted)
        self.target.bound(*ample)
        for draft in self._drafts.values():
            if draft.proposer.cache is not None:
                draft.proposer.cache.bound(*ample)
        if self.scheduler.prefix_cache is not None:
            self.scheduler.prefix_cache.room = limit - max(self.budget.bytes(admitted), self.budget.kept_bytes)
            self.scheduler.prefix_cache.shrink()

    def _prefill(self) -> None:
        """One pass over unread prompts: the first ones, as many as fit into a chunk."""
        ready = self._ready()
        if not ready:
            return
        request = self._requests[ready[0].id]
        others_wait = any(self._requests[seq.id] is not request for seq in self.running)
        limit = SHARED_CHUNK if others_wait else CHUNK
        chunk = min(request.prefill_chunk or limit, limit)
        if request.traced:
            chunk = max(one.length for seq in request.seqs for one in seq.batch_seqs)
        self._round(self._batch(ready, request, chunk), chunk)
        self.running += [seq for seq in self.prefilling if seq.prefilled]
        self.prefilling = [seq for seq in self.prefilling if not seq.prefilled]

    def _ready(self) -> list[RunningSequence]:
        """Prompts to read next.

        Every second time, other requests' prompts (shortest first) precede the first request's, so that a long prompt
        does not hold them up.
        """
        order, first = list(self.prefilling), self._requests[self.prefilling[0].id]
        if self._others_first:
            order.sort(key=lambda seq: (0, seq.length) if self._requests[seq.id] is not first else (1, 0))
        self._others_first = not self._others_first
        ready: list[RunningSequence] = []
        unread = 0
        for seq in order:
            if unread >= CHUNK:
                break  # later, a sequence may continue what is read until then
            try:
                if seq.id not in self._requests or not self.scheduler.follow(seq, self._requests[seq.id]):
                    continue
            except Exception as error:  # no cache row could be made
                self._fail([seq], error)
                continue
            ready.append(seq)
            unread += self.scheduler.unread(seq)
        return [seq for seq in ready if seq.id in self._requests]

    def _batch(self, seqs: Sequence[RunningSequence], request: Request, chunk: int) -> list[RunningSequence]:
        """The first of `seqs` that can share a pass, up to `chunk` tokens, of which half may be padding."""
        batch: list[RunningSequence] = []
        widest = tokens = 0
        for seq in seqs:
            own = self._requests[seq.id]
            if (own.traced, own.prefill_chunk) != (request.traced, request.prefill_chunk):
                continue
            size = min(max(map(self.scheduler.unread, seq.batch_seqs)), chunk)
            widest, tokens = max(widest, size), tokens + size
            if batch and (len(batch) + 1) * widest > min(chunk, 2 * tokens):
                break
            batch.append(seq)
        return batch

    def _round(self, seqs: list[RunningSequence], chunk: int | None = None) -> None:
        """One round: propose, verify, walk, commit. With `chunk`: over unread prompts, at most that many
        tokens of each.
        """
        watch = Stopwatch(self._device)
        proposals = self._propose(seqs, chunk)
        watch.lap("draft")
        turns = [self._turn(seq, proposals.get(seq.id), chunk) for seq in seqs if seq.id in self._requests]
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

    def _propose(self, seqs: Sequence[RunningSequence], chunk: int | None) -> dict[int, Tree]:
        """The proposals by sequence id, for sequences with a draft and at least one token.

        While prompts are read, only instant drafts propose: a first token does not wait until a draft model has read
        the prompt, unless the target is offloaded, whose pass takes far longer.
        """
        proposals: dict[int, Tree] = {}
        for draft, group in self._by_draft(seqs):
            if chunk is not None and not (draft.drafter.instant or self._is_offloaded):
                continue
            group = [seq for seq in group if seq.tokens and (chunk is None or self._ends(seq, chunk))]
            plans = self._plans(group)
            group = [seq for seq in group if seq.id in plans]
            # An instant draft runs no model: asked for one request at a time, its failure is that request's alone.
            calls = (
                [own for _, own in _grouped(group, lambda seq: self._requests[seq.id])]
                if draft.drafter.instant
                else [group]
            )
            for together in calls:
                proposals |= self._proposals(draft.proposer, together, [plans[seq.id] for seq in together])
        return proposals

    def _proposals(self, proposer: Proposer, seqs: Sequence[RunningSequence], plans: Sequence[Plan]) -> dict[int, Tree]:
        """One draft's proposals by sequence id; a failure ends the requests.

        Called for plans that allow no guess too: a draft that copies goes on learning how often it would be right.
        """
        if not seqs:
            return {}
        try:
            trees = [_allowed(seq, tree) for seq, tree in zip(seqs, proposer.propose(seqs, plans), strict=True)]
            for seq, tree in zip(seqs, trees, strict=True):
                if tree.tokens and tree.depth >= seq.remaining:
                    self._fail([seq], _too_much(seq, tree))
                if tree.tokens and not 0 <= min(tree.tokens) <= max(tree.tokens) < self.model.vocab_size:
                    self._fail([seq], _unknown_ids(tree, self.model.vocab_size))
        except Exception as error:
            self._fail(seqs, error)
            return {}
        return {seq.id: tree for seq, plan, tree in zip(seqs, plans, trees, strict=True) if plan.limit > 0}

    def _plans(self, seqs: Sequence[RunningSequence]) -> dict[int, Plan]:
        """The plans by sequence id; a schedule that raises ends the requests that share it."""
        plans: dict[int, Plan] = {}
        for pacing, group in _grouped(seqs, lambda seq: self._requests[seq.id].pacing):
            try:
                plans |= {seq.id: plan for seq, plan in zip(group, pacing.schedule.plan(group), strict=True)}
            except Exception as error:
                self._fail(group, error)
        return plans

    def _by_draft(self, seqs: Iterable[RunningSequence]) -> list[tuple[OpenDraft, list[RunningSequence]]]:
        """The sequences grouped by their drafts; those without one are left out."""
        drafts = _grouped(seqs, lambda seq: self._drafts.get(id(self._requests[seq.id].drafter)))
        return [(draft, group) for draft, group in drafts if draft is not None]

    def _start_draft(self, drafter: Draft) -> None:
        """Starts a draft's proposer, which all its sequences share."""
        if drafter.hidden_layers:
            self.model.check_hidden_states(drafter.hidden_layers)
        proposer = drafter.start(self.model.vocab_size)
        if not isinstance(proposer, Proposer):
            kind = type(proposer).__name__
            raise DraftError(f"{drafter!r}.start must return a `specdec.core.drafts.Proposer`, got {kind}: subclass it")
        self._drafts[id(drafter)] = OpenDraft(drafter, proposer)

    def _turn(self, seq: RunningSequence, proposal: Tree | None, chunk: int | None) -> Turn:
        """A sequence's turn in this round; with `chunk`, that many tokens of its prompt unless they end it."""
        rows = [one.cache_row for one in seq.batch_seqs if one.cache_row is not None]
        self.target.refresh(rows)
        cached = [self.target.length(row) for row in rows]
        if chunk is not None and not self._ends(seq, chunk):
            parts = [one.chunk(length, chunk) for one, length in zip(seq.batch_seqs, cached, strict=True)]
        else:
            tree = EMPTY if proposal is None else proposal
            parts = [one.part(length, tree) for one, length in zip(seq.batch_seqs, cached, strict=True)]
        return Turn(seq, rows, cached, parts, asked=proposal is not None)

    def _ends(self, seq: RunningSequence, chunk: int) -> bool:
        """Whether a pass of `chunk` tokens finishes the prompt, and no other sequence is waiting to fork from it."""
        unread = max(map(self.scheduler.unread, seq.batch_seqs))
        return unread <= chunk and (unread <= 1 or not self.scheduler.leads(seq))

    def _verify(self, turns: Sequence[Turn]) -> bool:
        """One target pass over all parts, whose results go into `turns`; False if it failed, or had no parts."""
        parts = [(seq, part, num_cached) for turn in turns for seq, part, num_cached in turn.batch_seqs]
        if not parts:
            return False
        requests = {self._requests[turn.seq.id] for turn in turns}
        embeds = [seq.given(num_cached, len(part.text)) for seq, part, num_cached in parts]
        drafts = [request.drafter for request in requests if request.drafter is not None]
        layers = sorted({layer for drafter in drafts for layer in drafter.hidden_layers})
        every_layer = any(request.output_hidden_states or request.last_hidden for request in requests)
        try:
            outputs = self.target.forward(
                [cache_row for turn in turns for cache_row in turn.cache_rows],
                [part.tree for _, part, _ in parts],
                [part.keep for _, part, _ in parts],
                embeds=embeds if any(one is not None for one in embeds) else None,
                text_lengths=[0 if part.complete else seq.length for seq, part, _ in parts],
                output_hidden_states=every_layer or layers,
                output_attentions=any(request.output_attentions for request in requests),
            )
        except Exception as error:
            self._fail([turn.seq for turn in turns], error)
            return False
        scores = iter(outputs)
        for turn in turns:
            own = next(scores)
            turn.scores, turn.hidden = self._wanted(turn.seq, own), self._for_draft(turn.seq, own)
            turn.passes = own.passes
            if turn.seq.unconditional is not None:
                other = next(scores)
                turn.scores = replace(turn.scores, unconditional=other.logits)
                turn.passes = [*turn.passes, *other.passes]
        return True

    def _wanted(self, seq: RunningSequence, scores: Scores) -> Scores:
        """The scores with only those hidden states and attentions that the sequence's request keeps."""
        request, hidden = self._requests[seq.id], scores.hidden_states
        if hidden is None and scores.attentions is None:
            return scores
        if not (request.output_hidden_states or request.last_hidden):
            hidden = None
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
        """Runs every sequence's strategy as far as the logits reach; leaves out sequences whose strategy raised.

        Their requests end only after the others are committed: until then no row of the cache may move.
        """
        for turn in turns:
            try:
                if turn.complete and turn.scores is not None:
                    turn.walk = turn.seq.walk(turn.parts[0], turn.scores)
            except Exception as error:
                turn.error = error
        return [turn for turn in turns if turn.error is None]

    def _commit(self, turns: Sequence[Turn]) -> list[SequenceRound]:
        """The one writer: updates caches, sequences and drafts."""
        committed = [part for turn in turns for part in turn.committed]
        self.target.commit(
            [row for row, _, _ in committed],
            [path for _, path, _ in committed],
            texts=[text for _, _, text in committed],
        )
        shares, commits = [], {}
        for turn in turns:
            if turn.walk is not None or turn.hidden:
                commits[turn.seq.id] = turn.commit()
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
                draft.proposer.update([commits[seq.id] for seq in group])
            except Exception as error:
                self._fail(group, error)
        return shares

    def _deliver(self, turns: Sequence[Turn], round_: Round) -> None:
        """Gives the round to requests, and to the schedules that learn from it."""
        shares = {share.id: share for share in round_.seqs}
        here = [turn.seq for turn in turns if turn.seq.id in self._requests]
        passes = {turn.seq.id: turn.passes for turn in turns}
        for request, seqs in _grouped(here, lambda seq: self._requests[seq.id]):
            request.passes += len(set().union(*(passes[seq.id] for seq in seqs)))
            request.rounds.append(_of(round_, [shares[seq.id] for seq in seqs if seq.id in shares]))
        walked = [seq for seq in here if seq.id in shares]
        for pacing, seqs in _grouped(walked, lambda seq: self._requests[seq.id].pacing):
            try:
                pacing.schedule = pacing.schedule.after(_of(round_, [shares[seq.id] for seq in seqs]))
            except Exception as error:
                self._fail(seqs, error)

    def _release(self, seqs: Iterable[RunningSequence]) -> None:
        """Removes sequences with their keys and values; a request without sequences is done."""
        gone = [seq for seq in seqs if seq.id in self._requests]
        if not gone:
            return
        self.scheduler.remove(gone, self._requests)
        for draft, group in self._by_draft(gone):
            try:
                draft.proposer.drop([seq.id for seq in group])
            except Exception:  # a proposer that cannot drop sequences is dropped itself
                del self._drafts[id(draft.drafter)]
        requests = {self._requests.pop(seq.id) for seq in gone}
        self.running = [seq for seq in self.running if seq.id in self._requests]
        self.prefilling = [seq for seq in self.prefilling if seq.id in self._requests]
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
        """Ends a request before its sequences have finished."""
        request.error = error or request.error
        self._release(request.seqs)
        self._finish(request)

    def _finish(self, request: Request) -> None:
        if not request.done:
            request.done = True
            if request.counted:
                request.pacing.users -= 1


def _grouped(
    seqs: Iterable[RunningSequence], of: Callable[[RunningSequence], Any]
) -> list[tuple[Any, list[RunningSequence]]]:
    """The sequences grouped by the identity of `of(seq)`, groups in the order of their first sequence."""
    groups: dict[int, tuple[Any, list[RunningSequence]]] = {}
    for seq in seqs:
        groups.setdefault(id(of(seq)), (of(seq), []))[1].append(seq)
    return list(groups.values())


def _allowed(seq: RunningSequence, tree: Tree) -> Tree:
    """A chain that was not drawn, cut before the first token that processors forbid; other trees as they are."""
    allowed = seq.task.allowed
    if allowed is None or not tree.tokens or not tree.is_chain or tree.q is not None or seq.tree.tokens:
        return tree
    kept = allowed(seq.tokens, tree.tokens)
    return Tree.chain(tree.tokens[:kept], tree.confidence and tree.confidence[:kept], source=tree.source)


def _of(round_: Round, seqs: list[SequenceRound]) -> Round:
    """The round with these sequences as its own, and the rest as others."""
    if len(seqs) == len(round_.seqs):
        return round_
    ids = {seq.id for seq in seqs}
    return replace(round_, seqs=seqs, others=[seq for seq in round_.seqs if seq.id not in ids])


def _too_much(seq: RunningSequence, tree: Tree) -> DraftError:
    return DraftError(
        f"the draft {tree.source!r} proposed {tree.depth} tokens in a row, but the text may only grow by "
        f"{seq.remaining}: propose at most `seq.remaining - 1`"
    )


def _unknown_ids(tree: Tree, vocab_size: int) -> DraftError:
    return DraftError(
        f"the draft {tree.source!r} proposed ids that the target lacks: propose ids from 0 to {vocab_size - 1}"
    )
